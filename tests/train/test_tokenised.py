"""The cache of tokenised sources: the same records back, and new ones whenever anything they depend on changes."""

import json

import pytest
from transformers import AutoTokenizer

import train.records
from mtp import UserError
from tests.infer.conftest import TEMPLATE
from tests.train.texts import chat_target, texts, turns, write
from train.config import Source
from train.records import read_records

LINES = [{"messages": turns(("user", "a"), ("assistant", "b"))}, {"text": "abc"}, {"text": 1}, {"none": 1}]


@pytest.fixture
def setting(tmp_path, monkeypatch):
    """Returns a target, a file, and a function that reads it and says whether it was tokenised anew."""
    target = chat_target(tmp_path)
    path, worked = write(tmp_path / "d.jsonl", *LINES), []
    real = train.records.to_records
    monkeypatch.setattr(train.records, "to_records", lambda *given: worked.append(1) or real(*given))

    def load(source=path, target=target, **more):
        worked.clear()
        records, report = read_records(source, target, cache=tmp_path / "cache", **more)
        found = [(texts(record, target), record.prompt_length, record.origin) for record in records]
        return found, report, bool(worked)

    return target, tmp_path, load


def test_a_second_read_gives_the_same_without_tokenising(setting):
    _, folder, load = setting
    first, second = load(), load()
    assert first[:2] == second[:2]
    assert (first[2], second[2]) == (True, False)
    assert second[1].skipped.total() == 2
    assert second[1].named()[0] == f"{folder / 'd.jsonl'}:3: text is not a string"
    moved = folder / "moved.jsonl"
    (folder / "d.jsonl").rename(moved)
    found, report, worked = load(str(moved))
    assert not worked
    assert report.named()[0].startswith(f"{moved}:3")
    assert found[0][2] == f"{moved}:1"


def change_content(target, folder):
    write(folder / "d.jsonl", *LINES, {"text": "more"})


def change_template(target, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE.replace("<|end|>", "<|end|>.")
    tokenizer.save_pretrained(folder)


def change_tokenizer(target, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["abc"])
    tokenizer.save_pretrained(folder)


def change_eos(target, folder):
    target.model.generation_config.eos_token_id = [3, 5]


@pytest.mark.parametrize("change", [change_content, change_template, change_tokenizer, change_eos])
def test_whatever_the_tokens_depend_on_rebuilds(setting, change):
    target, folder, load = setting
    load()
    change(target, folder)
    assert load()[2]
    assert not load()[2]


def test_another_shape_rebuilds(setting):
    _, folder, load = setting
    load()
    assert load(Source(source=str(folder / "d.jsonl"), shape="text"))[2]


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "other"])
def test_a_damaged_file_is_made_again(setting, damage):
    _, folder, load = setting
    whole = load()
    (file,) = (folder / "cache").iterdir()
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[-9] ^= 1
    file.write_bytes({"cut": content[:-5], "bit": bytes(flipped), "empty": b"", "other": b"{}" * 200}[damage])
    again = load()
    assert again[2]
    assert again[:2] == whole[:2]
    assert not load()[2]


def test_a_process_that_must_not_write_does_not(setting):
    _, folder, load = setting
    load(write=False)
    assert not (folder / "cache").exists()


def test_a_cache_that_cannot_be_written_is_one_line(setting, tmp_path):
    _, folder, load = setting
    (folder / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache"):
        load()


def test_it_holds_no_pickle(setting):
    _, folder, load = setting
    load()
    (file,) = (folder / "cache").iterdir()
    size = int.from_bytes(file.read_bytes()[:8], "little")
    assert set(json.loads(file.read_bytes()[8 : 8 + size])) >= {"token_ids", "learn", "__metadata__"}

"""Every kind of source gives the same records; damaged ones are one line, broken records are named."""

import gzip
import json
import os
import subprocess
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from mtp import UserError
from tests.train.conftest import ROOT
from tests.train.texts import chat_target, read, turns, write
from train.config import Source
from train.records import read_records

LINES = [
    {"messages": turns(("user", "a"), ("assistant", "b")), "system": None},
    {"messages": turns(("user", "c"), ("assistant", "d")), "system": "s"},
]
WANTED = [
    ("<|user|>a<|end|><|assistant|>b<|end|>", ["b<|end|>"]),
    ("<|system|>s<|end|><|user|>c<|end|><|assistant|>d<|end|>", ["d<|end|>"]),
]


def as_file(folder, kind):
    path = folder / f"data-{kind}"  # the name says nothing
    text = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    if kind == "gzip":
        path.write_bytes(gzip.compress(text))
    elif kind == "json":
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LINES, indent=1).encode())
    elif kind == "one-line-json":
        path.write_bytes(json.dumps(LINES).encode())
    elif kind == "gzip-json":
        path.write_bytes(gzip.compress(json.dumps(LINES, indent=1).encode()))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([line | {"other": b"\xff"} for line in LINES]), path)
    elif kind == "saved-data-set":
        datasets.Dataset.from_list(LINES).save_to_disk(path)
    elif kind == "folder":
        path.mkdir()
        (path / "train.jsonl").write_bytes(text)
    else:
        path.write_bytes(b"\xef\xbb\xbf" + text)
    return path


KINDS = ["jsonl", "gzip", "json", "one-line-json", "gzip-json", "parquet", "saved-data-set", "folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_records(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    target = chat_target(tmp_path)
    source = str(as_file(tmp_path, kind))
    assert read(tmp_path, target, source=source) == (WANTED, {})
    digest = read_records(source, target)[1].sha256
    assert digest == read_records(source, target)[1].sha256
    assert len(digest) == 64


def test_a_data_set_by_name_with_subset_and_split(tmp_path, monkeypatch):
    asked = []

    def load(*what, **how):
        asked.append((what, how))
        return datasets.Dataset.from_list(LINES)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = Source(source="owner/name", subset="part", split="test[:2]")
    assert read(tmp_path, chat_target(tmp_path), source=source) == (WANTED, {})
    assert asked == [(("owner/name", "part"), {"split": "test[:2]"})]

    def refuse(*what, **how):
        raise RuntimeError("not on the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"owner/name: the datasets library could not load it \(not on the hub"):
        read_records(source, chat_target(tmp_path))


def test_a_saved_data_set_names_its_splits(tmp_path):
    data = datasets.Dataset.from_list(LINES)
    datasets.DatasetDict({"here": data, "there": data}).save_to_disk(tmp_path / "saved")
    target, path = chat_target(tmp_path), str(tmp_path / "saved")
    assert read(tmp_path, target, source=Source(source=path, split="there"))[0] == WANTED
    with pytest.raises(UserError, match="no split 'train'; it has here, there"):
        read_records(path, target)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b'{"text": "ab"}\n' * 2000)[:-20], "damaged gzip"),
        (gzip.compress(os.urandom(1000))[:100], "damaged gzip"),
        (b"PAR1 and no more", "damaged Parquet"),
        (b'[{"text": "ab"},\n {"text"', "begins as a JSON list, but is not one"),
        (b"", "empty"),
        (b"[]", "empty"),
        (b"\n\n", "empty"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, content, said):
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        read_records(str(path), chat_target(tmp_path))
    assert str(path) in str(error.value)


def test_a_table_without_known_columns_names_them(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"instruction": "a", "output": "b"}]), path)
    with pytest.raises(UserError, match=r"none of its columns \(instruction, output\) is one of prompt_ids"):
        read_records(str(path), chat_target(tmp_path))


def test_a_file_has_no_split(tmp_path):
    path = write(tmp_path / "d.jsonl", {"text": "ab"})
    with pytest.raises(UserError, match="split"):
        read_records(Source(source=path, split="test"), chat_target(tmp_path))


def test_mixed_types_nulls_and_lists_do_not_break_the_rest(tmp_path):
    """Arrow infers a type from the early rows; lines are read one by one: datasets#7092, SenseNova-SI#31."""
    lines = [
        b'\xef\xbb\xbf{"messages": null, "text": null, "more": []}\n',
        b'["a", "list"]\n',
        {"messages": [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": "b"}], "more": 1},
        {"messages": "not a list"},
        {"messages": [{"role": "user", "content": "a", "extra": {}}, {"role": "assistant", "content": "b"}]},
        b'{"text": "\xff"}\n',
        b'{"text": ' + b"[" * 100_000 + b"\n",
        b'{"text": "ab"}',
    ]
    records, skipped = read(tmp_path, chat_target(tmp_path), *lines)
    assert [learnt for _, learnt in records] == [["b<|end|>"], ["b<|end|>"], ["ab"]]
    assert skipped == {
        "none of the known fields": 1,
        "not a JSON object": 1,
        "messages is not a list of turns": 1,
        "not UTF-8": 1,
        "not JSON": 1,
    }


def test_a_one_line_that_is_a_list_is_a_broken_record(tmp_path):
    records, skipped = read(tmp_path, chat_target(tmp_path), b"[1]\n", {"text": "ab"})
    assert (len(records), skipped) == (1, {"not a JSON object": 1})


def test_cjk_and_emoji_where_the_locale_is_c(tmp_path):
    """promptflow#4172; the command reads bytes and shows what the terminal can."""
    target = chat_target(tmp_path)
    target.model.save_pretrained(tmp_path)
    path = write(tmp_path / "d.jsonl", json.dumps({"text": "中文🙂 ab"}, ensure_ascii=False).encode() + b"\n")
    command = [sys.executable, "-m", "train.inspect", "--config", "tiny.yaml", f"target={tmp_path}"]
    done = subprocess.run(
        [*command, f"data.train={path}", f"output={tmp_path / 'out'}"],
        cwd=ROOT,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert b"1 records" in done.stdout

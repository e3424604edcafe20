"""The picture of the data, as text."""

import pytest

from tests.train.texts import chat_target, turns, write
from train.inspect import histogram, main

LINES = [
    {"messages": turns(("user", "a"), ("assistant", "b"))},
    {"text": "c\u001b[31m\u0007d"},
    {"text": 3},
    {"messages": turns(("user", "e" * 40), ("assistant", "f"))},
]


@pytest.fixture
def command(tmp_path, capsys):
    target = chat_target(tmp_path)
    target.model.save_pretrained(tmp_path)
    path = write(tmp_path / "d.jsonl", *LINES)
    capsys.readouterr()

    def run(*more):
        status = main(
            ["--config", "tiny.yaml", f"target={tmp_path}", f"data.train={path}", f"output={tmp_path}", *more]
        )
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run, path


def test_it_shows_what_is_learnt_what_was_skipped_and_lengths(command):
    run, path = command
    status, out, _ = run("--records", "9")
    assert status == 0
    assert f"{path}:1: 6 tokens, 2 to learn\n<|user|>a<|end|><|assistant|>[[b<|end|>]]\n" in out
    assert "\x1b" not in out and "\x07" not in out
    assert "1 text is not a string" in out
    assert "1 no token to learn within the row length" in out
    assert f"{path}:3: text is not a string" in out
    assert "tokens a record: p0 6" in out
    assert "an epoch: 2 records" in out


def test_weights_and_number_of_records(command):
    run, path = command
    _, out, _ = run("--records", "0", f"data.train=[{{source: {path}, weight: 2}}]", "data.row_length=64")
    assert "3 records, 0 of them cut to the row length, 6 in an epoch" in out
    assert "[[" not in out


def test_a_mistake_is_one_line(command):
    run, path = command
    status, _, err = run(f"data.train=[{{source: {path}, wieght: 2}}]")
    assert status == 2
    assert "did you mean 'data.train.0.weight'?" in err
    assert "\n" not in err.strip()


def test_histogram_percentiles_are_values_of_the_data():
    text = histogram([1, 2, 3, 4, 100])
    assert "p0 1 " in text and "p50 3 " in text and text.splitlines()[0].endswith("p100 100")
    assert sum(int(line.split()[1]) for line in text.splitlines()[1:]) == 5
    assert histogram([7]).splitlines()[1].split()[1] == "1"

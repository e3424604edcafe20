"""Files on a disk that refuses: what was there stays, and no half of a line is left."""

import json
import resource
import signal

import pytest

from mtp.files import append_line, open_lines, write_atomic


@pytest.fixture
def small_disk():
    """Lets no file grow beyond 4096 bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_line_that_does_not_fit_leaves_the_earlier_ones_and_no_half(tmp_path, small_disk):
    path = tmp_path / "lines.jsonl"
    with open_lines(path) as file:
        append_line(file, json.dumps({"a": "x" * 3000}))
        with pytest.raises(OSError, match=r"large|space"):
            append_line(file, json.dumps({"b": "x" * 3000}))
        append_line(file, json.dumps({"c": 1}))
    assert [next(iter(json.loads(line))) for line in path.read_text().splitlines()] == ["a", "c"]


def test_a_refused_replacement_leaves_the_old_content(tmp_path, small_disk):
    path = tmp_path / "config.json"
    write_atomic(path, "old")
    with pytest.raises(OSError, match=r"large|space"):
        write_atomic(path, "x" * 5000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_surrogate_pair_is_written_as_json_writes_it(tmp_path):
    with open_lines(tmp_path / "lines.jsonl") as file:
        append_line(file, json.dumps({"a": "\ud800 \u2028 é"}, ensure_ascii=False))
    assert json.loads((tmp_path / "lines.jsonl").read_bytes()) == {"a": "\ud800 \u2028 é"}

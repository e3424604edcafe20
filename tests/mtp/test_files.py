"""Files on a disk that refuses: what was there stays, and no half of a line is left."""

import functools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from mtp.files import append_line, open_lines

ROOT = Path(__file__).resolve().parents[2]


def run_on_small_disk(code, path):
    """Runs code in a process of its own whose files cannot grow beyond 4096 bytes, as if the disk were full."""
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4096, 4096))
    done = subprocess.run(
        [sys.executable, "-c", "import json, sys; from pathlib import Path; path = Path(sys.argv[1])\n" + code, path],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_line_that_does_not_fit_leaves_the_earlier_ones_and_no_half(tmp_path):
    path = tmp_path / "lines.jsonl"
    code = """
from mtp.files import append_line, open_lines
with open_lines(path) as file:
    append_line(file, json.dumps({"a": "x" * 3000}))
    try:
        append_line(file, json.dumps({"b": "x" * 3000}))
    except OSError:
        print("refused")
    append_line(file, json.dumps({"c": 1}))
"""
    assert run_on_small_disk(code, path) == ["refused"]
    assert [next(iter(json.loads(line))) for line in path.read_text().splitlines()] == ["a", "c"]


def test_a_refused_replacement_leaves_the_old_content(tmp_path):
    path = tmp_path / "config.json"
    code = """
from mtp.files import write_atomic
write_atomic(path, "old")
try:
    write_atomic(path, "x" * 5000)
except OSError:
    print("refused")
"""
    assert run_on_small_disk(code, path) == ["refused"]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_surrogate_pair_is_written_as_json_writes_it(tmp_path):
    with open_lines(tmp_path / "lines.jsonl") as file:
        append_line(file, json.dumps({"a": "\ud800 \u2028 é"}, ensure_ascii=False))
    assert json.loads((tmp_path / "lines.jsonl").read_bytes()) == {"a": "\ud800 \u2028 é"}

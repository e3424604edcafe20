"""The shipped files, in the two places where they can be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("configs", ["mtp/configs", "configs"], ids=["installed", "checkout"])
def test_shipped_files_are_found(tmp_path, configs):
    shutil.copytree(ROOT / "mtp", tmp_path / "mtp")
    shutil.copytree(ROOT / "configs", tmp_path / configs)
    code = "from mtp.resources import resource; print(resource('demo/prompts.jsonl'), resource('nothing.yaml'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(tmp_path / configs / "demo" / "prompts.jsonl"), "None"], done.stderr

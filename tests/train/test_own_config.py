"""The config that the README gives for a model of one's own, by the README's command."""

import subprocess
import sys

from tests.train.conftest import ROOT


def test_train_yaml_trains(run):
    flags = {"target": run.folder / "target", "output": run.folder / "own", "data.train": run.data}
    more = {"data.row_length": 64, "steps.max_steps": 2, "data.heldout": run.data}  # a tiny target's context
    command = [sys.executable, "-m", "train", "--config", "train.yaml"]
    command += [f"{key}={value}" for key, value in (flags | more).items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (run.folder / "own" / "final" / "modules.safetensors").is_file()

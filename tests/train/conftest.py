"""A run in a temporary folder: a tiny random target saved by transformers, text as token ids, and the command."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import VOCAB, make_model

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = Path(sys.executable).with_name("deepspeed")


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def random_records(count=30, seed=0):
    draw = random.Random(seed)

    def ids(low, high):
        return [draw.randrange(3, VOCAB) for _ in range(draw.randrange(low, high))]

    return [{"prompt_ids": ids(1, 10), "response_ids": ids(2, 16)} for _ in range(count)]


class Run:
    """One training run: settings, the command in its own processes, and the log it wrote."""

    def __init__(self, folder):
        self.folder = folder
        make_model("llama").save_pretrained(folder / "target")
        self.data = write_lines(folder / "train.jsonl", random_records())

    def settings(self, output, **more):
        fixed = {"target": self.folder / "target", "output": self.folder / output, "data.train": self.data}
        return ["--config", "tiny.yaml", *(f"{key}={value}" for key, value in (fixed | more).items())]

    def command(self, output, *, ranks=0, environment=None, **more):
        """Returns the arguments of a process (0 ranks: without the launcher)."""
        launcher = [sys.executable, "-m", "train"]
        if ranks:
            port = str(random.randrange(20000, 60000))
            launcher = [str(DEEPSPEED), "--num_accelerators", str(ranks), "--master_port", port, "--module", "train"]
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "MASTER", "LOCAL_"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), keep.get("PATH", "")])
        return {
            "args": [*launcher, *self.settings(output, **more)],
            "cwd": ROOT,
            "env": keep | {"DS_ACCELERATOR": "cpu", "PATH": path} | (environment or {}),
            "text": True,
            "stdin": subprocess.DEVNULL,
        }

    def __call__(self, output, **more):
        """Runs the command and returns the finished process."""
        return subprocess.run(**self.command(output, **more), capture_output=True, timeout=300)

    def start(self, output, **more):
        """Starts the command as the leader of its own session and returns the running process."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(**self.command(output, **more), **pipes, start_new_session=True)

    def log(self, output):
        return [json.loads(line) for line in (self.folder / output / "log.jsonl").read_text().splitlines()]

    def curve(self, output, *names):
        return [[line[name] for name in names] for line in self.log(output) if names[0] in line]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("run"))

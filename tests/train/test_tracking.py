import errno
import io
import json
import os
import sys

import train.tracking
from train.config import load_config
from train.tracking import Tracker


def test_a_full_disk_costs_the_line_and_not_the_training(tmp_path, capsys, monkeypatch):
    config = load_config("tiny.yaml", ["target=t", f"output={tmp_path}", "data.train=d"])
    tracker = Tracker(config, resume_step=0, total_steps=3, wandb_id=None, about={})
    tracker.record(1, {"train/loss": 1.0})
    whole = train.tracking.append_line

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train.tracking, "append_line", full)
    tracker.record(2, {"train/loss": 1.0})
    assert "step 2 is not logged (No space left on device)" in capsys.readouterr().out
    monkeypatch.setattr(train.tracking, "append_line", whole)
    tracker.record(3, {"train/loss": 1.0})
    tracker.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").open()] == [1, 3]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_with_loss_acceptance_length_speed_and_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    config = load_config("tiny.yaml", ["target=t", f"output={tmp_path}", "data.train=d"])
    tracker = Tracker(config, resume_step=1, total_steps=3, wandb_id=None, about={})
    tracker.record(1, {"eval/acceptance_length": 1.25})
    tracker.advance(65.0)
    tracker.record(2, {"train/loss": 0.5, "train/tokens_per_second": 300.0})
    last = sys.stderr.getvalue().rstrip().split("\r")[-1]
    tracker.close()
    shown = ["2/3", "loss=0.5000", "acceptance length=1.250", "tokens/s=300", "ETA=01:05"]
    assert [each for each in shown if each not in last] == [], last


def test_a_log_is_cut_back_to_the_step_resumed_from(tmp_path):
    config = load_config("tiny.yaml", ["target=t", f"output={tmp_path}", "data.train=d"])
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\nnot ours\n{"step": 2}\n{"step": 3}\n{"step": 4, "tr')
    Tracker(config, resume_step=2, total_steps=3, wandb_id=None, about={}).close()
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'

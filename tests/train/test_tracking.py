import errno
import json
import os

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


def test_a_log_is_cut_back_to_the_step_resumed_from(tmp_path):
    config = load_config("tiny.yaml", ["target=t", f"output={tmp_path}", "data.train=d"])
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\nnot ours\n{"step": 2}\n{"step": 3}\n{"step": 4, "tr')
    Tracker(config, resume_step=2, total_steps=3, wandb_id=None, about={}).close()
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'

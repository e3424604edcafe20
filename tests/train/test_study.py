import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.conftest import ROOT
from train.config import load_config
from train.study import commands, evaluations, main, read_study
from train.tracking import MINUTES

STUDY = """
base: tiny.yaml
settings: {steps.max_steps: 2, evaluate_every: 1}
runs:
  chained-2: {modules.num_modules: 2}
  recursive: {modules.recurrence: recursive, modules.num_modules: 1, modules.draft_steps: 2, data.supervise: all}
"""


def test_a_study_runs_all_once_and_ends_with_one_json_line(run, tmp_path, capfd):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    common = run.settings("study", **{"data.heldout": run.data})[2:]
    assert main(["--config", str(path), *common]) == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]
    assert [row["run"] for row in figures] == ["chained-2", "recursive"]
    assert all(row["steps"] == 2 and row["acceptance_length"] >= 1 for row in figures)
    folder = run.folder / "study"
    assert (folder / "study.png").stat().st_size
    assert (folder / "study.md").read_text().count("\n") == 4
    assert {path.name for path in folder.glob("hidden*")} == {"hidden", "hidden-2"}
    assert all(record[MINUTES] > 0 for record in evaluations(folder / "recursive"))
    stamp = (folder / "recursive" / "final" / "modules.safetensors").stat().st_mtime_ns
    assert main(["--config", str(path), *common]) == 0
    assert "already complete" in capfd.readouterr().out
    assert (folder / "recursive" / "final" / "modules.safetensors").stat().st_mtime_ns == stamp


def test_a_run_of_a_study_has_the_time_to_save_after_ctrl_c(tmp_path):
    saves = "import time\ntry:\n time.sleep(60)\nexcept KeyboardInterrupt:\n time.sleep(1); open('saved', 'w')"
    code = f"""
import sys
from mtp.commands import run_command
from train.study import finished
print("ready", flush=True)
sys.exit(run_command(lambda: finished([sys.executable, "-c", {saves!r}])))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout.readline() == b"ready\n"
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert (tmp_path / "saved").exists()


def test_a_study_without_heldout_text_is_refused(tmp_path, capsys):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    assert main(["--config", str(path), f"output={tmp_path / 'out'}", "target=x", "data.train=y"]) == 2
    assert "data.heldout is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"), [("runs: 3", "base"), ("[", "study.yaml"), (STUDY.replace("num_modules", "num_moduls"), "did")]
)
def test_a_wrong_study_is_refused_before_any_run(tmp_path, capsys, content, said):
    path = tmp_path / "study.yaml"
    path.write_text(content)
    flags = [f"output={tmp_path / 'out'}", "target=x", "data.train=y"]
    assert main(["--config", str(path), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "texts"), [("study.yaml", 1), ("levers.yaml", 3)])
def test_the_runs_of_a_shipped_study_that_have_one_text_share_its_hidden_states(name, texts):
    base, common, runs = read_study(name)
    found = commands(base, common, runs, Path("out"))
    hidden, trained = (
        [flags for _, _, module, *flags in found if module == which] for which in ("train.hidden", "train")
    )
    assert (len(hidden), len(trained)) == (texts, len(runs))
    written = {load_config(base, flags[2:]).data.hidden_states for flags in hidden}
    read = {name: load_config(base, flags[2:]).data.hidden_states for name, flags in zip(runs, trained, strict=True)}
    assert set(read.values()) - {None} == written
    assert read.get("target-every-epoch") is None

"""Runs that are killed, stopped, damaged or out of disk, and go on: real processes, the curve of a run left alone."""

import functools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp import UserError
from mtp.checkpoint import read_provenance
from tests.builders import make_model
from tests.train.conftest import ROOT, random_records, write_lines
from train.config import load_config
from train.provenance import toolkit
from train.runs import RunFolder

STEPS = 12
FIGURES = ["step", "train/loss", "train/lr", "train/grad_norm", "train/loss_3"]


@pytest.fixture(scope="module")
def whole(run):
    """The run that nothing happens to."""
    write_lines(run.folder / "heldout-resume.jsonl", random_records(7, seed=1))
    done = run("whole", **settings(run))
    assert done.returncode == 0, done.stderr
    run.output = done.stdout
    return run


def settings(run, **more):
    return {
        "checkpoint_every": 2,
        "keep_checkpoints": 3,
        "evaluate_every": 3,
        "steps.max_steps": STEPS,
        "data.heldout": run.folder / "heldout-resume.jsonl",
    } | more


def assert_same_run(run, output):
    ours, theirs = (torch.tensor(run.curve(name, *FIGURES[1:], "step")) for name in (output, "whole"))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)
    lengths = ["eval/acceptance_length", "eval/rounds", "step"]
    assert run.curve(output, *lengths) == run.curve("whole", *lengths)
    for folder in ("final", "best"):
        ours, theirs = (load_file(run.folder / name / folder / "modules.safetensors") for name in (output, "whole"))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-7, msg=f"{folder}: {name}")


def cut_back(run, output, step):
    """Makes the folder of a run that ended after this step's checkpoint."""
    out = run.folder / output
    shutil.copytree(run.folder / "whole", out)
    shutil.rmtree(out / "final")
    for number in numbers(out / "state"):
        if number > step:
            shutil.rmtree(out / "state" / f"step-{number}")
    return out


def opened(run, output):
    """Returns the folder of a run as a trainer of one process sees it."""
    config = load_config("tiny.yaml", run.settings(output, **settings(run))[2:])
    ranks = SimpleNamespace(rank=0, world_size=1, gather=list, barrier=lambda: None)
    return RunFolder(config, ranks)


def damage(state, how):
    victim = next(state.glob("state/*model_states.pt"))
    if how == "a byte changed":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif how == "cut short":
        victim.write_bytes(victim.read_bytes()[:-100])
    elif how == "missing":
        victim.unlink()
    else:
        victim = state / "state.json"
        victim.write_text("{}")
    return victim.name


def numbers(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.name[5:].isdigit())


def wait_for(seen, process, seconds=120):
    """Waits until something is seen or the process has ended; returns whether it was seen."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if seen():
            return True
        time.sleep(0.001)
    return False


def test_the_newest_are_kept_and_the_best_by_replay(whole):
    out = whole.folder / "whole"
    assert numbers(out) == numbers(out / "state") == [8, 10, 12]
    curve = whole.curve("whole", "eval/acceptance_length", "step")
    best = max(length for length, _ in curve)
    training = read_provenance(out / "best")["training"]
    assert training["eval/acceptance_length"] == best
    assert training["step"] == next(step for length, step in curve if length == best)
    made_by = read_provenance(out / "final")["training"]["toolkit"]
    assert made_by == toolkit() and (len(made_by["commit"]) == 40 if (ROOT / ".git").exists() else True)


def test_a_run_killed_at_any_moment_goes_on_as_if_nothing_had_happened(whole):
    out, draw = whole.folder / "killed", random.Random(7)
    moments = [
        lambda: list((out / "state").glob("*.partial/state/*")),  # while it writes a state
        lambda: numbers(out / "state") and list(out.glob("*.partial/*")),  # while it writes modules
        lambda: draw.random() < 0.01 and len(numbers(out / "state")) > 0,
        lambda: (out / "final.partial").exists(),
    ]
    killed = 0
    for moment in moments:
        process = whole.start("killed", **settings(whole))
        if wait_for(moment, process):
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        output, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), output
    assert killed
    done = whole("killed", **settings(whole))
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, "killed")
    assert not [path for path in out.rglob("*") if path.suffix in (".partial", ".old", ".damaged")]


def test_a_damaged_newest_state_is_named_and_the_one_before_it_is_used(whole):
    out = cut_back(whole, "damaged", STEPS)
    named = damage(out / "state" / "step-12", "a byte changed")
    done = whole("damaged", **settings(whole))
    assert done.returncode == 0, done.stderr
    assert f"step-12: state/{named} is missing or damaged" in done.stdout
    assert "moved to step-12.damaged, going on from step-10" in done.stdout and "resumed from step 10" in done.stdout
    assert numbers(out / "state") == [8, 10, 12] and (out / "state" / "step-12.damaged").is_dir()
    assert_same_run(whole, "damaged")


@pytest.mark.parametrize("how", ["a byte changed", "cut short", "missing", "no facts"])
def test_damage_is_found_before_a_state_is_used(whole, how):
    out = cut_back(whole, "found-" + how.replace(" ", "-"), STEPS)
    named = damage(out / "state" / "step-12", how)
    damage(out / "state" / "step-10", how)
    folder, facts, warnings = opened(whole, out.name).newest_state()
    assert (folder.name, facts["step"]) == ("step-8", 8)
    assert len(warnings) == 2 and "step-12" in warnings[0] and named in warnings[0]


def test_when_every_state_is_damaged_nothing_is_thrown_away(whole):
    out = cut_back(whole, "ruined", STEPS)
    for number in (8, 10, 12):
        damage(out / "state" / f"step-{number}", "cut short")
    with pytest.raises(UserError, match=r"no state can be resumed from \(.*step-12.*remove .*state to start"):
        opened(whole, "ruined").newest_state()
    assert numbers(out / "state") == [8, 10, 12]


def test_what_a_killed_run_left_half_done_is_finished_or_removed(whole):
    out = cut_back(whole, "replaced", STEPS)
    os.replace(out / "best", out / "best.old")
    (out / "step-6.partial").mkdir()
    (out / "state" / "step-14.partial").mkdir()
    opened(whole, "replaced")
    assert (out / "best" / "provenance.json").is_file() and not (out / "best.old").exists()
    assert not list(out.rglob("*.partial"))


def test_text_that_changed_since_the_state_is_refused(whole):
    cut_back(whole, "changed", 10)
    before = whole.data.read_bytes()
    try:
        write_lines(whole.data, random_records(30, seed=4))
        done = whole("changed", **settings(whole))
    finally:
        whole.data.write_bytes(before)
    assert done.returncode == 2
    assert "train.jsonl: its content is not what step 10" in done.stderr


def test_a_target_that_changed_since_the_state_is_refused(whole):
    cut_back(whole, "other-target", 10)
    path = whole.folder / "target" / "model.safetensors"
    before = path.read_bytes()
    try:
        weights = load_file(path)
        save_file({name: 1.5 * weight for name, weight in weights.items()}, path, {"format": "pt"})
        done = whole("other-target", **settings(whole))
    finally:
        path.write_bytes(before)
    assert done.returncode == 2
    assert "its weights are not those that step 10" in done.stderr


def test_fewer_steps_than_a_finished_run_has_are_refused(whole):
    out = whole.folder / "shorter"
    shutil.copytree(whole.folder / "whole", out)
    done = whole("shorter", **settings(whole, **{"steps.max_steps": 5}))
    assert done.returncode == 2
    assert "is at step 12 already, past the 5 steps" in done.stderr
    assert read_provenance(out / "final")["training"]["step"] == STEPS


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(whole):
    out = cut_back(whole, "full", 8)
    size = max(path.stat().st_size for path in (out / "state" / "step-8").rglob("*"))
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size // 2, size // 2))
    command = whole.command("full", **settings(whole))
    done = subprocess.run(**command, preexec_fn=limit, capture_output=True, timeout=300)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert "step-10: the state could not be written" in done.stderr and "checkpoints are intact" in done.stderr
    assert numbers(out / "state") == [8] and not list(out.rglob("*.partial"))
    done = whole("full", **settings(whole))
    assert done.returncode == 0, done.stderr
    assert "resumed from step 8" in done.stdout
    assert_same_run(whole, "full")


def test_ctrl_c_under_the_launcher_saves_and_leaves(whole):
    """SIGINT to the whole foreground group, as a terminal sends it; the launcher follows with SIGTERM."""
    out, more = whole.folder / "ctrl-c", {"checkpoint_every": 100000}
    log = out / "log.jsonl"
    process = whole.start("ctrl-c", ranks=2, **settings(whole, **more, **{"steps.max_steps": 100000}))
    assert wait_for(lambda: log.exists() and log.stat().st_size > 600, process), process.communicate()[0]
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=100)  # until the workers, who share the pipe, have left too
    assert "stopped by a signal after step" in output
    (saved,) = numbers(out / "state")
    assert saved == max(line["step"] for line in whole.log("ctrl-c"))
    done = whole("ctrl-c", **settings(whole, **more, **{"steps.max_steps": saved + 1}))
    assert done.returncode == 2
    assert "written by 2 processes, this run has 1" in done.stderr


def test_a_loss_that_is_not_finite_names_its_rows_and_keeps_what_was_saved(whole):
    target = whole.folder / "poisoned"
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = float("nan")
    model.save_pretrained(target)
    clean = [
        {name: [token if token != 60 else 59 for token in ids] for name, ids in record.items()}
        for record in random_records(40, seed=5)
    ]
    data = write_lines(whole.folder / "poison.jsonl", [*clean, {"prompt_ids": [4, 60, 9], "response_ids": [8] * 25}])
    more = {"target": target, "data.train": data, "checkpoint_every": 1, "steps.rows_per_step": 2, "steps.epochs": 1}
    done = whole("poison", **settings(whole, **more) | {"data.heldout": "null", "steps.max_steps": "null"})
    assert done.returncode == 2, done.stdout
    assert "the loss is nan" in done.stderr and "Traceback" not in done.stderr
    assert "[4, 60, 9, 8, 8, 8, 8, 8]" in done.stderr
    (newest, *_) = sorted((whole.folder / "poison").glob("step-*"), key=lambda path: -int(path.name[5:]))
    assert str(newest) in done.stderr
    assert all(tensor.isfinite().all() for tensor in load_file(newest / "modules.safetensors").values())


def test_a_run_without_a_token_to_learn_is_no_success(whole):
    short = [{"prompt_ids": [5], "response_ids": [6]} for _ in range(60)]  # two tokens: nothing follows a cell
    data = write_lines(whole.folder / "short.jsonl", [{"prompt_ids": [5], "response_ids": [6, 7, 8]}, *short])
    more = {"data.train": data, "data.row_length": 5, "steps.rows_per_step": 1, "steps.micro_rows": 1}
    done = whole("short", **settings(whole, **more) | {"steps.max_steps": 1})
    assert done.returncode == 2, done.stdout
    assert "not one token to learn" in done.stderr
    assert not (whole.folder / "short" / "final").exists()


def test_plain_lines_show_speed_and_the_time_left(whole):
    assert re.search(r"step 4: loss \d+\.\d{4}, tokens/s \d+, ETA \d\d:\d\d\n", whole.output)

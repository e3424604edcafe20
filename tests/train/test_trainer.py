"""The command as users run it: real processes, a tiny random target, the deepspeed launcher."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from mtp import Target
from mtp.checkpoint import load_checkpoint, read_provenance
from tests.train.conftest import ROOT, random_records, write_lines
from train.provenance import toolkit

FIGURES = ["train/loss", "train/lr", "train/grad_norm", "train/loss_1", "train/loss_3", "train/kl_2"]
NO_KEY = {"WANDB_API_KEY": "", "NETRC": "/nonexistent", "WANDB_CONFIG_DIR": "/tmp/mtp-no-wandb-config"}


def file_hash(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def base(run):
    """One process, no launcher: the run that the others are compared with."""
    write_lines(run.folder / "heldout.jsonl", random_records(7, seed=1))
    before = file_hash(run.folder / "target" / "model.safetensors")
    done = run("base", environment=NO_KEY, **settings(run))
    assert done.returncode == 0, done.stderr
    assert file_hash(run.folder / "target" / "model.safetensors") == before
    return run


def settings(run, **more):
    fixed = {
        "steps.micro_rows": 1,
        "checkpoint_every": 3,
        "evaluate_every": 3,
        "data.heldout": run.folder / "heldout.jsonl",
        "wandb.project": "tests",
        "data.keep_hidden": "true",
    }
    return fixed | more


def final_weights(run, output):
    return load_file(run.folder / output / "final" / "modules.safetensors")


def assert_same_run(run, output, noise=1e-5):
    torch.testing.assert_close(
        torch.tensor(run.curve(output, *FIGURES)), torch.tensor(run.curve("base", *FIGURES)), rtol=noise, atol=noise
    )
    lengths = ["eval/acceptance_length", "eval/survival_1", "eval/rounds"]
    assert run.curve(output, *lengths) == run.curve("base", *lengths)
    ours, theirs = final_weights(run, output), final_weights(run, "base")
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=2e-4, msg=name)


def test_a_run_leaves_modules_log_and_provenance(base):
    out = base.folder / "base"
    assert [line["step"] for line in base.log("base")] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert sorted(path.name for path in out.glob("step-*")) == ["step-3", "step-6"]
    training = read_provenance(out / "final")["training"]
    assert training["step"] == 6
    assert training["trained_tokens"] > 0
    assert training["data"][0]["sha256"] == file_hash(base.data)
    assert training["versions"]["deepspeed"]
    stack = load_checkpoint(out / "final", Target.load(str(base.folder / "target")))
    assert stack.contract.num_modules == 3
    assert all(name.startswith("layers.") for name in final_weights(base, "base"))


def test_wandb_without_a_key_runs_offline_once(base):
    (folder,) = (base.folder / "base" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    logged = file.read_bytes()
    told = ["contract", "target_hidden", "toolkit", "deepspeed", "train/loss_3", "train/grad_norm", "train/lr"]
    told += ["train/tokens_per_second", "train/minutes", "eval/acceptance_length", "eval/expected_acceptance_length"]
    told += [f"eval/{name}_{index}" for name in ("survival", "conditional") for index in (1, 2, 3)]
    assert [each for each in told if each.encode() not in logged] == []
    commit = toolkit().get("commit")
    assert commit is None or commit.encode() in logged


def test_two_ranks_give_the_curve_of_one(base):
    stage = "{zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0}}"
    done = base("two", ranks=2, environment=NO_KEY, deepspeed=stage, **settings(base))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(base, "two")
    assert len(list((base.folder / "two" / "wandb").glob("offline-run-*"))) == 1


def test_packed_equals_one_document_a_row_and_the_cache_serves_both_ranks(base):
    """The whole epoch in one step, so that both ways see the same documents."""
    whole = {"steps.max_steps": 1, "steps.rows_per_step": 32, "data.cache": base.folder / "tokens"}
    for output, more in {"packed": {"ranks": 2}, "alone": {"data.packing": "one_per_row"}}.items():
        done = base(output, environment=NO_KEY, **settings(base, **whole, **more))
        assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (torch.tensor(base.curve(output, *FIGURES)) for output in ("packed", "alone"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(list((base.folder / "tokens").glob("*.safetensors"))) == 2  # the training text and the held-out one
    assert not (base.folder / "packed" / "tokens").exists()


def test_bad_data_ends_every_rank_in_one_line(run):
    done = run("bad", ranks=2, **{"data.train": "/nonexistent.jsonl"})
    assert done.returncode != 0
    assert "error: data file /nonexistent.jsonl: No such file" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_several_weighted_sources(base):
    sources = f"[{{source: {base.data}, weight: 0.5}}, {base.folder / 'heldout.jsonl'}]"
    done = base("several", environment=NO_KEY, **settings(base, **{"data.train": sources, "steps.max_steps": 1}))
    assert done.returncode == 0, done.stderr
    assert "30 records, 0 of them cut to the row length, 15 in an epoch" in done.stdout
    data = read_provenance(base.folder / "several" / "final")["training"]["data"]
    assert [each["records"] for each in data] == [30, 7, 7]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_gives_the_curve_of_one_rank(base, stage):
    done = base(
        f"stage-{stage}",
        ranks=2,
        environment=NO_KEY,
        deepspeed=f"deepspeed/zero{stage}.json",
        **settings(base, **{"steps.micro_rows": 1 + stage % 2}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(base, f"stage-{stage}")


def test_a_recursive_module_trains_and_two_ranks_give_the_curve_of_one(base):
    one_module = {"modules.recurrence": "recursive", "modules.num_modules": 1, "modules.draft_steps": 3}
    one = base("recursive-1", environment=NO_KEY, **settings(base, **one_module))
    assert one.returncode == 0, one.stderr
    stage = "{zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0}}"
    two = base("recursive-2", ranks=2, environment=NO_KEY, deepspeed=stage, **settings(base, **one_module))
    assert two.returncode == 0, two.stdout + two.stderr
    curves = [torch.tensor(base.curve(name, *FIGURES)) for name in ("recursive-1", "recursive-2")]
    torch.testing.assert_close(*curves, rtol=1e-5, atol=1e-5)
    assert curves[0][-1, 0] < curves[0][0, 0]
    stack = load_checkpoint(base.folder / "recursive-1" / "final", Target.load(str(base.folder / "target")))
    assert (len(stack.layers), stack.contract.draft_steps) == (1, 3)


def test_offload_settings_pass_through(base):
    done = base(
        "offload",
        ranks=2,
        environment=NO_KEY,
        deepspeed="deepspeed/zero3-offload.json",
        **settings(base, dtype="bfloat16"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loss = torch.tensor(base.curve("offload", "train/loss"))
    torch.testing.assert_close(loss, torch.tensor(base.curve("base", "train/loss")), rtol=3e-2, atol=3e-2)
    assert load_checkpoint(
        base.folder / "offload" / "final", Target.load(str(base.folder / "target"), dtype="bfloat16")
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_bfloat16_trains(base, stage):
    done = base(f"bf16-{stage}", dtype="bfloat16", deepspeed=f"deepspeed/zero{stage}.json", **settings(base))
    assert done.returncode == 0, done.stderr
    loss = torch.tensor(base.curve(f"bf16-{stage}", "train/loss"))
    torch.testing.assert_close(loss, torch.tensor(base.curve("base", "train/loss")), rtol=3e-2, atol=3e-2)


def test_a_resumed_run_equals_an_uninterrupted_one(base):
    killed = base.folder / "cut-short"
    shutil.copytree(base.folder / "base", killed)
    for gone in ("final", "step-6", "state/step-6"):
        shutil.rmtree(killed / gone)
    config = json.loads((killed / "config.json").read_text())
    (killed / "config.json").write_text(json.dumps(config | {"output": str(killed)}))
    with (killed / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "tra')
    (killed / "state" / "step-5.partial").mkdir()
    done = base("cut-short", environment=NO_KEY, **settings(base))
    assert done.returncode == 0, done.stderr
    assert "resumed from step 3" in done.stdout
    runs = [path.name for path in (killed / "wandb").glob("offline-run-*")]
    assert len(runs) == 2 and len({name.rsplit("-", 1)[1] for name in runs}) == 1  # two sittings of one wandb run
    assert [line["step"] for line in base.log("cut-short")] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert_same_run(base, "cut-short", noise=1e-7)


def test_a_complete_run_is_left_alone_and_another_one_is_refused(base):
    stamp = (base.folder / "base" / "final" / "modules.safetensors").stat().st_mtime_ns
    done = base("base", environment=NO_KEY, **settings(base))
    assert done.returncode == 0
    assert "already complete" in done.stdout
    assert (base.folder / "base" / "final" / "modules.safetensors").stat().st_mtime_ns == stamp
    done = base("base", **settings(base, **{"optimizer.learning_rate": 0.5}))
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "optimizer.learning_rate" in done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"target": "/nonexistent/target"}, "/nonexistent/target"),
        ({"optimizer.learning_rate": 1e30, "optimizer.gradient_clip": "null"}, "step "),
        ({"data.train": "/nonexistent.jsonl"}, "/nonexistent.jsonl"),
    ],
)
def test_what_a_user_can_fix_is_one_line(run, more, said):
    done = run("wrong", **more)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert said in done.stderr.split("error:")[-1]


def test_an_error_of_rank_0_is_said_once_and_without_a_traceback(base):
    """The others wait for it in a collective when it leaves."""
    done = base("base", ranks=2, environment=NO_KEY, **settings(base, **{"optimizer.learning_rate": 0.5}))
    assert done.returncode != 0
    assert "optimizer.learning_rate" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_saves_and_leaves(run):
    command = [sys.executable, "-m", "train", *run.settings("stopped", **{"steps.max_steps": 100000})]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        log = run.folder / "stopped" / "log.jsonl"
        deadline = time.monotonic() + 120
        while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "stopped by a signal" in output
    last = run.log("stopped")[-1]["step"]
    assert any(path.name == f"step-{last}" for path in (run.folder / "stopped" / "state").iterdir())

"""Settings of the objective as users run them: real processes, one against two ranks, ZeRO stages, grown modules."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from mtp.checkpoint import read_provenance
from tests.train.conftest import write_lines

SLOWER = ("kl", "cross_entropy", "lk")  # the same code path, unit-tested in test_objective.py
FIGURES = ["train/loss", "train/lr", "train/grad_norm", "train/loss_1", "train/loss_3"]


def weights(run, output, name="final"):
    return load_file(run.folder / output / name / "modules.safetensors")


def trained(run, output, **more):
    done = run(output, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_same_run(run, output, reference, noise=1e-5):
    curves = (torch.tensor(run.curve(name, *FIGURES)) for name in (output, reference))
    torch.testing.assert_close(*curves, rtol=noise, atol=noise)
    theirs = weights(run, reference)
    for name, ours in weights(run, output).items():
        torch.testing.assert_close(ours, theirs[name], rtol=1e-3, atol=2e-4, msg=name)


@pytest.fixture(scope="module")
def uneven(run):
    """Answers of 1 to 29 tokens in 6 rows: every second step has 2 rows, so of 2 ranks one has only padding."""
    lengths = [(1, 29), (24, 4), (2, 28), (29, 1), (20, 8), (1, 28)]
    ids = [{"prompt_ids": [3 + n] * prompt, "response_ids": list(range(3, 3 + n))} for prompt, n in lengths]
    return write_lines(run.folder / "uneven.jsonl", ids)


@pytest.mark.parametrize("kind", ["tv", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOWER)])
def test_two_ranks_and_accumulation_give_the_curve_of_the_large_batch(run, uneven, kind):
    """Per depth, through the switch of the loss, and also where a rank has no supervised token at all."""
    fixed = {"loss.kind": kind, "data.train": uneven, "data.heldout": uneven}
    trained(run, f"{kind}-whole", **fixed, **{"steps.micro_rows": 4})
    trained(run, f"{kind}-split", **fixed, **{"steps.micro_rows": 1})
    trained(run, f"{kind}-ranks", **fixed, ranks=2, deepspeed="deepspeed/zero1.json", **{"steps.micro_rows": 1})
    expected = "eval/expected_acceptance_length"
    for other in ("split", "ranks"):
        assert_same_run(run, f"{kind}-{other}", f"{kind}-whole")
        (ours,), (theirs,) = run.curve(f"{kind}-{other}", expected), run.curve(f"{kind}-whole", expected)
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert 1 < ours[0] < 4
    assert ("train/kl_1" in run.log(f"{kind}-whole")[0]) == (kind != "cross_entropy")


@pytest.fixture(scope="module")
def grown(run):
    """One module trained, then three grown from it in one process, the first frozen."""
    trained(run, "one", **{"modules.num_modules": 1, "modules.draft_vocab_coverage": 0.8})
    trained(run, "grown", **growing(run))
    return run


def growing(run, **more):
    return {"init.checkpoint": run.folder / "one" / "final", "init.freeze": "true", "checkpoint_every": 3} | more


def test_frozen_modules_stay_as_they_were_and_new_ones_learn(grown):
    before, after = weights(grown, "one"), weights(grown, "grown")
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
        moved = [not torch.equal(after[name.replace("layers.0", f"layers.{place}")], tensor) for place in (1, 2)]
        assert moved == [True, True], name


def test_a_draft_vocabulary_by_coverage_says_what_it_covers(grown):
    training = read_provenance(grown.folder / "one" / "final")["training"]
    assert 0.8 <= training["draft_vocab_coverage"] < 0.9
    assert read_provenance(grown.folder / "grown" / "final")["training"]["draft_vocab_coverage"] == 1


def stage_settings(run, stage):
    settings = f"{{zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0}}}}"
    return growing(run, deepspeed=settings, ranks=2, activation_checkpointing="true")


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 2, 3])
def test_every_stage_trains_grown_and_recomputed_modules_alike(grown, stage):
    name = f"grown-{stage}"
    trained(grown, name, **stage_settings(grown, stage))
    assert_same_run(grown, name, "grown")
    after = weights(grown, name)
    assert all(torch.equal(after[key], tensor) for key, tensor in weights(grown, "one").items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_with_frozen_modules_resumes(grown, stage):
    name = f"grown-resumed-{stage}"
    trained(grown, name, **stage_settings(grown, stage))
    for gone in ("final", "step-6", "state/step-6"):
        shutil.rmtree(grown.folder / name / gone)
    assert "resumed from step 3" in trained(grown, name, **stage_settings(grown, stage))
    assert_same_run(grown, name, "grown")
    after = weights(grown, name)
    assert all(torch.equal(after[key], tensor) for key, tensor in weights(grown, "one").items())


def test_text_too_short_for_the_modules_that_are_not_frozen_is_no_success(grown):
    """Module 1 would have a cell in each record, but it is frozen."""
    short = write_lines(grown.folder / "short-grown.jsonl", [{"prompt_ids": [5], "response_ids": [6, 7]}] * 5)
    done = grown("short-grown", **growing(grown, **{"data.train": short}))
    assert done.returncode == 2
    assert "no record is long enough to teach module 2, the first one to train" in done.stderr


def test_a_checkpoint_that_does_not_fit_is_one_line(grown):
    done = grown("unfit", **growing(grown, **{"modules.concat": "hidden_first"}))
    assert done.returncode == 2
    assert "modules.concat" in done.stderr
    assert "Traceback" not in done.stderr

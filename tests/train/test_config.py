import pytest

from mtp import UserError
from train.config import load_config, without_effect
from train.engine import engine_settings

BASE = ["target=t", "output=o", "data.train=d"]


def load(*overrides):
    return load_config("tiny.yaml", [*BASE, *overrides])


def test_flags_win_over_the_file_and_the_file_over_defaults():
    config = load("steps.max_steps=9", "optimizer.learning_rate=1e-4", "output=123")
    assert (config.steps.max_steps, config.optimizer.learning_rate, config.output) == (9, 1e-4, "123")
    assert config.data.row_length == 32  # the file's
    assert config.loss.beta == 0.6  # the default


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("optimizer.learning_rte=1", ["flag optimizer.learning_rte", "did you mean 'optimizer.learning_rate'"]),
        ("learning_rate=1", ["unknown key 'learning_rate'", "'optimizer.learning_rate'"]),
        ("steps.max_step=1", ["'steps.max_steps'"]),
        ("wandb.projct=1", ["'wandb.project'"]),
        ("xyzzy=1", ["valid keys are target"]),
        ("steps.max_steps=soon", ["flag steps.max_steps", "integer", "'soon'"]),
        ("steps.max_steps=0", ["steps.max_steps"]),
        ("dtype=float16", ["dtype", "bfloat16"]),
        ("steps=5", ["steps"]),
        ("loss.kind=l1", ["loss.kind", "cross_entropy"]),
        ("init.freeze=true", ["init", "freeze needs checkpoint"]),
        ("init={block: random, checkpoint: x}", ["init", "exclude each other"]),
        ("modules={draft_vocab_size: 5, draft_vocab_coverage: 0.9}", ["modules", "not both"]),
        ("modules.draft_vocab_coverage=99.5", ["modules.draft_vocab_coverage", "less than or equal to 1"]),
        ("data.train=[{source: a, wieght: 2}]", ["'data.train.0.weight'"]),
        ("data.train=[a, {source: a, weight: 0}]", ["data.train.1.weight", "greater than 0"]),
        ("data.train=[]", ["data.train", "name a file"]),
        ("data.train=[{weight: 2}]", ["'data.train.0.source' is required"]),
        ("data.heldout={shpe: text}", ["'data.heldout.shape'"]),
        ("seed.x=5", ["'seed' is a single value"]),
        ("novalue", ["expected dotted.key=value"]),
        ("seed=[1", ["not YAML"]),
        ("init={block: random, block: random}", ["flag 'init=", "key 'block' is given twice"]),
        ("loss.step_weights=[1, 0.5]", ["loss.step_weights: 2 weights for 3 drafts"]),
        ("loss.step_weights=[1, 0, 1]", ["loss.step_weights.1", "greater than 0"]),
    ],
)
def test_a_wrong_flag_is_named(flag, said):
    overrides = ["seed=1", flag] if flag.startswith("seed.") else [flag]
    with pytest.raises(UserError) as error:
        load(*overrides)
    assert all(part in str(error.value) for part in said), str(error.value)


def test_a_wrong_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_config("nowhere.yaml", [])
    texts = {
        "a: [": "YAML",
        "- 1": "expected settings",
        "target: t\nstep: {}\n": "'steps'",
        "steps:\n  epochs: 1\n  max_steps: 2\n  epochs: 3\n": r"'epochs' is given twice.*line 4",
    }
    for text, said in texts.items():
        path = tmp_path / "x.yaml"
        path.write_text(text)
        with pytest.raises(UserError, match=said) as error:
            load_config(str(path), [])
        assert "x.yaml" in str(error.value)


@pytest.mark.parametrize(
    "setting",
    [
        "train_batch_size: 5",
        "train_micro_batch_size_per_gpu: 3",
        "gradient_accumulation_steps: 7",
        "optimizer: {type: Adam}",
    ],
)
def test_a_deepspeed_config_that_contradicts_the_run_is_refused(setting):
    with pytest.raises(UserError, match=setting.split(":")[0]):
        engine_settings(load(f"deepspeed={{{setting}}}"), 1)


def test_a_deepspeed_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(UserError, match=r"zero\.json.*'stage' is given twice"):
        engine_settings(load(f"deepspeed={path}"), 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["loss.kl_warmup_fraction=0.3"], "loss.kl_warmup_fraction = 0.3 has no effect: loss.kind kl has no warm-up"),
        (["loss.kl_warmup_fraction=0.3", "loss.kind=cross_entropy"], "loss.kind cross_entropy has no warm-up"),
        (["loss.beta=0.6", "loss.step_weights=[3, 2, 1]"], "loss.step_weights are given"),
        (["optimizer.min_lr_fraction=0", "optimizer.schedule=constant"], "the schedule is constant"),
        (["modules.chain_hidden=pre_norm", "modules.recurrence=target_fed"], "target_fed has no chain"),
        (["evaluate_every=5"], "data.heldout is not set"),
        (["keep_checkpoints=5"], "checkpoint_every is not set"),
    ],
)
def test_a_setting_that_the_run_never_reads_is_said(flags, said):
    (only,) = without_effect(load(*flags))
    assert only.startswith(flags[0].split("=")[0]) and only.endswith(said)


def test_settings_that_are_read_are_not_named():
    read = ["loss.kind=tv", "loss.kl_warmup_fraction=0.3", "loss.beta=0.5", "optimizer.min_lr_fraction=0"]
    read += ["evaluate_every=5", "data.heldout=h", "keep_checkpoints=5", "checkpoint_every=5"]
    assert without_effect(load(*read)) == []
    assert without_effect(load("evaluate_every=null")) == []


def test_batch_must_divide_over_ranks_and_shipped_stages_are_read():
    with pytest.raises(UserError, match="rows_per_step"):
        engine_settings(load(), 3)
    for stage in range(4):
        settings = engine_settings(load(f"deepspeed=deepspeed/zero{stage}.json"), 2)
        assert settings["zero_optimization"]["stage"] == stage
        assert settings["gradient_accumulation_steps"] == 1


def test_a_source_is_a_path_or_settings_or_a_list_of_both():
    paths = [[source.source for source in load(flag).data.train] for flag in ("seed=1", "data.train=[x, {source: y}]")]
    assert paths == [["d"], ["x", "y"]]
    config = load("data.heldout={source: name, split: test}")
    assert (config.data.heldout.split, config.data.train[0].weight) == ("test", 1)
    assert load("data.heldout=h.jsonl").data.heldout.source == "h.jsonl"

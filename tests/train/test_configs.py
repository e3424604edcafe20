"""Every shipped YAML: a dry run on the target's published sizes, and a real run on a tiny target of its kind."""

import re
import subprocess
import sys

import pytest
import torch
import transformers

from mtp import Contract, MTPStack
from tests.builders import COMMON, EXPERTS, FAMILIES, LATENT, make_config, make_model, make_target
from tests.train.conftest import ROOT, random_records, write_lines
from train.config import load_config
from train.estimate import estimate, read_shape

VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16} | {
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}
TINY_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# name of the YAML: family of the stand-in, its fields, config class and sizes as published, weights in billions
TARGETS = {
    "llama-3.1-8b": (
        "llama",
        {},
        "LlamaConfig",
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        8.03,
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {},
        "Qwen3Config",
        {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960},
        8.19,
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {"num_experts": 4, **EXPERTS},
        "Qwen3MoeConfig",
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        30.53,
    ),
    "gemma-3-4b": (
        "Gemma3Config",
        {
            "text_config": make_config("gemma3").to_dict(),
            "vision_config": VISION | TINY_VISION | {"image_size": 28},
            "mm_tokens_per_image": 4,
        },
        "Gemma3Config",
        {
            "text_config": {"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240}
            | {"num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
            | {"max_position_embeddings": 131072, "sliding_window": 1024, "tie_word_embeddings": True},
            "vision_config": VISION,
        },
        4.30,
    ),
    "glm-4-9b": (
        "Glm4Config",
        {},
        "Glm4Config",
        {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40}
        | {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768},
        9.40,
    ),
    "deepseek-v3": ("DeepseekV3Config", LATENT | EXPERTS, "DeepseekV3Config", {}, 671.03),  # the class's own defaults
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folders with a config.json of the published sizes and nothing else."""
    folder = tmp_path_factory.mktemp("published")
    for name, (_, _, kind, sizes, _) in TARGETS.items():
        (folder / name).mkdir()
        config = getattr(transformers, kind)(**{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None} | sizes)
        config.save_pretrained(folder / name)
    return folder


def dry(name, folder, *flags):
    command = [sys.executable, "-m", "train", "--config", f"{name}.yaml", "--dry-run", f"target={folder}", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def ranks_of(name):
    """The number of ranks that a YAML's own comment makes its estimate for."""
    return int(re.search(r"--dry-run --ranks (\d+)", (ROOT / "configs" / f"{name}.yaml").read_text()).group(1))


def test_every_shipped_run_is_tested():
    shipped = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert shipped == TARGETS.keys() | {"tiny", "demo", "train", "study", "levers"}


@pytest.mark.parametrize("name", TARGETS)
def test_the_estimate_in_the_comment_is_what_a_dry_run_prints(published, name):
    config = load_config(f"{name}.yaml", [f"target={published / name}"])
    result = estimate(config, ranks_of(name))
    assert round(result.shape.weights / 1e9, 2) == TARGETS[name][4]
    comment = (ROOT / "configs" / f"{name}.yaml").read_text().split("--ranks", 1)[1].split("\ntarget:")[0]
    told = [line.removeprefix("# ").rstrip() for line in comment.splitlines()[1:]]
    printed = result.text(config).splitlines()
    assert told == [line for line in printed if not line.startswith("steps")], "\n".join(printed)


@pytest.mark.parametrize("name", TARGETS)
def test_it_trains_a_tiny_target_of_its_kind(run, tmp_path, name):
    family, fields, kind, _, _ = TARGETS[name]
    model = make_model(family, **fields)
    assert type(model.config).__name__ == kind
    model.save_pretrained(tmp_path / "target")
    data = write_lines(tmp_path / "train.jsonl", random_records())
    heldout = write_lines(tmp_path / "heldout.jsonl", random_records(3, seed=1))
    small = [f"target={tmp_path / 'target'}", f"output={tmp_path / 'out'}", f"data.train={data}"]
    small += [f"data.heldout={heldout}", "data.row_length=32", "modules.draft_vocab_size=20", "steps.max_steps=2"]
    small += ["steps.rows_per_step=2", "steps.micro_rows=1", "steps.epochs=null", "device=cpu", "wandb=null"]
    config = load_config(f"{name}.yaml", small)
    command = run.command("unused")
    command["args"] = [sys.executable, "-m", "train", "--config", f"{name}.yaml", *small]
    done = subprocess.run(**command, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout
    contract = Contract.load(tmp_path / "out" / "final" / "contract.json")
    assert (contract.num_modules, contract.recurrence) == (config.modules.num_modules, config.modules.recurrence)


def test_experts_in_parts_give_the_curve_of_one_rank(run, tmp_path):
    family, fields, *_ = TARGETS["qwen3-30b-a3b"]
    make_model(family, **fields).save_pretrained(tmp_path / "target")
    more = {"target": tmp_path / "target", "steps.max_steps": 3, "steps.micro_rows": 1}
    curves = []
    for ranks in (0, 2):
        done = run(f"experts-{ranks}", ranks=ranks, deepspeed="deepspeed/zero3.json", **more)
        assert done.returncode == 0, done.stdout + done.stderr
        curves.append(torch.tensor(run.curve(f"experts-{ranks}", "train/loss", "train/grad_norm", "train/loss_3")))
    torch.testing.assert_close(*curves, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "Qwen3MoeConfig", "DeepseekV3Config"])
def test_the_numbers_of_weights_are_those_of_the_built_modules(tmp_path, family):
    target = make_target(family, **{kind: fields for kind, fields, *_ in TARGETS.values()}.get(family, {}))
    target.model.config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape.weights == sum(each.numel() for each in target.model.parameters())
    stack = MTPStack(Contract.for_new_modules(2), target)
    assert 2 * shape.module == sum(each.numel() for each in stack.parameters())
    assert (shape.vocab_size, shape.eos_token_ids) == (target.vocab_size, target.eos_token_ids)


def test_a_dry_run_counts_the_steps_of_text_that_is_there_and_writes_nothing(tmp_path):
    transformers.LlamaConfig(**COMMON).save_pretrained(tmp_path / "target")
    data = write_lines(tmp_path / "train.jsonl", random_records())
    flags = [f"output={tmp_path / 'out'}", f"data.train={data}", "steps.max_steps=null", "steps.epochs=2"]
    done = dry("tiny", tmp_path / "target", *flags, "data.keep_hidden=true")
    assert done.returncode == 0, done.stderr
    rows = int(re.search(r"\((\d+) packed rows", done.stdout).group(1))
    assert f"steps     {2 * -(-rows // 4)} (" in done.stdout
    assert "kept hidden states" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["no-such-owner/no-such-model", "/nonexistent"])
def test_a_config_that_cannot_be_fetched_says_what_a_dry_run_needs(target, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = dry("tiny", target, "--ranks", "2")
    assert done.returncode == 2
    assert "a dry run needs a local folder with config.json: target=FOLDER" in done.stderr
    assert "Traceback" not in done.stderr


def test_parts_shrink_with_ranks_by_stage_and_move_with_offload(published):
    def parts(stage, ranks, more=""):
        flags = f"deepspeed={{zero_optimization: {{stage: {stage}{more}}}}}"
        config = load_config("llama-3.1-8b.yaml", [f"target={published / 'llama-3.1-8b'}", flags])
        return estimate(config, ranks).parts

    one, two = parts(0, 1), parts(3, 2, ", offload_param: {device: cpu}, offload_optimizer: {device: cpu}")
    for name in ("modules' weights", "gradients", "optimizer"):
        assert two[name] == (0, one[name][0] // 2)
    assert two["target"][0] < one["target"][0] * 0.001 and two["target"][1] < one["target"][0] * 0.51
    assert parts(1, 4)["gradients"] == one["gradients"] and parts(2, 4)["gradients"][0] == one["gradients"][0] // 4

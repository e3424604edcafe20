"""The target in parts, on two real processes: the same target, and each rank holds half of it."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mtp import Contract, MTPStack, Target
from mtp.cache import Packed
from tests.builders import make_model, random_tokens
from train.config import load_config
from train.partition import PartitionedTarget, load_target

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TARGETS = {
    "llama": ("llama", {"num_hidden_layers": 6}),
    "tied, windows, two kinds of rope": ("gemma3", {}),
    "experts": ("Qwen3MoeConfig", EXPERTS),
}


def compare(rank, folder, names, settings):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    reports = {}
    for name in names:
        config = load_config("tiny.yaml", [f"target={folder / name}", "output=o", "data.train=d", *settings])
        ours, theirs = load_target(config, torch.device("cpu")), Target.load(config.target, dtype=config.dtype)
        tokens = random_tokens(2, 9)
        context = Packed(torch.zeros_like(tokens))
        outputs = []
        for target in (ours, theirs):
            with target.whole_ends(), torch.no_grad():
                torch.manual_seed(0)
                stack = MTPStack(Contract.for_new_modules(2), target)
                torch.nn.init.normal_(stack.layers[0].eh_proj.weight)
                out = target.forward(tokens, context, target_hidden="post_norm")
                logits = target.head(out.final)
                _, module = next(stack.unroll(out.hidden, tokens, context))
            outputs.append((logits, module.final))
            assert all(parameter.numel() for parameter in stack.parameters())
        partitioned = isinstance(ours, PartitionedTarget)
        reports[name] = {
            "equal": all(torch.equal(a, b) for a, b in zip(*outputs, strict=True)),
            "fingerprint": ours.fingerprint() == theirs.fingerprint(),
            "eos": ours.eos_token_ids == theirs.eos_token_ids,
            "held": ours.held() if partitioned else None,
            "whole": sum(parameter.numel() for parameter in theirs.model.parameters()),
            "between": sum(parameter.numel() for parameter in ours.model.parameters()),
            "any": [ours.any_rank(rank == 1), ours.any_rank(False)] if partitioned else None,
        }
    (folder / f"report-{rank}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_rank_holds_half_of_the_target_and_it_is_the_same_target(tmp_path, dtype):
    for name, (family, fields) in TARGETS.items():
        make_model(family, **fields).save_pretrained(tmp_path / name)
    offload = ", offload_param: {device: cpu}" if dtype == "bfloat16" else ""
    settings = [f"deepspeed={{zero_optimization: {{stage: 3{offload}}}}}", f"dtype={dtype}"]
    mp.spawn(compare, (tmp_path, list(TARGETS), settings), nprocs=2)
    for rank in range(2):
        for name, report in json.loads((tmp_path / f"report-{rank}.json").read_text()).items():
            assert report["equal"] and report["fingerprint"] and report["eos"], (rank, name, report)
            assert report["any"] == [True, False]
            norms = report["between"]  # all that stays whole
            assert norms <= 64, (name, norms)
            assert report["held"] <= report["whole"] / 2 + norms + 64 * 50, (name, report)
            assert report["held"] < 0.6 * report["whole"], (name, report)


def test_other_stages_and_a_single_rank_load_the_target_whole(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "llama")
    mp.spawn(compare, (tmp_path, ["llama"], ["deepspeed=deepspeed/zero2.json"]), nprocs=2)
    report = json.loads((tmp_path / "report-1.json").read_text())["llama"]
    assert report["held"] is None and report["between"] == report["whole"] and report["equal"]

"""``python -m train.benchmark_throughput``: tokens/s of a training step against a plain implementation.

Plain is what one would write first: a record a row, padded to the longest of its batch, hard labels, full logits of
every module over the whole vocabulary; ours has soft labels. Both run the frozen target, k modules, the loss and the
backward pass over the same records, batch by batch in turn, on a random model of SmolLM2-135M's shape. Ends with one
JSON line.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mtp import Contract, MTPStack, Target, alignment
from mtp.cache import Packed
from mtp.commands import run_command
from train.data import Rows, lay_out, pack
from train.objective import Objective, StepLoss, depth_weights, objective_inputs
from train.plots import new_figure, save_figure
from train.provenance import toolkit
from train.records import Record
from train.teacher import Teacher, teach

VOCAB, DRAFT_VOCAB = 49152, 4096
SIZES: dict[str, Any] = {  # of SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def make_target(device: str) -> Target:
    """Returns a random target of SmolLM2-135M's shape."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCAB, **SIZES)
    return Target(transformers.AutoModelForCausalLM.from_config(config).to(device), "random")


def mixed_records(count: int, longest: int, seed: int) -> list[Record]:
    """Returns records whose lengths are spread as those of chats are: many short, few long (log-normal)."""
    draw = random.Random(seed)
    lengths = [max(8, min(longest, int(draw.lognormvariate(4.6, 0.9)))) for _ in range(count)]
    return [Record([draw.randrange(VOCAB) for _ in range(n)], [True] * n, 1) for n in lengths]


def plain_step(stack: MTPStack, rows: Rows) -> None:
    """Runs forward and backward with hard labels and full logits."""
    target, k = stack.target, stack.contract.draft_steps
    hidden = target.forward(rows.tokens, Packed(rows.documents), target_hidden="post_norm").hidden
    loss = hidden.new_zeros(())
    for (index, output), weight in zip(
        stack.unroll(hidden, rows.tokens, Packed(rows.documents)), depth_weights(0.6, k), strict=False
    ):
        cells = alignment.supervised_cells(rows.loss_mask, rows.documents, index=index)
        labels = alignment.hard_labels(rows.tokens, index=index).masked_fill(~cells, -100)
        logits = target.head(output.final)[:, : labels.shape[1]]
        loss = loss + weight * torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()


def run_teacher(objective: Objective, rows: Rows) -> Teacher:
    """Returns the target's side of packed rows."""
    return teach(objective.stack.target, rows, target_hidden="post_norm", chunk_rows=objective.chunk_rows)


def our_step(objective: Objective, rows: Rows, kept: Teacher | None = None) -> None:
    """Runs forward and backward as the trainer does; without ``kept`` the target runs too."""
    k = objective.stack.contract.draft_steps
    cells = rows.supervised(k).to(rows.tokens.device).clamp(min=1)
    scales: Tensor = torch.tensor(depth_weights(0.6, k), device=rows.tokens.device) / cells
    loss, _ = objective(*objective_inputs(rows, kept or run_teacher(objective, rows)), scales, StepLoss("soft"))
    loss.backward()


def measure(k: int, batches: int, batch_records: int, longest: int, chunk_rows: int, device: str) -> dict[str, float]:
    """Returns tokens/s of each way; tokens are those of the records, padding not counted."""
    target = make_target(device)
    stacks = [MTPStack(Contract.for_new_modules(k, draft_vocab=vocab), target) for vocab in (None, None, kept_vocab())]
    whole, small = (Objective(stack, chunk_rows) for stack in stacks[1:])
    seconds: dict[str, float] = {}
    tokens = 0
    for number in range(-1, batches):
        records = mixed_records(batch_records, longest, seed=number)
        length = max(len(record.token_ids) for record in records)
        padded = lay_out([[record] for record in records], length).take(list(range(len(records))), device)
        packed = pack(records, longest, 0)
        packed = packed.take(list(range(len(packed))), device)

        ways: dict[str, Callable[[], None]] = {
            "plain": partial(plain_step, stacks[0], padded),
            "ours": partial(our_step, whole, packed),
            f"ours, draft vocabulary {DRAFT_VOCAB}": partial(our_step, small, packed),
            f"ours, draft vocabulary {DRAFT_VOCAB}, hidden states kept": partial(
                our_step, small, packed, run_teacher(small, packed)
            ),
        }
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 0:  # the first batch allocates and compiles
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
        tokens += sum(len(record.token_ids) for record in records) if number >= 0 else 0
    return {name: tokens / spent for name, spent in seconds.items()}


def kept_vocab() -> tuple[int, ...]:
    """Returns the draft vocabulary of the benchmark: which tokens it keeps does not matter to its speed."""
    return tuple(range(0, VOCAB, VOCAB // DRAFT_VOCAB))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m train.benchmark_throughput", description=__doc__)
    parser.add_argument("--modules", type=int, default=3)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--batch-records", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--chunk-rows", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw tokens/s of each way")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    return run_command(lambda: _benchmark(options, " ".join(["python -m train.benchmark_throughput", *given])))


def _benchmark(options: argparse.Namespace, command: str) -> None:
    figures = measure(
        options.modules, options.batches, options.batch_records, options.longest, options.chunk_rows, options.device
    )
    for name, speed in figures.items():
        print(f"{name:>50}: {speed:8.1f} tokens/s, {speed / figures['plain']:.2f}x plain", flush=True)
    report = {
        "benchmark": "training throughput",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "command": command,
        "commit": toolkit().get("commit"),
        "torch": torch.__version__,
        "options": {name: value for name, value in vars(options).items() if name != "plot"},
        "tokens_per_second": {name: round(speed, 1) for name, speed in figures.items()},
    }
    print(json.dumps(report))
    if options.plot:
        plot(options.plot, figures)


def plot(path: Path, figures: dict[str, float]) -> None:
    """Draws tokens/s of each way, with its ratio to plain."""
    figure, (axes,) = new_figure(1)
    bars = axes.barh([name.replace(", ", ",\n") for name in figures], list(figures.values()))
    axes.bar_label(bars, [f" {speed / figures['plain']:.1f}x" for speed in figures.values()])
    axes.set(xlabel="tokens/s of a training step")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m train.benchmark_memory``: peak memory of one training step, chunked against full logits.

Each case runs in a process of its own: a random model, k modules, one forward and backward of the
objective. ``modules`` is the same step without head and loss (activations and gradients only), so
``chunked - modules`` is what head and loss cost. Ends with one JSON line.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mtp import Contract, MTPStack, Target, UserError, alignment
from mtp.cache import Packed
from train.data import Rows
from train.objective import Objective, StepLoss, depth_weights, objective_inputs
from train.provenance import toolkit
from train.teacher import teach, wide

ROW_LENGTH = 256
SOFT = StepLoss("soft")
WAYS = ("modules", "chunked", "plain")
# Everything but one factor fixed, each factor quadrupled in turn, then all of them.
GRID = [(512, 2, 8192), (2048, 2, 8192), (512, 8, 8192), (512, 2, 32768), (2048, 8, 32768), (4096, 4, 49152)]


def build(rows: int, k: int, vocab: int, chunk_rows: int, device: str) -> tuple[Objective, Rows]:
    """Returns an objective on a random target and a batch in which every token is supervised."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    stack = MTPStack(Contract.for_new_modules(k), Target(model.to(device), "random"))
    tokens = torch.randint(0, vocab, (rows // ROW_LENGTH, ROW_LENGTH), device=device)
    return Objective(stack, chunk_rows), Rows(tokens, torch.zeros_like(tokens), torch.ones_like(tokens).bool())


def plain_loss(objective: Objective, rows: Rows) -> Tensor:
    """Returns the same loss with the full logits of every module and of the target."""
    stack = objective.stack
    hidden, final = stack.target.forward(rows.tokens, Packed(rows.documents), target_hidden="post_norm")
    p = wide(stack.head(final)).softmax(-1)
    loss, weights = p.new_zeros(()), depth_weights(0.6, stack.contract.draft_steps)
    for index, output in stack.unroll(hidden, rows.tokens, Packed(rows.documents)):
        cells = alignment.supervised_cells(rows.loss_mask, rows.documents, index=index).nonzero()
        label = (cells[:, 0], alignment.label_rows(cells[:, 1], index=index))
        log_q = wide(stack.head(output.final[tuple(cells.unbind(1))])).log_softmax(-1)
        loss = loss - weights[index - 1] * (p[label] * log_q).sum() / len(cells)
    return loss


def step(objective: Objective, rows: Rows, way: str, step_loss: StepLoss = SOFT) -> None:
    """Runs forward and backward one of three ways."""
    stack = objective.stack
    if way == "plain":
        plain_loss(objective, rows).backward()
        return
    if way == "modules":
        hidden = stack.target.forward(rows.tokens, Packed(rows.documents), target_hidden="post_norm").hidden
        finals = [output.final.sum() for _, output in stack.unroll(hidden, rows.tokens, Packed(rows.documents))]
        torch.stack(finals).sum().backward()
        return
    k = stack.contract.draft_steps
    scales = torch.tensor(depth_weights(0.6, k), device=rows.tokens.device)
    scales = scales / rows.supervised(k).to(scales.device)
    teacher = teach(stack.target, rows, target_hidden="post_norm", chunk_rows=objective.chunk_rows)
    loss, _ = objective(*objective_inputs(rows, teacher), scales, step_loss)
    loss.backward()


def measure(way: str, rows: int, k: int, vocab: int, chunk_rows: int, device: str) -> float:
    """Returns the MiB that one step needs beyond the weights (and their gradients' first allocation)."""
    objective, batch = build(rows, k, vocab, chunk_rows, device)
    if device == "cuda":
        allocated = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(objective, batch, way)
        return (torch.cuda.max_memory_allocated() - allocated) / 2**20
    small = batch.take([0], device)
    step(objective, Rows(small.tokens[:, :16], small.documents[:, :16], small.loss_mask[:, :16]), "modules")  # warm-up
    before = _resident()
    step(objective, batch, way)
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before, 0.0)


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _in_own_process(way: str, case: Sequence[int], chunk_rows: int, device: str) -> float:
    arguments = ["--case", way, *map(str, case), "--chunk-rows", str(chunk_rows), "--device", device]
    # Freed blocks go back to the system at once, so that resident memory means live memory.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "train.benchmark_memory", *arguments], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise UserError(f"case {way} {list(case)} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return float(done.stdout.split()[-1])


def table(chunk_rows: int, device: str) -> list[dict[str, Any]]:
    """Measures the grid, printing a line for each case, and returns its figures in MiB."""
    print(f"{'rows':>6} {'k':>3} {'vocab':>6} {'logits k*rows*V':>16} {'modules':>9} {'chunked':>9} {'plain':>9}  MiB")
    figures = []
    for rows, k, vocab in GRID:
        peaks = {way: round(_in_own_process(way, (rows, k, vocab), chunk_rows, device), 1) for way in WAYS}
        logits = k * rows * vocab * 4 / 2**20
        print(
            f"{rows:>6} {k:>3} {vocab:>6} {logits:>16.0f} " + " ".join(f"{peaks[way]:>9.1f}" for way in WAYS),
            flush=True,
        )
        figures.append({"rows": rows, "k": k, "vocab": vocab, "logits_mib": logits, **peaks})
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, or one case of it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m train.benchmark_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--chunk-rows", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", nargs=4, metavar=("WAY", "ROWS", "K", "VOCAB"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        way, *case = options.case
        rows, k, vocab = map(int, case)
        print(measure(way, rows, k, vocab, options.chunk_rows, options.device))
        return 0
    started = time.monotonic()
    try:
        figures = table(options.chunk_rows, options.device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
    report = {
        "benchmark": "training memory",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs {gpu}".strip(),
        "command": " ".join(["python -m train.benchmark_memory", *(sys.argv[1:] if arguments is None else arguments)]),
        "commit": toolkit().get("commit"),
        "torch": torch.__version__,
        "chunk_rows": options.chunk_rows,
        "unit": "MiB",
        "seconds": round(time.monotonic() - started, 1),
        "figures": figures,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m train.benchmark_memory``: peak memory of one training step, chunked against full logits.

Each case runs in a process of its own: a random model, k modules, one forward and backward of the
objective. ``modules`` is the same step without head and loss (activations and gradients only), so
``chunked - modules`` is what head and loss cost. ``--plot FILE.png`` draws how they grow with rows, k and vocabulary.
Ends with one JSON line.
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
from mtp.commands import run_command
from train.data import Rows
from train.objective import Objective, StepLoss, depth_weights, objective_inputs
from train.plots import new_figure, save_figure
from train.provenance import toolkit
from train.teacher import teach, wide

ROW_LENGTH = 256
SOFT = StepLoss("soft")
WAYS = ("modules", "chunked", "plain")
FACTORS = ("rows", "k", "vocab")
BASE = (512, 2, 8192)
# Each factor doubled twice while the others stay, then all of them.
GRID = [
    BASE,
    *((rows, 2, 8192) for rows in (1024, 2048)),
    *((512, k, 8192) for k in (4, 8)),
    *((512, 2, vocab) for vocab in (16384, 32768)),
    (2048, 8, 32768),
    (4096, 4, 49152),
]


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
    columns = " ".join(f"{name:>9}" for name in (*WAYS, "MiB; of plain"))
    print(f"{'rows':>6} {'k':>3} {'vocab':>6} {'logits k*rows*V':>16} {columns}")
    figures = []
    for rows, k, vocab in GRID:
        peaks = {way: round(_in_own_process(way, (rows, k, vocab), chunk_rows, device), 1) for way in WAYS}
        logits, ratio = k * rows * vocab * 4 / 2**20, round(peaks["chunked"] / max(peaks["plain"], 0.1), 3)
        columns = " ".join(f"{peaks[way]:>9.1f}" for way in WAYS)
        print(f"{rows:>6} {k:>3} {vocab:>6} {logits:>16.0f} {columns} {ratio:>13.3f}", flush=True)
        figures.append({"rows": rows, "k": k, "vocab": vocab, "logits_mib": logits, **peaks, "chunked_of_plain": ratio})
    return figures


def plot(path: Path, figures: list[dict[str, Any]]) -> None:
    """Draws the MiB of each way over each factor, the other two as in ``BASE``."""
    figure, panels = new_figure(len(FACTORS), sharey=True)
    for axes, factor in zip(panels, FACTORS, strict=True):
        fixed = {other: value for other, value in zip(FACTORS, BASE, strict=True) if other != factor}
        cases = [case for case in figures if fixed.items() <= case.items()]
        cases.sort(key=lambda case: case[factor])
        for way in WAYS:
            axes.plot([case[factor] for case in cases], [case[way] for case in cases], "o-", markersize=3, label=way)
        axes.set(xlabel=factor, title=", ".join(f"{other} {value}" for other, value in fixed.items()))
    panels[0].set(ylabel="MiB beyond the weights", ylim=(0, None))
    panels[0].legend(fontsize=8)
    save_figure(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, or one case of it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m train.benchmark_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--chunk-rows", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw how memory grows with each factor")
    parser.add_argument("--case", nargs=4, metavar=("WAY", "ROWS", "K", "VOCAB"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        way, *case = options.case
        rows, k, vocab = map(int, case)
        print(measure(way, rows, k, vocab, options.chunk_rows, options.device))
        return 0
    command = ["python -m train.benchmark_memory", *(sys.argv[1:] if arguments is None else arguments)]
    return run_command(lambda: _benchmark(options, " ".join(command)))


def _benchmark(options: argparse.Namespace, command: str) -> None:
    started = time.monotonic()
    figures = table(options.chunk_rows, options.device)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
    report = {
        "benchmark": "training memory",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs {gpu}".strip(),
        "command": command,
        "commit": toolkit().get("commit"),
        "torch": torch.__version__,
        "chunk_rows": options.chunk_rows,
        "unit": "MiB",
        "seconds": round(time.monotonic() - started, 1),
        "figures": figures,
    }
    print(json.dumps(report))
    if options.plot:
        plot(options.plot, figures)


if __name__ == "__main__":
    sys.exit(main())

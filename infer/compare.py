"""One table: plain, corrected and uncorrected decoding of the same prompts, measured in one run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from infer.engine import Engine
from infer.progress import Progress
from infer.requests import Request
from mtp import MTPStack, Target
from mtp.acceptance import AcceptanceStats
from mtp.replay import replay_text


@dataclass
class Row:
    """One way to decode: its speed, its acceptance, and how many of its texts are those of plain decoding."""

    name: str
    tokens: int = 0
    seconds: float = 0.0
    stats: AcceptanceStats | None = None
    identical: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def add(self, answer: list[int], stats: AcceptanceStats | None, *, same: bool) -> None:
        """Counts one answer."""
        self.tokens += len(answer)
        self.identical += same
        if stats is not None:
            self.stats = self.stats or AcceptanceStats(stats.num_drafts)
            self.stats.merge(stats)


@dataclass(frozen=True)
class Comparison:
    """``rows[0]`` is plain decoding; ``replayed`` walks its texts with the training forward."""

    rows: list[Row]
    replayed: AcceptanceStats
    prompts: int

    @property
    def identical(self) -> bool:
        """Returns whether every way of decoding gave the same tokens for every prompt."""
        return all(row.identical == self.prompts for row in self.rows)

    def markdown(self) -> str:
        """Returns the table, and the replay's figure below it."""
        lines = [
            "| decoding | tokens/s | against plain | acceptance length | survival | same text |",
            "| --- | ---: | ---: | ---: | --- | ---: |",
        ]
        for row in self.rows:
            ratio = row.tokens_per_second / self.rows[0].tokens_per_second
            length, survival = "", ""
            if row.stats is not None:
                length = f"{row.stats.acceptance_length:.3f}"
                survival = " / ".join(f"{value:.3f}" for value in row.stats.survival())
            lines.append(
                f"| {row.name} | {row.tokens_per_second:.1f} | {ratio:.2f}x | {length} | {survival} "
                f"| {row.identical} of {self.prompts} |"
            )
        lines += ["", f"Replay on the same texts: acceptance length {self.replayed.acceptance_length:.4f}."]
        return "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        rows = [
            {
                "name": row.name,
                "tokens": row.tokens,
                "tokens_per_second": row.tokens_per_second,
                "identical": row.identical,
                **({} if row.stats is None else row.stats.summary()),
            }
            for row in self.rows
        ]
        return {"prompts": self.prompts, "rows": rows, "replay": self.replayed.summary()}


def compare(
    target: Target,
    stack: MTPStack,
    requests: list[Request],
    *,
    all_drafts: bool = False,
    with_transformers: bool = False,
) -> Comparison:
    """Decodes the requests one by one (batch 1) in every way and returns the figures.

    Args:
        all_drafts: corrected decoding with 1..k drafts, not just k.
        with_transformers: also ``generate`` of transformers, for its text and speed.
    """
    most = stack.contract.draft_steps
    ways: dict[str, Callable[[Request], tuple[list[int], AcceptanceStats | None]]] = {
        "plain": _engine_way(Engine(target, eos_token_ids=None))
    }
    if with_transformers:
        ways["transformers generate"] = lambda request: (_transformers_generate(target, request), None)
    for drafts in range(1 if all_drafts else most, most + 1):
        ways[f"corrected, {drafts} drafts"] = _engine_way(Engine(target, stack, num_drafts=drafts))
    ways[f"uncorrected, {most} drafts"] = _engine_way(Engine(target, stack, correct=False))

    rows = [Row(name) for name in ways]
    plain: list[list[int]] = []
    for way in ways.values():
        way(Request(requests[0].prompt_ids, 4))  # first calls allocate and compile
    with Progress("compare", len(requests), "prompt") as progress:
        for request in requests:
            # Every way in turn on each prompt, so that a machine that slows down slows them alike.
            for row, way in zip(rows, ways.values(), strict=True):
                started = time.perf_counter()
                answer, stats = way(request)
                row.seconds += time.perf_counter() - started
                if row is rows[0]:
                    plain.append(answer)
                row.add(answer, stats, same=answer == plain[-1])
            progress.advance()
    replayed = AcceptanceStats(most)
    for request, answer in zip(requests, plain, strict=True):
        tokens, prompt = torch.tensor([*request.prompt_ids, *answer], device=target.device), len(request.prompt_ids)
        limit = min(prompt + request.max_new_tokens, target.context_length)
        replayed.merge(replay_text(target, stack, tokens, prompt, limit=limit))
    return Comparison(rows, replayed, len(requests))


def _engine_way(engine: Engine) -> Callable[[Request], tuple[list[int], AcceptanceStats | None]]:
    def decode(request: Request) -> tuple[list[int], AcceptanceStats | None]:
        done = next(engine.generate([request]))
        return done.token_ids, done.stats

    return decode


def _transformers_generate(target: Target, request: Request) -> list[int]:
    prompt = torch.tensor([request.prompt_ids], device=target.device)
    output = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        pad_token_id=(target.eos_token_ids or (0,))[0],
    )
    return output[0, prompt.shape[1] :].tolist()

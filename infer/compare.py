"""One table: plain, corrected and uncorrected decoding of the same prompts, measured in one run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from infer.engine import Engine
from infer.requests import Request
from mtp import MTPStack, Target
from mtp.acceptance import AcceptanceStats
from mtp.replay import replay_text


@dataclass(frozen=True)
class Row:
    """One way to decode: its speed, its acceptance, and whether its text is that of plain decoding."""

    name: str
    tokens: int
    seconds: float
    stats: AcceptanceStats | None
    identical: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


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
    most = len(stack.layers)
    ways: dict[str, Callable[[Request], tuple[list[int], AcceptanceStats | None]]] = {
        "plain": _engine_way(Engine(target, eos_token_ids=None))
    }
    if with_transformers:
        ways["transformers generate"] = lambda request: (_transformers_generate(target, request), None)
    for drafts in range(1 if all_drafts else most, most + 1):
        ways[f"corrected, {drafts} drafts"] = _engine_way(Engine(target, stack, num_drafts=drafts))
    ways[f"uncorrected, {most} drafts"] = _engine_way(Engine(target, stack, correct=False))

    rows: list[Row] = []
    plain: list[list[int]] = []
    with tqdm(total=len(ways) * len(requests), unit="prompt", desc="decode", disable=None) as bar:
        for name, way in ways.items():
            way(Request(requests[0].prompt_ids, 4))  # first calls allocate and compile
            total, answers, started = None, [], time.perf_counter()
            for request in requests:
                answer, stats = way(request)
                answers.append(answer)
                if stats is not None:
                    total = total or AcceptanceStats(stats.num_drafts)
                    total.merge(stats)
                bar.update()
            seconds = time.perf_counter() - started
            plain = plain or answers
            same = sum(ours == theirs for ours, theirs in zip(answers, plain, strict=True))
            rows.append(Row(name, sum(map(len, answers)), seconds, total, same))
    replayed = AcceptanceStats(most)
    for request, answer in zip(requests, plain, strict=True):
        tokens = torch.tensor([*request.prompt_ids, *answer], device=target.device)
        replayed.merge(replay_text(target, stack, tokens, len(request.prompt_ids)))
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

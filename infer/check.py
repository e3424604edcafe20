"""Replays training against decode: every committed cell after every round, against the training forward.

Two kinds of rounds are checked. *Real* rounds draft and verify as ``generate`` does. *Forced*
rounds walk a given text while the number of accepted drafts is drawn at random, so every accept
pattern occurs however good or bad the modules are.
"""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infer.engine import Engine
from infer.pickers import Greedy, Picker
from infer.progress import Progress
from infer.requests import Request
from mtp import MTPStack, Target, UserError, alignment
from mtp.cache import Cells, CellTable, Packed, Recorder
from mtp.precision import KeepFloat64

NOISE = {torch.float32: 1e-4, torch.float64: 1e-10}


@dataclass
class CheckReport:
    """Counts of one check; a mismatch is a cell whose relative difference exceeds ``noise``."""

    noise: float
    rounds: int = 0
    cells: int = 0
    mismatches: int = 0
    largest: float = 0.0
    first_mismatch: str | None = None
    accept_patterns: dict[int, int] = field(default_factory=dict)


class ForcedText:
    """Makes target and modules follow a text; drafts are right up to a random place in every round."""

    def __init__(self, texts: dict[int, Tensor], vocab: Tensor, num_drafts: int, seed: int) -> None:
        self._texts, self._vocab, self._num_drafts = texts, vocab, num_drafts
        self._random = random.Random(seed)
        self._right: dict[int, int] = {}

    def target(self, logits: Tensor, rows: Tensor, requests: Sequence[Request]) -> Tensor:
        labels = alignment.token_rows(rows, index=1)
        texts = [self._texts[request.key] for request in requests]
        return torch.stack([text[places.clamp(max=len(text) - 1)] for text, places in zip(texts, labels, strict=True)])

    def draft(self, logits: Tensor, last_token: Tensor, requests: Sequence[Request], *, index: int) -> Tensor:
        choices = []
        labels = alignment.token_rows(last_token, index=index).tolist()
        for request, label in zip(requests, labels, strict=True):
            if index == 1:
                self._right[request.key] = self._random.randint(0, self._num_drafts)
            text = self._texts[request.key]
            truth = int(text[min(label, len(text) - 1)])
            choices.append(self._choice(truth, right=index <= self._right[request.key]))
        return torch.tensor(choices, device=logits.device)

    def _choice(self, truth: int, *, right: bool) -> int:
        """Returns the place in the draft vocabulary of the truth, or of some other token."""
        if right and (match := (self._vocab == truth).nonzero()).numel():
            return int(match[0])
        place = self._random.randrange(len(self._vocab))
        return (place + 1) % len(self._vocab) if int(self._vocab[place]) == truth else place


@dataclass(frozen=True)
class Reference:
    """The cacheless training forward of one text: keys, values and outputs per module."""

    cells: dict[int, dict[str, Tensor]]

    @classmethod
    @torch.inference_mode()
    def of(cls, target: Target, stack: MTPStack, tokens: Tensor) -> "Reference":
        recorder = Recorder()
        context = Packed(torch.zeros_like(tokens[None]), recorder)
        hidden = target.forward(tokens[None], context, target_hidden=stack.contract.target_hidden).hidden
        cells = {}
        for index, output in stack.unroll(hidden, tokens[None], context):
            keys, values = recorder.cells[index]
            named = {"keys": keys, "values": values, "hidden": output.hidden, "output": output.final}
            cells[index] = {name: tensor[0].flatten(1) for name, tensor in named.items()}
        return cls(cells)


class _Observer:
    """Keeps every module output by row beside the engine's caches, and compares both with references."""

    def __init__(
        self, engine: Engine, texts: dict[int, Tensor], references: dict[int, Reference], report: CheckReport
    ) -> None:
        assert engine.stack is not None
        self.engine, self.texts, self.references, self.report = engine, texts, references, report
        self.outputs = [CellTable(engine.batch_size) for _ in engine.module_tables]
        engine.extra_tables += self.outputs
        self._hook = engine.stack.register_forward_hook(self._keep, with_kwargs=True)

    def close(self) -> None:
        self._hook.remove()

    def _keep(self, module, args, kwargs, output) -> None:  # noqa: ANN001 - torch's hook signature
        context: Cells = args[2]
        table = self.outputs[0 if self.engine.recursive else kwargs["index"] - 1]
        table.write(output.hidden[:, None], output.final[:, None], context)

    def compare(self) -> None:
        """Compares every committed cell of every active sequence, and the steps of a recursive module."""
        for slot, sequence in enumerate(self.engine.active):
            for index in range(1, self.engine.num_modules + 1):
                rows = slice(alignment.exact_rows(sequence.last_token, index=index))
                self._compare_rows(slot, index, rows, index, rows)
            if self.engine.recursive:
                self._compare_steps(slot, sequence.last_token)

    def _compare_steps(self, slot: int, last_token: int) -> None:
        """Compares the steps whose drafts so far are the text's: they read what the training forward reads."""
        key = self._key(slot)
        text, tokens = self.texts[key].tolist(), self.engine.tokens_of(slot)
        started = alignment.last_row_with_hidden(last_token)
        for index in range(2, min(self.engine.num_drafts, len(self.references[key].cells)) + 1):
            end = alignment.token_rows(started, index=index) + 1  # after the last token that the step reads
            if end > len(text) or tokens[last_token:end] != text[last_token:end]:
                return
            row = alignment.step_rows(started, index=index)
            self._compare_rows(slot, 1, slice(row, row + 1), index, slice(started, started + 1))

    def _compare_rows(self, slot: int, module: int, rows: slice, index: int, reference_rows: slice) -> None:
        """Compares rows of a module's cache and outputs with rows of step or module ``index`` of the reference."""
        cache, outputs, key = self.engine.module_tables[module - 1], self.outputs[module - 1], self._key(slot)
        assert cache.keys is not None and cache.values is not None
        assert outputs.keys is not None and outputs.values is not None
        decoded = {"keys": cache.keys, "values": cache.values, "hidden": outputs.keys, "output": outputs.values}
        self._compare_cells(
            {name: tensor[slot, rows].flatten(1) for name, tensor in decoded.items()},
            {name: tensor[reference_rows] for name, tensor in self.references[key].cells[index].items()},
            f"prompt {key}, L = {self.engine.active[slot].last_token}, module {index}",
        )

    def _key(self, slot: int) -> int:
        return self.engine.active[slot].request.key

    def _compare_cells(self, decoded: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
        report = self.report
        if not decoded["keys"].numel():
            return
        relative = []
        for name, cells in expected.items():
            scale = cells.abs().amax(dim=1).clamp(min=torch.finfo(cells.dtype).tiny)
            relative.append((decoded[name] - cells).abs().amax(dim=1) / scale)
        worst = torch.stack(relative).amax(dim=0)
        worst = torch.where(worst.isfinite(), worst, torch.inf)
        report.cells += worst.numel()
        report.largest = max(report.largest, float(worst.max()))
        wrong = (worst > report.noise).nonzero()[:, 0]
        report.mismatches += wrong.numel()
        if wrong.numel() and report.first_mismatch is None:
            report.first_mismatch = f"{where}, row {int(wrong[0])}: relative difference {float(worst[wrong[0]]):.1e}"


def check_real(
    engine_options: dict, target: Target, stack: MTPStack, requests: list[Request], report: CheckReport
) -> list[Tensor]:
    """Decodes the requests for real, then once more with a comparison after every round.

    Returns:
        The committed texts, prompt and answer, for :func:`check_forced`.
    """
    first = {done.request.key: done for done in Engine(target, stack, **engine_options).generate(requests)}
    texts = {
        request.key: torch.tensor([*request.prompt_ids, *first[request.key].token_ids], device=target.device)
        for request in requests
    }
    _check(target, stack, requests, texts, report, engine_options, Greedy(), "real drafting")
    return list(texts.values())


def check_forced(
    engine_options: dict, target: Target, stack: MTPStack, texts: list[Tensor], report: CheckReport, seed: int
) -> None:
    """Walks the texts from a random prompt length on, with random accept patterns."""
    chooser = random.Random(seed)
    usable = [text for text in texts if len(text) >= 3]
    requests, by_key = [], {}
    for key, text in enumerate(usable):
        prompt = chooser.randint(1, min(len(text) - 2, 2 * stack.contract.draft_steps + 2))
        requests.append(Request(tuple(text[:prompt].tolist()), len(text) - prompt, key))
        by_key[key] = text
    vocab = stack.head.tokens(torch.arange(stack.head.weight.shape[0], device=target.device))
    picker = ForcedText(by_key, vocab, engine_options.get("num_drafts") or stack.contract.draft_steps, seed)
    _check(
        target,
        stack,
        requests,
        by_key,
        report,
        engine_options | {"eos_token_ids": ()},
        picker,
        "forced accept patterns",
    )


def _check(
    target: Target,
    stack: MTPStack,
    requests: list[Request],
    texts: dict[int, Tensor],
    report: CheckReport,
    engine_options: dict,
    picker: Picker,
    what: str,
) -> None:
    references = {key: Reference.of(target, stack, text) for key, text in texts.items()}
    engine = Engine(target, stack, picker=picker, **engine_options)
    observer = _Observer(engine, texts, references, report)
    pending = list(reversed(requests))
    try:
        with Progress(f"check, {what}", len(requests), "text") as progress:
            while pending or engine.active:
                while pending and len(engine.active) < engine.batch_size:
                    engine.submit(pending.pop())
                observer.compare()
                for done in engine.step() if engine.active else []:
                    text = texts[done.request.key].tolist()
                    if [*done.request.prompt_ids, *done.token_ids] != text:
                        raise UserError(
                            f"prompt {done.request.key}: two decodes of it differ; the machine's arithmetic is not "
                            "deterministic, so cells cannot be compared (try float64)"
                        )
                    progress.advance()
                    report.rounds += done.stats.rounds
                    for accepted, count in done.stats.rounds_by_accepted.items():
                        report.accept_patterns[accepted] = report.accept_patterns.get(accepted, 0) + count
                observer.compare()
    finally:
        observer.close()


def run_check(
    target: Target,
    stack: MTPStack,
    requests: list[Request],
    *,
    num_drafts: int | None = None,
    batch_size: int = 4,
    min_rounds: int = 200,
    seed: int = 0,
    correct: bool = True,
) -> tuple[CheckReport, CheckReport]:
    """Returns the reports of real and of forced rounds, at least ``min_rounds`` of the latter.

    Args:
        correct: False plants the fault this check exists for, provisional cells left as they are.

    Raises:
        UserError: no requests, nothing to draft with, or a dtype whose noise hides a wrong cell.
    """
    if target.dtype not in NOISE:
        raise UserError(f"check: {target.dtype} rounds too coarsely to tell a wrong cell; use float32 or float64")
    if num_drafts == 0:
        raise UserError("check: with 0 drafts no module cache is filled; use at least 1")
    if not requests:
        raise UserError("check: no prompts given")
    with KeepFloat64() if target.dtype == torch.float64 else nullcontext():
        return _run_check(target, stack, requests, num_drafts, batch_size, min_rounds, seed, correct)


def _run_check(
    target: Target,
    stack: MTPStack,
    requests: list[Request],
    num_drafts: int | None,
    batch_size: int,
    min_rounds: int,
    seed: int,
    correct: bool,
) -> tuple[CheckReport, CheckReport]:
    noise = NOISE[target.dtype]
    options = {"num_drafts": num_drafts, "batch_size": batch_size, "correct": correct}
    real, forced = CheckReport(noise), CheckReport(noise)
    texts = check_real(options, target, stack, requests, real)
    if all(len(text) < 3 for text in texts):
        raise UserError("check: every text has fewer than 3 tokens; give longer prompts or a larger --max-new-tokens")
    while forced.rounds < min_rounds:
        check_forced(options, target, stack, texts, forced, seed + forced.rounds)
    return real, forced

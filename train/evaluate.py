"""Held-out evaluation by *replay*: the acceptance length a real greedy decode of the same text has.

On text that the target wrote greedily, the training forward gives every module's choice at every row;
walking the text as rounds do turns them into counts of accepted drafts (design.md, section 8).

Shapes: B records of a batch, n tokens of the longest, k modules.
"""

import torch
from torch import Tensor

from mtp import MTPStack, Target, UserError, acceptance, alignment
from mtp.acceptance import AcceptanceStats
from mtp.cache import Packed
from mtp.target import Head
from train.data import Rows, lay_out
from train.records import ReadReport, Record

BATCH_TOKENS = 4096


@torch.no_grad()
def choices(head: Head, final: Tensor, wanted: Tensor, chunk_rows: int) -> Tensor:
    """Returns the most likely token at wanted rows, -1 elsewhere: [B, m, H] and bool [B, m] -> int [B, m]."""
    chosen = torch.full(wanted.shape, -1, device=final.device)
    for chunk in wanted.nonzero().split(chunk_rows):
        place = tuple(chunk.unbind(1))
        chosen[place] = head.tokens(head(final[place]).argmax(-1))
    return chosen


@torch.no_grad()
def draft_choices(stack: MTPStack, rows: Rows, hidden: Tensor, wanted: Tensor, chunk_rows: int) -> Tensor:
    """Returns what module i drafts at row t, int [B, n, k], -1 where it has no such row or none is wanted."""
    drafts = torch.full((*rows.tokens.shape, stack.contract.num_modules), -1, device=rows.tokens.device)
    for index, output in stack.unroll(hidden, rows.tokens, Packed(rows.documents)):
        here = alignment.module_rows(wanted, rows.tokens, index=index)
        alignment.module_rows(drafts, rows.tokens, index=index)[..., index - 1] = choices(
            stack.head, output.final, here, chunk_rows
        )
    return drafts


class Replay:
    """The held-out records, batched once, each alone in its row."""

    def __init__(
        self,
        records: list[Record],
        report: ReadReport,
        target: Target,
        *,
        target_hidden: str,
        chunk_rows: int,
        keep: bool,
    ) -> None:
        """Keeps the records that have an answer to replay.

        Raises:
            UserError: none of them has.
        """
        usable = [r for r in records if r.prompt_length and r.prompt_length + 1 < len(r.token_ids)]
        usable = [record for record in usable if len(record.token_ids) <= target.context_length]
        report.skipped["without a prompt and an answer of two tokens to replay"] += len(records) - len(usable)
        report.skipped += type(report.skipped)()  # drops zero counts
        report.records = len(usable)
        if not usable:
            raise UserError(f"{report.path}: no held-out record has a prompt and an answer of at least two tokens")
        self.records = sorted(usable, key=lambda record: len(record.token_ids))
        self.target, self.target_hidden, self.chunk_rows, self.keep = target, target_hidden, chunk_rows, keep
        self._kept: dict[int, Tensor] = {}

    def run(self, stack: MTPStack, *, rank: int, world_size: int, device: torch.device) -> AcceptanceStats:
        """Returns this rank's counts; every rank runs equally many forwards (ZeRO stage 3 needs it)."""
        stats = AcceptanceStats(stack.contract.num_modules)
        batches = self._batches()
        was_training = stack.training
        stack.eval()
        for turn in range(-(-len(batches) // world_size)):
            number = turn * world_size + rank
            batch = batches[number] if number < len(batches) else []
            stats.merge(self._replay_batch(number, batch, stack, device))
        stack.train(was_training)
        return stats

    def _batches(self) -> list[list[Record]]:
        batches: list[list[Record]] = [[]]
        for record in self.records:
            if batches[-1] and len(record.token_ids) * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(record)
        return batches

    @torch.no_grad()
    def _replay_batch(self, number: int, batch: list[Record], stack: MTPStack, device: torch.device) -> AcceptanceStats:
        stats = AcceptanceStats(stack.contract.num_modules)
        shortest = stack.contract.num_modules + 2  # so that every module runs on every rank
        length = max([shortest, *(len(record.token_ids) for record in batch)])
        rows = lay_out([[record] for record in batch] or [[]], length).take(list(range(max(len(batch), 1))), device)
        prompts = torch.tensor([record.prompt_length for record in batch] or [0], device=device)
        wanted = alignment.replayed_rows(rows.documents, prompts)
        drafts = draft_choices(stack, rows, self._hidden(number, rows), wanted, self.chunk_rows).cpu()
        for place, record in enumerate(batch):
            tokens = torch.tensor(record.token_ids)
            stats.merge(acceptance.replay(drafts[place, : len(tokens)], tokens, record.prompt_length or 0))
        return stats

    def _hidden(self, number: int, rows: Rows) -> Tensor:
        if number in self._kept:
            return self._kept[number].to(rows.tokens.device)
        hidden = self.target.forward(rows.tokens, Packed(rows.documents), target_hidden=self.target_hidden).hidden
        if self.keep:
            self._kept[number] = hidden.cpu()
        return hidden


def stats_tensor(stats: AcceptanceStats) -> Tensor:
    """Returns the counts as numbers that add up over ranks: [k+2], rounds by accepted, then proposed."""
    counts = [stats.rounds_by_accepted[accepted] for accepted in range(stats.num_drafts + 1)]
    return torch.tensor([*counts, stats.proposed], dtype=torch.float64)


def stats_from_tensor(values: Tensor) -> AcceptanceStats:
    """Returns the counts of :func:`stats_tensor`."""
    *counts, proposed = (int(value) for value in values.tolist())
    stats = AcceptanceStats(len(counts) - 1)
    stats.proposed = proposed
    stats.rounds_by_accepted.update(dict(enumerate(counts)))
    return stats


def stats_record(stats: AcceptanceStats) -> dict[str, float]:
    """Returns the figures under their log names."""
    record = {"eval/acceptance_length": stats.acceptance_length, "eval/rounds": stats.rounds}
    for depth, (survival, conditional) in enumerate(zip(stats.survival(), stats.conditional(), strict=True), start=1):
        record[f"eval/survival_{depth}"] = survival
        record[f"eval/conditional_{depth}"] = conditional
    return record

"""Held-out evaluation by *replay*: the acceptance length a real greedy decode of the same text has."""

import torch
from torch import Tensor

from mtp import MTPStack, Target, UserError, acceptance, alignment
from mtp.acceptance import AcceptanceStats
from mtp.cache import Packed
from mtp.replay import draft_choices
from train.data import Rows, lay_out
from train.records import ReadReport, Record

BATCH_TOKENS = 4096


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
        stats = AcceptanceStats(stack.contract.draft_steps)
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
        stats = AcceptanceStats(stack.contract.draft_steps)
        shortest = stack.contract.draft_steps + 2  # so that every module runs on every rank
        length = max([shortest, *(len(record.token_ids) for record in batch)])
        rows = lay_out([[record] for record in batch] or [[]], length).take(list(range(max(len(batch), 1))), device)
        prompts = torch.tensor([record.prompt_length for record in batch] or [0], device=device)
        wanted = alignment.replayed_rows(rows.documents, prompts)
        hidden = self._hidden(number, rows)
        drafts = draft_choices(stack, hidden, rows.tokens, rows.documents, wanted, chunk_rows=self.chunk_rows).cpu()
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

"""Records to packed rows, and the order in which steps read them.

The order is a pure function of seed and step, and of nothing else: the same for any number of ranks,
and after a resume. Each row has a lane (its index modulo the batch); lanes are shuffled on their own
every epoch, so a row always meets the same rank and its kept hidden states are computed once.

Shapes: N rows of the data set, B rows of a batch, n tokens of a row.
"""

import bisect
import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mtp import Contract, Target, UserError, alignment
from train.chat import Vocabulary
from train.config import Config
from train.records import ReadReport, Record, read_records

FILL = -1  # index of the all-padding row that fills a batch
OPEN_ROWS = 64  # rows that packing tries before it starts a new one


@dataclass(frozen=True)
class Rows:
    """Packed rows: ``tokens`` int [B, n], ``documents`` int [B, n], ``loss_mask`` bool [B, n] per token."""

    tokens: Tensor
    documents: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def take(self, indices: list[int], device: torch.device | str) -> "Rows":
        """Returns these rows on a device; ``FILL`` gives a row of padding."""
        picked = torch.tensor(indices)
        fill = (picked == FILL)[:, None]
        picked = picked.clamp(min=0)
        return Rows(
            self.tokens[picked].masked_fill(fill, 0).to(device),
            self.documents[picked].masked_fill(fill, alignment.PADDING).to(device),
            self.loss_mask[picked].masked_fill(fill, False).to(device),
        )

    def sha256(self) -> str:
        """Returns a digest of the rows, equal for equal text and packing."""
        digest = hashlib.sha256()
        for tensor in (self.tokens, self.documents, self.loss_mask):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def supervised(self, draft_steps: int) -> Tensor:
        """Returns how many cells of each module have a label: int [k]."""
        counts = [
            alignment.supervised_cells(self.loss_mask, self.documents, index=index).sum()
            for index in range(1, draft_steps + 1)
        ]
        return torch.stack(counts)


def cache_folder(config: Config) -> Path:
    """Returns where the run keeps tokenised sources."""
    return Path(config.data.cache or Path(config.output) / "tokens")


def read_training(
    config: Config, target: Vocabulary, *, write_cache: bool = True
) -> tuple[list[Record], list[ReadReport]]:
    """Returns the records of an epoch, cut to the row length and weighted, and what was read of each source.

    Raises:
        UserError: a source cannot be read, or has nothing to learn.
    """
    data, epoch, reports = config.data, [], []
    for number, source in enumerate(data.train):
        records, report = read_records(source, target, cache=cache_folder(config), write=write_cache)
        records = usable_records(records, data.row_length, data.supervise, report)
        records = weighted(records, source.weight, config.seed + number)
        report.epoch_records = len(records)
        epoch += records
        reports.append(report)
    return epoch, reports


def weighted(records: list[Record], weight: float, seed: int) -> list[Record]:
    """Returns ``weight`` times as many records, at least one: all as often as it goes, a drawn part once more."""
    times, rest = divmod(max(1, round(weight * len(records))), len(records))
    drawn = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))[:rest].sort().values.tolist()
    return records * times + [records[place] for place in drawn]


def read_rows(config: Config, target: Target, *, write_cache: bool = True) -> tuple[Rows, Contract, list[ReadReport]]:
    """Returns a run's packed rows, the contract of its modules, and what was read of each source.

    Args:
        write_cache: whether to keep what was tokenised; of several processes one should.

    Raises:
        UserError: no usable text, or a row length that does not fit the modules or the target.
    """
    data, modules = config.data, config.modules
    if data.row_length < modules.depths + 2:
        raise UserError(
            f"data.row_length = {data.row_length} leaves draft {modules.depths} no row; give at least "
            f"{modules.depths + 2}"
        )
    if data.row_length > target.context_length:
        raise UserError(f"data.row_length = {data.row_length} exceeds the target's {target.context_length} positions")
    records, reports = read_training(config, target, write_cache=write_cache)
    draft_vocab, coverage = draft_vocabulary(
        records, target, size=modules.draft_vocab_size, coverage=modules.draft_vocab_coverage
    )
    for report in reports:
        report.vocab_coverage = coverage
    contract = modules.contract(draft_vocab)
    if data.packing == "one_per_row":
        return lay_out([[record] for record in records], data.row_length), contract, reports
    return pack(records, data.row_length, config.seed), contract, reports


def usable_records(records: list[Record], row_length: int, supervise: str, report: ReadReport) -> list[Record]:
    """Cuts records to the row length (counted) and drops those left without a token to learn (counted)."""
    usable = []
    for record in records:
        learn = record.learn if supervise == "assistant" else memoryview(b"\1" * len(record.learn)).cast("?")
        report.cut += len(record.token_ids) > row_length
        if any(learn[:row_length]):
            usable.append(replace(record, token_ids=record.token_ids[:row_length], learn=learn[:row_length]))
        else:
            report.skip(record.origin, "no token to learn within the row length")
    report.records = len(usable)
    if not usable:
        raise UserError(
            f"{report.path}: no record has a token to learn within data.row_length = {row_length}; raise it, "
            "or set data.supervise: all"
        )
    return usable


def pack(records: list[Record], row_length: int, seed: int) -> Rows:
    """Puts whole documents into rows of ``row_length`` tokens, first fit in an order drawn from the seed.

    Returns:
        Rows whose documents are numbered from 0, padding marked by ``alignment.PADDING`` and never by a token id.
    """
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed)).tolist()
    rows: list[list[Record]] = []
    room: dict[int, int] = {}
    for record in (records[place] for place in order):
        size = len(record.token_ids)
        place = next((row for row, left in room.items() if left >= size), None)
        if place is None:
            if len(room) == OPEN_ROWS:
                del room[min(room, key=lambda row: room[row])]
            place = len(rows)
            rows.append([])
            room[place] = row_length
        rows[place].append(record)
        room[place] -= size
        if room[place] < 2:
            del room[place]
    return lay_out(rows, row_length)


def lay_out(rows: list[list[Record]], row_length: int) -> Rows:
    """Returns rows with the given documents each, padded at the end."""
    shape = (len(rows), row_length)
    packed = Rows(torch.zeros(shape).long(), torch.full(shape, alignment.PADDING), torch.zeros(shape).bool())
    for place, documents in enumerate(rows):
        tokens = [token for record in documents for token in record.token_ids]
        numbers = [number for number, record in enumerate(documents) for _ in record.token_ids]
        packed.tokens[place, : len(tokens)] = torch.tensor(tokens)
        packed.documents[place, : len(tokens)] = torch.tensor(numbers)
        packed.loss_mask[place, : len(tokens)] = torch.tensor([flag for record in documents for flag in record.learn])
    return packed


def draft_vocabulary(
    records: list[Record], target: Target, *, size: int | None, coverage: float | None
) -> tuple[tuple[int, ...] | None, float]:
    """Counts the tokens to learn and keeps the most frequent ones, by number or by the share of them to cover.

    Returns:
        The kept token ids and every end-of-sequence id, ascending (None for the whole vocabulary), and the share
        of the tokens to learn that are among them.
    """
    if (size is None or size >= target.vocab_size) and coverage is None:
        return None, 1.0
    counts: Counter[int] = Counter()
    for record in records:
        counts.update(token for token, learn in zip(record.token_ids, record.learn, strict=True) if learn)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    if coverage is not None:
        seen = list(itertools.accumulate(counts[token] for token in frequent))
        size = 1 + bisect.bisect_left(seen, coverage * counts.total())
    kept = {*frequent[:size], *target.eos_token_ids}
    return tuple(sorted(kept)), sum(counts[token] for token in kept) / counts.total()


class Order:
    """Which rows each optimizer step reads: the same for any number of ranks."""

    def __init__(self, num_rows: int, rows_per_step: int, seed: int) -> None:
        self.num_rows, self.rows_per_step, self.seed = num_rows, rows_per_step, seed
        self.steps_per_epoch = -(-num_rows // rows_per_step)
        self._epoch, self._lanes = -1, torch.empty(0)

    def step(self, step: int) -> list[int]:
        """Returns the rows of step 0, 1, ...: one of each lane, ``FILL`` where a lane has run out.

        Over the steps of one epoch every row appears exactly once.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._lanes = epoch, self._shuffled(epoch)
        return self._lanes[place].tolist()

    def _shuffled(self, epoch: int) -> Tensor:
        lanes = torch.full((self.steps_per_epoch, self.rows_per_step), FILL)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        for lane in range(self.rows_per_step):
            rows = torch.arange(self.num_rows)[lane :: self.rows_per_step]
            lanes[: len(rows), lane] = rows[torch.randperm(len(rows), generator=generator)]
        return lanes


def micro_batches(rows: list[int], micro_rows: int, *, rank: int, world_size: int) -> list[list[int]]:
    """Returns this rank's share of a step's rows, in micro batches; every rank gets equally many."""
    share = len(rows) // world_size
    mine = rows[rank * share : (rank + 1) * share]
    return [mine[start : start + micro_rows] for start in range(0, share, micro_rows)]

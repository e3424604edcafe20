"""The target's side of a batch: hidden states, the head's input, and the log-normaliser of each row.

The target's probability of token x at row r is ``exp(logit_x - log_normaliser_r)``, exact over its whole
vocabulary; so the objective needs the logits of kept tokens only, a chunk of rows at a time.

Shapes: B rows of a batch, n tokens of a row, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtp import Target, alignment
from mtp.cache import Packed
from mtp.target import Head
from train.data import FILL, Rows


class Teacher(NamedTuple):
    """``hidden`` [B, n, H] at the contract's point, ``final`` [B, n, H], ``log_normaliser`` [B, n]."""

    hidden: Tensor
    final: Tensor
    log_normaliser: Tensor


def wide(logits: Tensor) -> Tensor:
    """Returns logits in at least float32, the precision of every softmax here."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def probabilities(head: Head, final: Tensor, log_normaliser: Tensor) -> Tensor:
    """Returns the target's probability of each token of a (restricted) head: [c, H] and [c] -> [c, X]."""
    return (wide(head(final)) - log_normaliser[:, None]).exp()


@torch.no_grad()
def log_normalisers(head: Head, final: Tensor, wanted: Tensor, chunk_rows: int) -> Tensor:
    """Returns log sum exp of the whole vocabulary's logits, [B, n], at wanted rows (0 elsewhere), in chunks."""
    rows = wanted.nonzero()
    values = final.new_zeros(wanted.shape, dtype=torch.promote_types(final.dtype, torch.float32))
    for chunk in rows.split(chunk_rows):
        place = tuple(chunk.unbind(1))
        values[place] = wide(head(final[place])).logsumexp(-1)
    return values


@torch.no_grad()
def teach(target: Target, rows: Rows, *, target_hidden: str, chunk_rows: int, soft: bool = True) -> Teacher:
    """Runs the frozen target over packed rows; no logits of the batch are made, none at all for hard labels."""
    hidden, final = target.forward(rows.tokens, Packed(rows.documents), target_hidden=target_hidden)
    wanted = alignment.supervised_label_rows(rows.loss_mask, rows.documents, index=0)
    wanted = wanted if soft else torch.zeros_like(wanted)
    return Teacher(hidden, final, log_normalisers(target.head, final, wanted, chunk_rows))


class TeacherMemory:
    """Keeps the target's side of every row it has seen, in host memory, so that the target runs once per row."""

    def __init__(self, target: Target, *, target_hidden: str, chunk_rows: int, keep: bool, soft: bool = True) -> None:
        self.target, self.target_hidden, self.chunk_rows, self.keep = target, target_hidden, chunk_rows, keep
        self.soft = soft
        self._kept: dict[int, Teacher] = {}

    def __call__(self, indices: list[int], rows: Rows) -> Teacher:
        """Returns the target's side of these rows; ``indices`` say which of the data set they are."""
        if not self.keep:
            return self._run(rows)
        missing = [place for place, index in enumerate(indices) if index not in self._kept and index != FILL]
        if self.target.any_rank(bool(missing) or not self._kept):
            mine = Rows(rows.tokens[missing], rows.documents[missing], rows.loss_mask[missing]) if missing else rows
            fresh = self._run(mine)
            for row, place in enumerate(missing):
                self._kept[indices[place]] = self._stored(fresh, row)
            if not self._kept:
                return fresh  # nothing but padding so far
        like = next(iter(self._kept.values()))
        blank = Teacher(*(torch.zeros_like(tensor) for tensor in like))
        parts = [self._kept.get(index, blank) for index in indices]
        device = rows.tokens.device
        hidden, final, normaliser = (torch.stack(tensors).to(device) for tensors in zip(*parts, strict=True))
        return Teacher(hidden, final, normaliser)

    def _run(self, rows: Rows) -> Teacher:
        point, chunk = self.target_hidden, self.chunk_rows
        return teach(self.target, rows, target_hidden=point, chunk_rows=chunk, soft=self.soft)

    def _stored(self, teacher: Teacher, row: int) -> Teacher:
        final = teacher.final[row].to("cpu", copy=True)
        same = self.target_hidden == "post_norm"
        hidden = final if same else teacher.hidden[row].to("cpu", copy=True)
        return Teacher(hidden, final, teacher.log_normaliser[row].to("cpu", copy=True))

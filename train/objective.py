"""The loss of every module, head and loss in chunks of label rows.

Depth i: ``sum over supervised cells (t, i) of its loss``, divided by the depth's number of supervised cells in
the *global* batch, weighed by beta^(i-1) or ``step_weights[i-1]`` (normalised). With p the target's exact
distribution at row t+i, q the module's over the draft vocabulary (0 outside of it), x the vocabulary and y the token
x_{t+i+1}:

- ``kl``: ``- sum_x p(x) log q(x)``, soft labels; its gradient is that of KL(p, q);
- ``cross_entropy``: ``- log q(y)``, hard labels; a y outside the draft vocabulary adds nothing, but its cell counts
  (as the soft loss ignores the mass of p outside);
- ``lk``: ``s * kl + (1 - s) * TV``, ``TV = 1 - sum_x min(p(x), q(x))``, the chance that a sampled draft is rejected;
  s is 1 during warm-up, then falls linearly to 0 at the end of the run;
- ``tv``: ``kl`` during warm-up, then end to end: depth j of row t is ``1 - prod_{i<=j} (1 - TV_i)``, the chance that
  not all j sampled drafts are accepted; an unsupervised cell is left out of the product (its token is given), and
  all depths weigh alike: on rows with k supervised cells it is ``1 - (1/k) sum_j prod_{i<=j} (1 - TV_i)``.

All modules that predict from one label row share the teacher's probabilities, so the walk is over label rows
r = t + i; logits exist for one chunk and one module at a time, whatever k, the batch and the vocabulary are.
(``torch.nn.functional.linear_cross_entropy`` is not used: of these only ``cross_entropy`` with a plain head could be,
it knows no soft-cap, and its chunks of soft labels would need p of all rows at once.)

Shapes: B rows of a batch, n tokens of a row, H hidden size, c label rows of a chunk, X draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mtp import MTPStack, alignment
from mtp.cache import Packed
from mtp.target import Head
from train.config import Loss
from train.data import Rows
from train.teacher import Teacher, probabilities, wide

LOSS, DIVERGENCE, CELLS = 0, 1, 2  # rows of the statistics


def depth_weights(beta: float, draft_steps: int) -> list[float]:
    """Returns beta^(i-1) for i = 1..k, normalised to sum 1."""
    return normalised([beta**depth for depth in range(draft_steps)])


def normalised(weights: Sequence[float]) -> list[float]:
    """Returns the weights scaled to sum 1."""
    return [weight / sum(weights) for weight in weights]


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step: ``hard`` labels; ``soft``, a share of KL and the rest TV; or ``end_to_end`` TV."""

    form: Literal["hard", "soft", "end_to_end"]
    kl_share: float = 1.0

    @classmethod
    def at(cls, options: Loss, progress: float) -> "StepLoss":
        """Returns the loss at a progress of the run in 0..1."""
        if options.kind == "cross_entropy":
            return cls("hard")
        if options.kind == "kl" or progress < options.kl_warmup_fraction:
            return cls("soft")
        if options.kind == "tv":
            return cls("end_to_end")
        return cls("soft", 1 - (progress - options.kl_warmup_fraction) / max(1 - options.kl_warmup_fraction, 1e-9))

    def weights(self, options: Loss, draft_steps: int) -> list[float]:
        """Returns what each depth weighs; they sum to 1."""
        if options.step_weights is None or self.form == "end_to_end":
            return depth_weights(1.0 if self.form == "end_to_end" else options.beta, draft_steps)
        return normalised(options.step_weights)


class Objective(nn.Module):
    """What the engine trains: the stack and its loss. The target is in no state dict here."""

    def __init__(self, stack: MTPStack, chunk_rows: int) -> None:
        super().__init__()
        self.stack, self.chunk_rows = stack, chunk_rows

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor,
        loss_mask: Tensor,
        hidden: Tensor,
        final: Tensor,
        log_normaliser: Tensor,
        scales: Tensor,
        loss: StepLoss,
    ) -> tuple[Tensor, Tensor]:
        """Runs the training forward and its loss.

        Args:
            tokens, documents, loss_mask: [B, n], as in :class:`train.data.Rows`.
            hidden, final, log_normaliser: as in :class:`train.teacher.Teacher`.
            scales: [k], what each depth's summed loss is multiplied by (weight / global cells ...).
            loss: which loss this step has.

        Returns:
            The loss, and statistics [3, k] without gradient: summed loss, summed KL divergence (over the
            draft vocabulary; 0 for hard labels, which never see p) and supervised cells of each depth.
        """
        finals = [output.final for _, output in self.stack.unroll(hidden, tokens, Packed(documents))]
        labelled = [
            alignment.supervised_label_rows(loss_mask, documents, index=index) for index in range(1, len(finals) + 1)
        ]
        work = Work(self.stack.head, tokens, final, log_normaliser, labelled, self.chunk_rows, loss)
        total, statistics = ChunkedLoss.apply(work, scales, *finals)
        missing = len(scales) - len(finals)  # rows of fewer than k+1 tokens have no cell of the last modules
        return total, nn.functional.pad(statistics, (0, missing)) if missing else statistics


@dataclass(frozen=True)
class Work:
    """What the loss needs beside the modules' outputs; ``labelled`` has a bool [B, n] of label rows per depth."""

    head: Head
    tokens: Tensor
    final: Tensor
    log_normaliser: Tensor
    labelled: list[Tensor]
    chunk_rows: int
    loss: StepLoss

    def label(self, place: tuple[Tensor, ...]) -> Tensor:
        """Returns the labels at these rows: token places int [c] (-1: none of the draft's), or p [c, X]."""
        if self.loss.form == "hard":
            return self.head.places(alignment.hard_labels(self.tokens, index=0)[place])
        return probabilities(self.head, self.final[place], self.log_normaliser[place])


class Cells(NamedTuple):
    """The cells of one depth that find their label in a chunk: ``mine`` bool [c] of it, ``place`` their row and t."""

    depth: int
    mine: Tensor
    place: tuple[Tensor, Tensor]

    def of(self, per_label_row: Tensor) -> Tensor:
        """Returns the entries of a per-chunk tensor that belong to these cells."""
        return per_label_row if bool(self.mine.all()) else per_label_row[self.mine]


def chunks(labelled: list[Tensor], chunk_rows: int) -> Iterator[tuple[tuple[Tensor, ...], list[Cells]]]:
    """Yields chunks of label rows, and the cells of each depth (from 0) that find their labels there."""
    for rows in torch.stack(labelled).any(0).nonzero().split(chunk_rows):
        place, cells = tuple(rows.unbind(1)), []
        for depth, wanted in enumerate(labelled):
            mine = wanted[place]
            if mine.any():
                batch, label_row = rows[mine].unbind(1)
                cells.append(Cells(depth, mine, (batch, alignment.cells_of_label_rows(label_row, index=depth + 1))))
        yield place, cells


class ChunkedLoss(torch.autograd.Function):
    """Loss and its gradient in one walk over chunks; backward only hands the gradient out.

    End to end the factors of a row's products lie in different chunks. Each cell's logits reach the loss through
    its own overlap alone, so the walk stores the overlaps' gradients, and what they are multiplied by follows.
    """

    @staticmethod
    def forward(ctx: Any, work: Work, scales: Tensor, *finals: Tensor) -> Any:
        trained = ctx.needs_input_grad[2:]  # not a frozen module's output
        gradients = [torch.zeros_like(final) if want else None for final, want in zip(finals, trained, strict=True)]
        statistics = work.log_normaliser.new_zeros(3, len(finals))
        scales = scales[: len(finals)].to(statistics.dtype)
        end_to_end = work.loss.form == "end_to_end"
        overlaps = work.log_normaliser.new_ones(len(finals) if end_to_end else 0, *work.tokens.shape)
        counted = torch.zeros_like(overlaps)
        for place, cells in chunks(work.labelled, work.chunk_rows):
            label = work.label(place)
            negentropy = torch.special.entr(label).sum(-1).neg() if work.loss.form != "hard" else None
            for each in cells:
                depth, gradient = each.depth, gradients[each.depth]
                final = finals[depth][each.place].detach().requires_grad_(gradient is not None)
                values, cross_entropy, slope = _cell_losses(work.loss, work.head, final, each.of(label))
                statistics[LOSS, depth] += values.sum()
                statistics[CELLS, depth] += len(values)
                if negentropy is not None:
                    statistics[DIVERGENCE, depth] += cross_entropy.sum() + each.of(negentropy).sum()
                if end_to_end:
                    overlaps[depth][each.place], counted[depth][each.place] = values, 1
                if gradient is not None:
                    gradient[each.place] = slope if end_to_end else slope * scales[depth].to(slope.dtype)
        if end_to_end:
            statistics[LOSS], factors = _end_to_end(overlaps, counted, scales)
            for depth, gradient in enumerate(gradients):
                if gradient is not None:
                    gradient *= alignment.module_rows(factors[depth], work.tokens, index=depth + 1)[..., None]
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(statistics)
        return (statistics[LOSS] * scales).sum(), statistics

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        gradients = (None if each is None else each * grad_loss.to(each.dtype) for each in ctx.saved_tensors)
        return None, None, *gradients


@torch.enable_grad()
def _cell_losses(loss: StepLoss, head: Head, final: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of each cell [c] (end to end: its overlap), its cross entropy [c], and the gradient [c, H].

    Args:
        final: [c, H]; where it requires no gradient, none is computed and the last one returned is empty.
        label: p [c, X] or places int [c].
    """
    log_q = wide(head(final)).log_softmax(-1)
    if loss.form == "hard":
        values = cross_entropy = nn.functional.nll_loss(log_q, label, ignore_index=-1, reduction="none")
    else:
        cross_entropy = -(label * log_q).sum(-1)
        values = cross_entropy
        if loss.form == "end_to_end":
            values = overlap(label, log_q)
        elif loss.kl_share < 1:
            values = loss.kl_share * cross_entropy + (1 - loss.kl_share) * (1 - overlap(label, log_q))
    slope = torch.autograd.grad(values.sum(), final)[0] if final.requires_grad else final.new_empty(0)
    return values.detach(), cross_entropy.detach(), slope


def overlap(p: Tensor, log_q: Tensor) -> Tensor:
    """Returns sum_x min(p(x), q(x)), the chance that a draft sampled from q is accepted: [c, X] -> [c]."""
    return torch.minimum(p, log_q.exp()).sum(-1)


def _end_to_end(overlaps: Tensor, counted: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the summed loss of each depth [k] and the gradient of the scaled loss by overlap [k, B, n].

    Args:
        overlaps: [k, B, n], by the row t that the drafts start from, 1 where the cell has no label.
        counted: [k, B, n], 1 where it has one, else 0.
        scales: [k].
    """
    with torch.enable_grad():
        factors = overlaps.requires_grad_(True)
        losses = ((1 - factors.cumprod(0)) * counted).sum((1, 2))
        (gradient,) = torch.autograd.grad((losses * scales).sum(), factors)
    return losses.detach(), gradient


def objective_inputs(rows: Rows, teacher: Teacher) -> tuple[Tensor, ...]:
    """Returns the leading arguments of :meth:`Objective.forward`."""
    return rows.tokens, rows.documents, rows.loss_mask, teacher.hidden, teacher.final, teacher.log_normaliser

"""The loss: cross entropy of every module against the target's own distribution, in chunks of label rows.

Depth i: ``sum over supervised cells (t, i) of - sum_x p_{t+i}(x) log q^i_t(x)``, x over the draft
vocabulary, p the target's exact probability, divided by the depth's number of supervised cells in the
*global* batch, weighed by beta^(i-1) (normalised). All modules that predict from one label row share
the teacher's probabilities, so the walk is over label rows r = t + i; logits exist for one chunk and
one module at a time, whatever k, the batch and the vocabulary are.

Shapes: B rows of a batch, n tokens of a row, H hidden size, c label rows of a chunk, X draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mtp import MTPStack, alignment
from mtp.cache import Packed
from mtp.target import Head
from train.data import Rows
from train.teacher import Teacher, wide

CROSS_ENTROPY, DIVERGENCE, CELLS = 0, 1, 2  # rows of the statistics


def depth_weights(beta: float, draft_steps: int) -> list[float]:
    """Returns beta^(i-1) for i = 1..k, normalised to sum 1."""
    raw = [beta**depth for depth in range(draft_steps)]
    return [weight / sum(raw) for weight in raw]


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
    ) -> tuple[Tensor, Tensor]:
        """Runs the training forward and its loss.

        Args:
            tokens, documents, loss_mask: [B, n], as in :class:`train.data.Rows`.
            hidden, final, log_normaliser: as in :class:`train.teacher.Teacher`.
            scales: [k], what each depth's summed cross entropy is multiplied by (weight / global cells ...).

        Returns:
            The loss, and statistics [3, k] without gradient: summed cross entropy, summed KL
            divergence (both over the draft vocabulary) and supervised cells of each depth.
        """
        finals = [output.final for _, output in self.stack.unroll(hidden, tokens, Packed(documents))]
        labelled = [
            alignment.supervised_label_rows(loss_mask, documents, index=index) for index in range(1, len(finals) + 1)
        ]
        work = (self.stack.head, final, log_normaliser, labelled, self.chunk_rows)
        loss, statistics = SoftLabelLoss.apply(work, scales, *finals)
        missing = len(scales) - len(finals)  # rows of fewer than k+1 tokens have no cell of the last modules
        return loss, nn.functional.pad(statistics, (0, missing)) if missing else statistics


class SoftLabelLoss(torch.autograd.Function):
    """Loss and its gradient in one walk over chunks; backward only hands the gradient out."""

    @staticmethod
    def forward(ctx: Any, work: tuple[Head, Tensor, Tensor, list[Tensor], int], scales: Tensor, *finals: Tensor) -> Any:
        head, target_final, log_normaliser, labelled, chunk_rows = work
        gradients = [torch.zeros_like(final) for final in finals]
        statistics = log_normaliser.new_zeros(3, len(finals))
        for rows in torch.stack(labelled).any(0).nonzero().split(chunk_rows):
            place = tuple(rows.unbind(1))
            log_p = wide(head(target_final[place])) - log_normaliser[place][:, None]  # [c, X]
            p = log_p.exp()
            negentropy = (p * log_p).sum(-1)
            del log_p
            for depth, (final, gradient) in enumerate(zip(finals, gradients, strict=True)):
                mine = labelled[depth][place]
                if not mine.any():
                    continue
                batch, label_row = rows[mine].unbind(1)
                cell = (batch, alignment.cells_of_label_rows(label_row, index=depth + 1))
                probabilities = p if bool(mine.all()) else p[mine]
                cross_entropy, slope = _cells_loss(head, final[cell], probabilities)
                gradient[cell] = slope * scales[depth].to(slope.dtype)
                statistics[CROSS_ENTROPY, depth] += cross_entropy
                statistics[DIVERGENCE, depth] += cross_entropy + negentropy[mine].sum()
                statistics[CELLS, depth] += len(batch)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(statistics)
        loss = (statistics[CROSS_ENTROPY] * scales[: len(finals)].to(statistics.dtype)).sum()
        return loss, statistics

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        return None, None, *(gradient * grad_loss.to(gradient.dtype) for gradient in ctx.saved_tensors)


def _cells_loss(head: Head, final: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the summed cross entropy of [c, H] head inputs against p [c, X], and its gradient [c, H]."""
    with torch.enable_grad():
        leaf = final.detach().requires_grad_(True)
        loss = -(p * wide(head(leaf)).log_softmax(-1)).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slope


def objective_inputs(rows: Rows, teacher: Teacher) -> tuple[Tensor, ...]:
    """Returns the leading arguments of :meth:`Objective.forward`."""
    return rows.tokens, rows.documents, rows.loss_mask, teacher.hidden, teacher.final, teacher.log_normaliser

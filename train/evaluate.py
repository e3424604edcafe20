"""Held-out evaluation: the acceptance length of a real greedy decode by *replay*, and of sampled drafts in expectation.

*Expected acceptance length* is ``1 + sum_j prod_{i<=j} sum_x min(p(x), q_i(x))``, the mean over every row t from
which a round can start: the prompt's last row to the text's third last one. p is the target's distribution at row
t+i, q_i that of module i in cell (t, i), both at temperature 1 without top-k or top-p, q_i 0 outside the draft
vocabulary; j runs over the drafts that replay can accept at t (fewer near the end of the text). It is read off
the training forward, so module i sees the text's own tokens where a decode would have sampled drafts: it is an
estimate of what sampled drafts give on text like this, exact only for the first draft, and not a replay.

Shapes: B sequences, n tokens of the longest, H hidden size, k modules.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp import MTPStack, Target, UserError, acceptance, alignment
from mtp.acceptance import AcceptanceStats
from mtp.cache import Packed
from mtp.replay import draft_choices
from mtp.target import Head
from train.data import Rows, lay_out
from train.objective import chunks, overlap
from train.records import ReadReport, Record
from train.teacher import Teacher, log_normalisers, probabilities, wide

BATCH_TOKENS = 4096


@dataclass
class Evaluation:
    """Counts that add up over batches and ranks: replayed rounds; drafts accepted in expectation, summed over rows."""

    replayed: AcceptanceStats
    expected: float = 0.0
    rows: int = 0

    def merge(self, other: "Evaluation") -> None:
        """Adds another's counts."""
        self.replayed.merge(other.replayed)
        self.expected += other.expected
        self.rows += other.rows

    def tensor(self) -> Tensor:
        """Returns the counts as float64 [k+4]: rounds by accepted drafts, then proposed, expected, rows."""
        stats = self.replayed
        counts = [stats.rounds_by_accepted[accepted] for accepted in range(stats.num_drafts + 1)]
        return torch.tensor([*counts, stats.proposed, self.expected, self.rows], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, values: Tensor) -> "Evaluation":
        """Returns the counts of :meth:`tensor`."""
        *counts, proposed, expected, rows = values.tolist()
        stats = AcceptanceStats(len(counts) - 1)
        stats.proposed = int(proposed)
        stats.rounds_by_accepted.update({accepted: int(count) for accepted, count in enumerate(counts)})
        return cls(stats, expected, int(rows))

    def record(self) -> dict[str, float]:
        """Returns the figures under their log names."""
        stats = self.replayed
        record = {
            "eval/acceptance_length": stats.acceptance_length,
            "eval/expected_acceptance_length": 1 + self.expected / max(self.rows, 1),
            "eval/rounds": stats.rounds,
        }
        for depth, (survival, conditional) in enumerate(
            zip(stats.survival(), stats.conditional(), strict=True), start=1
        ):
            record[f"eval/survival_{depth}"] = survival
            record[f"eval/conditional_{depth}"] = conditional
        return record


@torch.no_grad()
def expected_accepted(
    head: Head, finals: list[Tensor], teacher: Teacher, proposed: list[Tensor], chunk_rows: int
) -> Tensor:
    """Returns how many sampled drafts of a round started at row t are accepted in expectation: [B, n], in chunks.

    Args:
        head: of the modules.
        finals: what each module gives it, [B, n-i, H].
        teacher: with log-normalisers at the proposed rows.
        proposed: bool [B, n] of each depth, :func:`mtp.alignment.proposed_label_rows`.
    """
    overlaps = teacher.log_normaliser.new_zeros(len(finals), *teacher.log_normaliser.shape)
    for place, cells in chunks(proposed, chunk_rows):
        p = probabilities(head, teacher.final[place], teacher.log_normaliser[place])
        for each in cells:
            log_q = wide(head(finals[each.depth][each.place])).log_softmax(-1)
            overlaps[each.depth][each.place] = overlap(each.of(p), log_q)
    return overlaps.cumprod(0).sum(0)


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
        usable = []
        for record in records:
            if not record.prompt_length or record.prompt_length + 1 >= len(record.token_ids):
                report.skip(record.origin, "without a prompt and an answer of two tokens to replay")
            elif len(record.token_ids) > target.context_length:
                report.skip(record.origin, "longer than the target's positions")
            else:
                usable.append(record)
        report.records = len(usable)
        if not usable:
            raise UserError(f"{report.path}: no held-out record has a prompt and an answer of at least two tokens")
        self.records = sorted(usable, key=lambda record: len(record.token_ids))
        self.target, self.target_hidden, self.chunk_rows, self.keep = target, target_hidden, chunk_rows, keep
        self._kept: dict[int, Teacher] = {}

    def run(self, stack: MTPStack, *, rank: int, world_size: int, device: torch.device) -> Evaluation:
        """Returns this rank's counts; every rank runs equally many forwards (ZeRO stage 3 needs it)."""
        result = Evaluation(AcceptanceStats(stack.contract.draft_steps))
        batches = self._batches()
        was_training = stack.training
        stack.eval()
        for turn in range(-(-len(batches) // world_size)):
            number = turn * world_size + rank
            batch = batches[number] if number < len(batches) else []
            result.merge(self._evaluate_batch(number, batch, stack, device))
        stack.train(was_training)
        return result

    def _batches(self) -> list[list[Record]]:
        batches: list[list[Record]] = [[]]
        for record in self.records:
            if batches[-1] and len(record.token_ids) * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(record)
        return batches

    @torch.no_grad()
    def _evaluate_batch(self, number: int, batch: list[Record], stack: MTPStack, device: torch.device) -> Evaluation:
        depths = stack.contract.draft_steps
        stats = AcceptanceStats(depths)
        shortest = depths + 2  # so that every module runs on every rank
        length = max([shortest, *(len(record.token_ids) for record in batch)])
        rows = lay_out([[record] for record in batch] or [[]], length).take(list(range(max(len(batch), 1))), device)
        prompts = torch.tensor([record.prompt_length for record in batch] or [0], device=device)
        teacher = self._teacher(number, rows, prompts)
        outputs = list(stack.unroll(teacher.hidden, rows.tokens, Packed(rows.documents)))
        wanted = alignment.replayed_rows(rows.documents, prompts)
        drafts = draft_choices(stack, outputs, rows.tokens, wanted, chunk_rows=self.chunk_rows).cpu()
        for place, record in enumerate(batch):
            tokens, prompt = torch.tensor(record.token_ids), record.prompt_length or 0
            stats.merge(acceptance.replay(drafts[place, : len(tokens)], tokens, prompt, limit=len(tokens)))
        starts, *proposed = (
            alignment.proposed_label_rows(rows.documents, prompts, index=index) for index in range(depths + 1)
        )
        finals = [output.final for _, output in outputs]
        accepted = expected_accepted(stack.head, finals, teacher, proposed, self.chunk_rows)
        return Evaluation(stats, float(accepted.double().sum()), int(starts.sum()))

    def _teacher(self, number: int, rows: Rows, prompts: Tensor) -> Teacher:
        if number in self._kept:
            return Teacher(*(tensor.to(rows.tokens.device) for tensor in self._kept[number]))
        hidden, final = self.target.forward(rows.tokens, Packed(rows.documents), target_hidden=self.target_hidden)
        labels = alignment.proposed_label_rows(rows.documents, prompts, index=1)
        teacher = Teacher(hidden, final, log_normalisers(self.target.head, final, labels, self.chunk_rows))
        if self.keep:
            on_host = final.cpu()
            same = self.target_hidden == "post_norm"
            self._kept[number] = Teacher(on_host if same else hidden.cpu(), on_host, teacher.log_normaliser.cpu())
        return teacher

"""The engine: draft with k modules, verify with the target, correct the module caches.

A round, for every sequence of a ragged batch (design: ALIGNMENT.md, README "How it works"):

1. verify: the target runs x_L and the d drafts in one forward, rows P+1..P+1+d;
2. commit: A accepted drafts and the target's next token, L += A+1, P = L-1;
3. correct and draft, one pass of k module launches: the rows whose cells are missing or were
   computed from rejected drafts are run again on the target's verified hidden states, and the
   last row of module i drafts token L+i.

Sequences occupy slots 0..n-1 of tables addressed by row, so a ragged batch is a matter of row
numbers, and a finished sequence is replaced by moving the last slot over it.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from infer.pickers import Greedy, Picker
from infer.requests import Completion, Request, Sequence, validate_prompt
from mtp import MTPStack, Target, UserError, alignment
from mtp.acceptance import AcceptanceStats, emitted, leading_matches
from mtp.cache import Cells, CellTable

PREFILL_CHUNK = 512  # rows a forward; bounds the memory of a long prompt


class Engine:
    """Decodes requests in a batch of at most ``batch_size`` sequences."""

    def __init__(
        self,
        target: Target,
        stack: MTPStack | None = None,
        *,
        num_drafts: int | None = None,
        batch_size: int = 1,
        correct: bool = True,
        picker: Picker | None = None,
        eos_token_ids: tuple[int, ...] | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        """Args:
            stack: the modules; None decodes with the target alone.
            num_drafts: d, drafts a round; modules beyond d are not run. Default: all modules. A ``recursive``
                module can draft more steps than it was trained for.
            correct: False leaves provisional cells as they are after a rejection, as engines without
                correction do. The text stays the target's; acceptance falls. For comparison only.
            eos_token_ids: default, the target's own; empty never stops.

        Raises:
            UserError: more drafts than trained modules, or a size below its minimum.
        """
        trained = 0 if stack is None else stack.contract.draft_steps
        self.recursive = stack is not None and stack.contract.recursive
        num_drafts = trained if num_drafts is None else num_drafts
        if num_drafts < 0 or (num_drafts > trained and not self.recursive):
            raise UserError(
                f"drafts: {num_drafts} asked for, but the checkpoint has {trained} trained modules; use 0..{trained}"
            )
        # Modules with weights, and caches, of their own.
        self.num_modules = min(num_drafts, 1) if self.recursive else num_drafts
        if batch_size < 1 or prefill_chunk < 1:
            raise UserError("batch size and prefill chunk must be at least 1")
        self.target, self.stack, self.num_drafts = target, stack, num_drafts
        self.batch_size, self.correct, self.prefill_chunk = batch_size, correct, prefill_chunk
        self.picker: Picker = picker or Greedy()
        self.eos_token_ids = target.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.target_hidden = "post_norm" if stack is None else stack.contract.target_hidden
        self.active: list[Sequence] = []
        self.target_tables = [CellTable(batch_size) for _ in target.layer_types]
        self.module_tables = [CellTable(batch_size) for _ in range(self.num_modules)]
        self.extra_tables: list[CellTable] = []  # of an observer, moved with the sequences
        self._tokens = torch.zeros(batch_size, 0, dtype=torch.long, device=target.device)
        # Hidden states of the last rows, row r at r mod (2k+1): a round writes k+1 rows from P+1 on and
        # then reads back to k rows before the new P.
        self._stash = torch.zeros(
            batch_size, 2 * num_drafts + 1, target.hidden_size, dtype=target.dtype, device=target.device
        )

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yields completions as they finish; new requests take freed slots.

        Raises:
            UserError: a prompt is empty or does not fit the target's context.
        """
        pending = iter(requests)
        exhausted = False
        while True:
            while not exhausted and len(self.active) < self.batch_size:
                request = next(pending, None)
                if request is None:
                    exhausted = True
                elif done := self.submit(request):
                    yield done
            if not self.active:
                return
            yield from self.step()

    @torch.inference_mode()
    def submit(self, request: Request) -> Completion | None:
        """Prefills a request into a free slot and drafts; returns its completion if one token ends it."""
        try:
            validate_prompt(request.prompt_ids, self.target)
            if request.max_new_tokens < 1:
                raise UserError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        except UserError as error:
            raise UserError(f"prompt {request.key}: {error}") from None
        assert len(self.active) < self.batch_size
        length = len(request.prompt_ids)
        limit = min(request.max_new_tokens, self.target.context_length - length)
        sequence = Sequence(request, limit, AcceptanceStats(self.num_drafts))
        slot = len(self.active)
        self._reserve(length + limit + 2 * self.num_drafts + 2)
        self._tokens[slot, :length] = torch.tensor(request.prompt_ids, device=self._tokens.device)
        pick = self._prefill(slot, request)
        self._tokens[slot, length] = pick
        sequence.last_token = length
        self._emit(sequence, [pick])
        if sequence.finish_reason:
            return sequence.completion()
        self.active.append(sequence)
        if self.num_drafts:
            last_row = torch.tensor([length - 1], device=self._tokens.device)
            self._draft(slice(slot, slot + 1), alignment.drafting_start(last_row, self.num_modules))
        return None

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Runs one round for all active sequences and returns those it completed."""
        batch = slice(0, len(self.active))
        last_row = alignment.last_row_with_hidden(self._last_tokens(batch))
        limits = [alignment.draft_limit(sequence.remaining, self.num_drafts) for sequence in self.active]
        rows = alignment.verify_rows(last_row, max(limits))
        picks, matches = self._verify(batch, rows)
        accepted = torch.tensor([min(m, limit) for m, limit in zip(matches, limits, strict=True)], device=rows.device)
        start = self._first_row_to_run(last_row, accepted)
        for sequence, block, limit, count, first in zip(
            self.active, picks, limits, accepted.tolist(), start.tolist(), strict=True
        ):
            emitted_now = self._emit(sequence, block[: count + 1])
            sequence.last_token += emitted_now
            sequence.stats.add_round(emitted_now - 1, proposed=limit)
            sequence.redo_from = first
        completions = self._release_finished()
        if self.num_drafts and self.active:
            redo_from = torch.tensor([sequence.redo_from for sequence in self.active], device=rows.device)
            self._draft(slice(0, len(self.active)), redo_from)
        return completions

    # ------------------------------------------------------------------ the three passes
    def _prefill(self, slot: int, request: Request) -> int:
        """Runs target and modules over the prompt in chunks; returns the target's first token."""
        length, only = len(request.prompt_ids), slice(slot, slot + 1)
        for first in range(0, length, self.prefill_chunk):
            end = min(first + self.prefill_chunk, length)
            rows = torch.arange(first, end, device=self._tokens.device)[None]
            cells = Cells(self.target_tables, rows, only, end)
            output = self.target.forward(self._tokens[only, first:end], cells, target_hidden=self.target_hidden)
            self._ingest(output.hidden, Cells(self.module_tables, rows, only, end))
            tail = self._stash.shape[1]
            self._write_stash(only, rows[:, -tail:], output.hidden[:, -tail:])
        logits = self.target.head(output.final[:, -1:])
        return int(self.picker.target(logits, rows[:, -1:], [request]))

    def _ingest(self, hidden: Tensor, cells: Cells) -> None:
        """Runs every module over rows of the prompt. Cells that read beyond it are redone by the first draft."""
        for index in range(1, self.num_modules + 1):
            assert self.stack is not None
            read = self._tokens[cells.sequences].gather(1, alignment.token_rows(cells.rows, index=index))
            output = self.stack(hidden, read, cells, index=index)
            hidden = self.stack.next_input(hidden, output)

    def _verify(self, batch: slice, rows: Tensor) -> tuple[list[list[int]], list[int]]:
        """Runs x_L and the drafts through the target; returns its tokens after each row, and the matches."""
        tokens = self._tokens[batch].gather(1, rows)
        cells = Cells(self.target_tables, rows, batch, int(rows.max()) + 1)
        output = self.target.forward(tokens, cells, target_hidden=self.target_hidden)
        requests = [sequence.request for sequence in self.active]
        picks = self.picker.target(self.target.head(output.final), rows, requests)
        self._tokens[batch].scatter_(1, alignment.token_rows(rows, index=1), picks)
        if self.num_drafts:
            self._write_stash(batch, rows, output.hidden)
        matches = leading_matches(tokens[:, 1:], picks[:, :-1])
        return picks.tolist(), matches.tolist()

    def _first_row_to_run(self, old_last_row: Tensor, accepted: Tensor) -> Tensor:
        """Returns from which row on the modules run after a round that accepted so many drafts: [B]."""
        if self.correct:
            return alignment.redo_start(old_last_row, accepted, self.num_modules)
        new_last_row = alignment.next_last_row(old_last_row, accepted)
        return alignment.uncorrected_start(old_last_row, new_last_row, self.num_drafts, recursive=self.recursive)

    def _draft(self, batch: slice, start: Tensor) -> None:
        """Corrects rows ``start..P`` of every module and drafts tokens L+1..L+k: one pass, k launches.

        Steps of a ``recursive`` module after the first run one row each, P+1 and on, from its own output;
        those rows are overwritten by the next pass.
        """
        assert self.stack is not None
        last_token = self._last_tokens(batch)
        rows = alignment.window_rows(start, alignment.last_row_with_hidden(last_token))
        cells = Cells(self.module_tables, rows, batch, int(rows.max()) + 1)
        requests = [sequence.request for sequence in self.active[batch]]
        hidden = self._read_stash(batch, rows)
        tokens = self._tokens[batch]
        for index in range(1, self.num_drafts + 1):
            if self.recursive and index > 1:
                hidden = hidden[:, -1:]
                rows = alignment.step_row(alignment.last_row_with_hidden(last_token), index=index)
                cells = Cells(self.module_tables, rows, batch, int(rows.max()) + 1)
            read = tokens.gather(1, alignment.token_rows(rows, index=1 if self.recursive else index))
            output = self.stack(hidden, read, cells, index=index)
            choice = self.picker.draft(self.stack.head(output.final[:, -1]), last_token, requests, index=index)
            draft = self.stack.head.tokens(choice)
            tokens.scatter_(1, alignment.token_rows(last_token, index=index)[:, None], draft[:, None])
            hidden = self.stack.next_input(hidden, output)

    # ------------------------------------------------------------------ bookkeeping
    def tokens_of(self, slot: int) -> list[int]:
        """Returns the tokens of an active sequence, its drafts included (and what lies beyond them)."""
        return self._tokens[slot].tolist()

    def _emit(self, sequence: Sequence, block: list[int]) -> int:
        """Appends committed tokens up to an end of sequence, sets the finish reason, returns how many."""
        block = emitted(block, self.eos_token_ids)
        sequence.token_ids += block
        if block[-1] in self.eos_token_ids:
            sequence.finish_reason = "stop"
        elif sequence.remaining == 0:
            sequence.finish_reason = "length"
        return len(block)

    def _release_finished(self) -> list[Completion]:
        done = [sequence.completion() for sequence in self.active if sequence.finish_reason]
        for slot in reversed(range(len(self.active))):
            if self.active[slot].finish_reason:
                last = len(self.active) - 1
                self._move(last, slot)
                self.active[slot] = self.active[last]
                self.active.pop()
        return done

    def _move(self, source: int, destination: int) -> None:
        if source == destination:
            return
        for table in (*self.target_tables, *self.module_tables, *self.extra_tables):
            table.move(source, destination)
        self._tokens[destination] = self._tokens[source]
        self._stash[destination] = self._stash[source]

    def _last_tokens(self, batch: slice) -> Tensor:
        return torch.tensor([sequence.last_token for sequence in self.active[batch]], device=self._tokens.device)

    def _reserve(self, capacity: int) -> None:
        if self._tokens.shape[1] < capacity:
            grown = self._tokens.new_zeros(self.batch_size, max(capacity, 2 * self._tokens.shape[1]))
            grown[:, : self._tokens.shape[1]] = self._tokens
            self._tokens = grown

    def _write_stash(self, batch: slice, rows: Tensor, hidden: Tensor) -> None:
        places = alignment.stash_places(rows, self._stash.shape[1])
        self._stash[batch].scatter_(1, places[..., None].expand_as(hidden), hidden)

    def _read_stash(self, batch: slice, rows: Tensor) -> Tensor:
        places = alignment.stash_places(rows, self._stash.shape[1])
        stash = self._stash[batch]
        return stash.gather(1, places[..., None].expand(-1, -1, stash.shape[-1]))

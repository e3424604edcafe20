"""Rows, cells, labels, masks and windows: the only index arithmetic of the project.

The convention, with worked examples, is in ALIGNMENT.md beside this file. In short, for tokens
``x_0..x_{n-1}`` cell (t, i) is module i's work at row t: it reads ``h^{i-1}_t`` and ``x_{t+i}``
and predicts ``x_{t+i+1}``. Module indices count from 1; ``index`` is keyword-only and required.

Shapes: B sequences of a batch, n tokens, R rows of a pass, S slots of a cell table.
"""

from typing import TypeVar

import torch
from torch import Tensor

Index = TypeVar("Index", int, Tensor)
PADDING = -1  # document id of rows that belong to no document


# ---------------------------------------------------------------- training: whole sequences
def cell_tokens(tokens: Tensor, *, index: int) -> Tensor:
    """Returns the token each cell of module ``index`` reads, ``x_{t+i}``: [B, n] -> [B, n-i]."""
    return tokens[:, index:]


def module_rows(per_row: Tensor, tokens: Tensor, *, index: int) -> Tensor:
    """Cuts a per-row tensor [B, >= n-i, ...] to the rows 0..n-1-i that module ``index`` runs."""
    return per_row[:, : tokens.shape[1] - index]


def supervised_cells(loss_mask: Tensor, documents: Tensor, *, index: int) -> Tensor:
    """Returns which cells of module ``index`` have a label: bool [B, max(n-1-i, 0)], rows 0..n-2-i.

    Args:
        loss_mask: bool [B, n], true where the *token* is one to learn (assistant, not padding).
        documents: int [B, n], the document of each row, ascending, ``PADDING`` for none.
    """
    label = index + 1
    rows = max(loss_mask.shape[1] - label, 0)
    same_document = documents[:, :rows] == documents[:, label:]
    return loss_mask[:, label:] & same_document & (documents[:, :rows] != PADDING)


def hard_labels(tokens: Tensor, *, index: int) -> Tensor:
    """Returns ``x_{t+i+1}``, the token cell (t, i) predicts: [B, n] -> [B, n-1-i]."""
    return tokens[:, index + 1 :]


def label_rows(cells: Tensor, *, index: int) -> Tensor:
    """Maps rows t of cells of module ``index`` to the target row t+i whose distribution is the soft label."""
    return cells + index


def step_rows(rows: Index, *, index: int) -> Index:
    """Returns where step ``index`` of a recursive module, started at ``rows``, stands: t + i - 1.

    Step i reads the module's own output of row t+i-2 and token ``x_{t+i}``, so in terms of the row t it
    started from, tokens and labels are those of cell (t, i).
    """
    return rows + index - 1


def visible_in_steps(documents: Tensor, window: int | None, *, index: int) -> Tensor:
    """Returns which keys step ``index`` sees: bool [B, 1, n, index * n], a block of n keys for each step 1..index.

    As in decoding, the step started at row t sees the true rows up to t of its document (block 1) and what
    its own earlier steps and itself wrote at rows t+1..t+i-1 (the diagonals of the other blocks), all of
    them inside the window that ends at its own row t+i-1.

    Args:
        documents: int [B, n], of the rows that this step starts from.
    """
    rows = torch.arange(documents.shape[1], device=documents.device)
    own = rows[:, None] == rows[None, :]
    standing = step_rows(rows, index=index)[:, None]
    first = visible_in_documents(documents, None)
    blocks = [first & _causal(standing, rows[None, :], window)]
    for step in range(2, index + 1):
        block = own & _causal(standing, step_rows(rows, index=step)[None, :], window)
        blocks.append(block.expand_as(first))
    return torch.cat(blocks, dim=-1)


def positions_in_documents(documents: Tensor) -> Tensor:
    """Returns each row's place inside its own document: int [B, n], 0 at every document's start."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(starts, index, 0).cummax(dim=1).values
    return index - first


def visible_in_documents(documents: Tensor, window: int | None) -> Tensor:
    """Returns bool [B, 1, n, n]: row t sees row s iff same document, s <= t and inside the window."""
    index = torch.arange(documents.shape[1], device=documents.device)
    visible = _causal(index[:, None], index[None, :], window)
    same = documents[:, :, None] == documents[:, None, :]
    return (visible & same)[:, None]


# ---------------------------------------------------------------- decoding: cells by row
def visible_slots(rows: Tensor, slots: int, window: int | None) -> Tensor:
    """Returns bool [B, 1, R, S]: the query of row t sees slot s iff s <= t and inside the window."""
    index = torch.arange(slots, device=rows.device)
    return _causal(rows[:, None, :, None], index, window)


def _causal(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def rope_positions(rows: Tensor, positions: str, *, index: int) -> Tensor:
    """Returns the RoPE position of cells at ``rows``: the row, or the row of the token they read."""
    return rows + index if positions == "token" else rows


def step_row(last_row: Tensor, *, index: int) -> Tensor:
    """Returns the one row that drafting step ``index`` of a recursive module writes, P + i - 1: [B] -> [B, 1]."""
    return step_rows(last_row, index=index)[:, None]


def token_rows(rows: Index, *, index: int) -> Index:
    """Returns where in the token table cell (t, i) reads: t + i."""
    return rows + index


def verify_rows(last_row: Tensor, num_drafts: int) -> Tensor:
    """Returns the rows P+1..P+1+d that the target runs to verify d drafts: [B] -> [B, d+1]."""
    return last_row[:, None] + 1 + torch.arange(num_drafts + 1, device=last_row.device)


def redo_start(old_last_row: Tensor, accepted: Tensor, num_modules: int) -> Tensor:
    """Returns the first row to (re)compute after a round: [B].

    The new rows begin at P_old+1. Before them, module i has i-1 provisional rows; those whose
    drafts were accepted are exact already, so ``max(k-1-A, 0)`` rows are wrong.
    """
    provisional = (num_modules - 1 - accepted).clamp(min=0)
    return (old_last_row + 1 - provisional).clamp(min=0)


def uncorrected_start(old_last_row: Tensor, new_last_row: Tensor, num_drafts: int, *, recursive: bool) -> Tensor:
    """Returns the first row that an engine without correction computes after a round: rows it has no slot for.

    A recursive module has filled rows up to P_old + k - 1 from its own output; of the others no row after
    P_old has been run.
    """
    filled = num_drafts - 1 if recursive else 0
    return torch.minimum(old_last_row + 1 + filled, new_last_row)


def stash_places(rows: Tensor, size: int) -> Tensor:
    """Returns where a ring of ``size`` hidden states keeps these rows: row modulo size."""
    return rows % size


def window_rows(start: Tensor, last_row: Tensor) -> Tensor:
    """Returns the rows of one pass, [B, R], each sequence's ``start..last_row``.

    Shorter windows are filled at the front by repeating their first row: computing a cell twice
    writes the same values twice, so no padding slot and no mask are needed.
    """
    length = int((last_row - start).max()) + 1
    rows = last_row[:, None] + torch.arange(1 - length, 1, device=last_row.device)
    return torch.maximum(rows, start[:, None])


def drafting_start(last_row: Tensor, num_modules: int) -> Tensor:
    """Returns the first row of the pass that drafts right after a prefill: the last k rows, [B].

    Prefill runs every row with the prompt's tokens; only these rows read beyond them.
    """
    return (last_row + 1 - num_modules).clamp(min=0)


def exact_rows(last_token: int, *, index: int) -> int:
    """Returns how many rows of module ``index`` are exact, t + i <= L: rows 0..L-i."""
    return max(last_token - index + 1, 0)


def last_row_with_hidden(last_token: Index) -> Index:
    """Returns P = L - 1, the last row whose target hidden state is known."""
    return last_token - 1


def next_last_row(old_last_row: Tensor, accepted: Tensor) -> Tensor:
    """Returns P after a round: it committed A + 1 tokens."""
    return old_last_row + accepted + 1


def draft_limit(remaining: int, num_drafts: int) -> int:
    """Returns how many drafts are worth verifying: each round also emits one token of the target."""
    return max(min(num_drafts, remaining - 1), 0)


def matches_with_text(drafts: Tensor, tokens: Tensor) -> list[int]:
    """Returns per row t how many of the drafts made there equal the text in a row.

    Args:
        drafts: int [n, k], ``drafts[t, i-1]`` predicts ``x_{t+i+1}``.
        tokens: int [n].
    """
    _num_rows, num_drafts = drafts.shape
    right = torch.zeros_like(drafts, dtype=torch.bool)
    for index in range(1, num_drafts + 1):
        labels = hard_labels(tokens[None], index=index)[0]
        right[: len(labels), index - 1] = drafts[: len(labels), index - 1] == labels
    return right.long().cumprod(dim=1).sum(dim=1).tolist()


def walk_rounds(
    leading_matches: list[int], prompt_length: int, length: int, num_drafts: int, limit: int
) -> list[tuple[int, int]]:
    """Walks a text as decoding would and returns ``(accepted, proposed)`` drafts of every round.

    Args:
        leading_matches: per row t, how many drafts made at t equal the text in a row, 0..k.
        prompt_length: tokens of the prompt; the first answer token is the prefill's own.
        length: tokens of the whole text.
        num_drafts: drafts of a round.
        limit: tokens the whole text was allowed to have; it may have ended before, at an end of sequence.
    """
    rounds, last_token = [], prompt_length
    while last_token < length - 1:
        proposed = draft_limit(limit - 1 - last_token, num_drafts)
        accepted = min(proposed, draft_limit(length - 1 - last_token, num_drafts), leading_matches[last_token - 1])
        rounds.append((accepted, proposed))
        last_token += accepted + 1
    return rounds


# ---------------------------------------------------------------- objective and replay: which rows need a head
def supervised_label_rows(loss_mask: Tensor, documents: Tensor, *, index: int) -> Tensor:
    """Returns at which target rows r = t+i a supervised cell (t, i) finds its soft label: bool [B, n].

    Index 0 gives the rows whose distribution is the label of any module at all.
    """
    cells = supervised_cells(loss_mask, documents, index=index)
    label_row = torch.zeros_like(loss_mask)
    label_row[:, index : index + cells.shape[1]] = cells
    return label_row


def cells_of_label_rows(rows: Tensor, *, index: int) -> Tensor:
    """Returns the row t of the cell of module ``index`` whose soft label stands at target row t+i."""
    return rows - index


def replayed_rows(documents: Tensor, prompt_lengths: Tensor) -> Tensor:
    """Returns from which rows a decode can draft: bool [B, n], from the prompt's last row on.

    Args:
        documents: int [B, n], one document per sequence, from row 0 on.
        prompt_lengths: int [B].
    """
    return (positions_in_documents(documents) >= prompt_lengths[:, None] - 1) & (documents != PADDING)


def proposed_label_rows(documents: Tensor, prompt_lengths: Tensor, *, index: int) -> Tensor:
    """Returns at which target rows r = t+i the draft of module ``index`` made at row t is verified: bool [B, n].

    Row t is one that a round of :func:`walk_rounds` can start from, and the draft one that it can accept there: the
    last token of a text is never a draft's. Index 0 gives the rows that rounds can start from.
    """
    rows = replayed_rows(documents, prompt_lengths + index)
    rows[:, -2:] = False
    rows[:, :-2] &= documents[:, :-2] == documents[:, 2:]
    return rows

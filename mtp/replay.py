"""Replay: what a decode would accept, read off the training forward on text the target wrote.

In a round, all inputs of the modules up to the first wrong draft are the text's own, so the training
forward knows every draft that matters (design.md, section 8).

Shapes: B sequences, n tokens, H hidden size, k modules.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from mtp import acceptance, alignment
from mtp.acceptance import AcceptanceStats
from mtp.cache import Packed
from mtp.modules import ModuleOutput, MTPStack
from mtp.target import Head, Target

HEAD_CHUNK = 256  # rows of logits at a time


@torch.no_grad()
def choices(head: Head, final: Tensor, wanted: Tensor, chunk_rows: int) -> Tensor:
    """Returns the most likely token at wanted rows, -1 elsewhere: [B, n, H] and bool [B, n] -> int [B, n]."""
    chosen = torch.full(wanted.shape, -1, device=final.device)
    for chunk in wanted.nonzero().split(chunk_rows):
        place = tuple(chunk.unbind(1))
        chosen[place] = head.tokens(head(final[place]).argmax(-1))
    return chosen


@torch.no_grad()
def draft_choices(
    stack: MTPStack,
    outputs: Iterable[tuple[int, ModuleOutput]],
    tokens: Tensor,
    wanted: Tensor,
    *,
    chunk_rows: int = HEAD_CHUNK,
) -> Tensor:
    """Returns what module i drafts at row t, int [B, n, k], -1 where it has no such row or none is wanted.

    Args:
        outputs: of :meth:`MTPStack.unroll` on this text.
        tokens: int [B, n].
        wanted: bool [B, n].
        chunk_rows: rows of logits that exist at a time.
    """
    drafts = torch.full((*tokens.shape, stack.contract.draft_steps), -1, device=tokens.device)
    for index, output in outputs:
        here = alignment.module_rows(wanted, tokens, index=index)
        alignment.module_rows(drafts, tokens, index=index)[..., index - 1] = choices(
            stack.head, output.final, here, chunk_rows
        )
    return drafts


@torch.no_grad()
def replay_text(target: Target, stack: MTPStack, tokens: Tensor, prompt_length: int, *, limit: int) -> AcceptanceStats:
    """Returns the rounds a greedy decode of this text has, token for token, without decoding.

    Args:
        tokens: int [n], a prompt and the target's own greedy answer.
        prompt_length: tokens of the prompt.
        limit: tokens that prompt and answer were allowed to have.
    """
    tokens, documents = tokens[None], torch.zeros_like(tokens)[None]
    hidden = target.forward(tokens, Packed(documents), target_hidden=stack.contract.target_hidden).hidden
    wanted = alignment.replayed_rows(documents, torch.tensor([prompt_length], device=tokens.device))
    drafts = draft_choices(stack, stack.unroll(hidden, tokens, Packed(documents)), tokens, wanted)
    return acceptance.replay(drafts[0], tokens[0], prompt_length, limit=limit)

"""Replay: what a decode would accept, read off the training forward on text the target wrote."""

import torch
from torch import Tensor

from mtp import acceptance
from mtp.acceptance import AcceptanceStats
from mtp.cache import Packed
from mtp.modules import MTPStack
from mtp.target import Target

HEAD_CHUNK = 1024  # rows of logits at a time


@torch.no_grad()
def replay_text(
    target: Target, stack: MTPStack, tokens: Tensor, prompt_length: int, hidden: Tensor | None = None
) -> AcceptanceStats:
    """Returns the rounds a greedy decode of this text has, token for token, without decoding.

    Args:
        tokens: int [n], a prompt and the target's own greedy answer.
        prompt_length: tokens of the prompt.
        hidden: [n, H], the target's hidden states at the contract's point, if known already.
    """
    context = Packed(torch.zeros_like(tokens)[None])
    if hidden is None:
        hidden = target.forward(tokens[None], context, target_hidden=stack.contract.target_hidden).hidden[0]
    drafts = tokens.new_full((len(tokens), len(stack.layers)), -1)
    for index, output in stack.unroll(hidden[None], tokens[None], context):
        for chunk, rows in zip(output.final[0].split(HEAD_CHUNK), drafts.split(HEAD_CHUNK), strict=False):
            rows[: len(chunk), index - 1] = stack.head.tokens(stack.head(chunk).argmax(dim=-1))
    return acceptance.replay(drafts, tokens, prompt_length)

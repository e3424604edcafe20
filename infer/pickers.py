"""How tokens are picked from logits: the one thing in which decoding modes differ."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from infer.requests import Request


class Picker(Protocol):
    """Chooses the target's tokens and the drafts of a batch; ``requests`` are those of the batch, in order."""

    def target(self, logits: Tensor, rows: Tensor, requests: Sequence[Request]) -> Tensor:
        """Returns the target's token after each row: logits [B, R, V], rows [B, R] -> token ids [B, R]."""
        ...

    def draft(self, logits: Tensor, last_token: Tensor, requests: Sequence[Request], *, index: int) -> Tensor:
        """Returns the choice of module ``index`` for token L + index: logits [B, V'], L [B] -> indices [B] in V'."""
        ...


class Greedy:
    """Always the most likely token, of target and modules; uses no random numbers."""

    def target(self, logits: Tensor, rows: Tensor, requests: Sequence[Request]) -> Tensor:
        return logits.argmax(dim=-1)

    def draft(self, logits: Tensor, last_token: Tensor, requests: Sequence[Request], *, index: int) -> Tensor:
        return logits.argmax(dim=-1)

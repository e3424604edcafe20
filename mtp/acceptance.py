"""Which drafts a round accepts, and what that adds up to: used by the engine and by replay.

Words (README and design): acceptance length is committed tokens per target forward, bonus token
included, ``1 + accepted / rounds``; survival_i is P(first i drafts all accepted), unconditional;
conditional_i is survival_i / survival_{i-1}. Only tokens that were emitted count: a draft at or
beyond an end of sequence or a length limit is not an accepted token.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mtp import alignment


def leading_matches(drafts: Tensor, truth: Tensor) -> Tensor:
    """Returns how many drafts in a row equal the truth, from the first on: [..., d] -> [...] in 0..d."""
    return (drafts == truth).long().cumprod(dim=-1).sum(dim=-1)


def emitted(tokens: list[int], eos_token_ids: Iterable[int]) -> list[int]:
    """Cuts a block of committed tokens after its first end-of-sequence token, of any of the ids."""
    ends = set(eos_token_ids)
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


class AcceptanceStats:
    """Counts of accepted drafts per round. ``accepted`` of a round is its emitted tokens less one.

    The last token a round emits is always the target's own: the bonus token, or the end-of-sequence
    token at which it stopped. So ``acceptance_length`` is emitted tokens per round, exactly.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.proposed = 0
        self.rounds_by_accepted: Counter[int] = Counter()

    def add_round(self, accepted: int, *, proposed: int) -> None:
        """Counts one target forward that verified ``proposed`` drafts and accepted the first ``accepted``."""
        assert 0 <= accepted <= proposed <= self.num_drafts
        self.proposed += proposed
        self.rounds_by_accepted[accepted] += 1

    def merge(self, other: "AcceptanceStats") -> None:
        """Adds another's counts."""
        self.proposed += other.proposed
        self.rounds_by_accepted.update(other.rounds_by_accepted)

    @property
    def rounds(self) -> int:
        return self.rounds_by_accepted.total()

    @property
    def accepted(self) -> int:
        return sum(accepted * count for accepted, count in self.rounds_by_accepted.items())

    @property
    def acceptance_length(self) -> float:
        """Returns committed tokens per target forward, bonus included; 1.0 before any round."""
        return 1.0 + (self.accepted / self.rounds if self.rounds else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Returns accepted / proposed drafts, 0 when none were proposed; the bonus token is in neither."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def survival(self) -> list[float]:
        """Returns survival_1..survival_d: shares of all rounds, non-increasing; they sum to accepted / rounds."""
        at_least = [sum(n for a, n in self.rounds_by_accepted.items() if a >= i) for i in range(1, self.num_drafts + 1)]
        return [count / self.rounds if self.rounds else 0.0 for count in at_least]

    def conditional(self) -> list[float]:
        """Returns conditional_1..conditional_d, 0 where no round got that far."""
        chain = [1.0, *self.survival()]
        return [now / before if before else 0.0 for before, now in itertools.pairwise(chain)]

    def summary(self) -> dict[str, Any]:
        """Returns the figures as plain numbers, for logs and JSON."""
        return {
            "rounds": self.rounds,
            "accepted": self.accepted,
            "proposed": self.proposed,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "survival": self.survival(),
            "conditional": self.conditional(),
        }


def replay(drafts: Tensor, tokens: Tensor, prompt_length: int, *, limit: int) -> AcceptanceStats:
    """Walks a text that the target wrote greedily as decoding would, and counts its rounds.

    Args:
        drafts: int [n, k]; ``drafts[t, i-1]`` is what module i predicts at row t on this text
            (any value where the module has no such row).
        tokens: int [n], prompt and answer.
        prompt_length: tokens of the prompt.
        limit: tokens that prompt and answer were allowed to have; near it fewer drafts are proposed.

    Returns:
        The counts a real decode of this text gives: in a round all inputs up to the first wrong
        draft are the text's own, so the training forward knows them.
    """
    num_drafts = drafts.shape[1]
    stats = AcceptanceStats(num_drafts)
    matches = alignment.matches_with_text(drafts, tokens)
    for accepted, proposed in alignment.walk_rounds(matches, prompt_length, len(tokens), num_drafts, limit):
        stats.add_round(accepted, proposed=proposed)
    return stats

"""What goes into the engine and what comes out."""

from dataclasses import dataclass, field

from mtp import Target, UserError
from mtp.acceptance import AcceptanceStats


@dataclass(frozen=True)
class Request:
    """One prompt to continue. ``key`` is the caller's own and comes back with the completion."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    key: int = 0


def validate_prompt(prompt_ids: tuple[int, ...], target: Target) -> None:
    """Raises :class:`UserError` if the target cannot continue this prompt."""
    length, context = len(prompt_ids), target.context_length
    if length == 0:
        raise UserError("empty prompt; give at least one token")
    if length >= context:
        raise UserError(
            f"{length} tokens do not fit the target's context of {context} (one more is needed for an answer); "
            "shorten the prompt"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        raise UserError(f"a token id lies outside the target's 0..{target.vocab_size - 1}")


@dataclass(frozen=True)
class Completion:
    """The tokens after the prompt, end-of-sequence token included.

    ``finish_reason`` is ``stop`` (an end-of-sequence token) or ``length`` (``max_new_tokens``, or
    the target's context is full).
    """

    request: Request
    token_ids: list[int]
    finish_reason: str
    stats: AcceptanceStats


@dataclass
class Sequence:
    """A request being decoded. ``last_token`` is L; ``limit`` is how many tokens it may emit in all."""

    request: Request
    limit: int
    stats: AcceptanceStats
    last_token: int = 0
    redo_from: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def remaining(self) -> int:
        return self.limit - len(self.token_ids)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(self.request, self.token_ids, self.finish_reason, self.stats)

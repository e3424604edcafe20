"""The recurrence contract: how the modules are wired, saved beside their weights.

A wrong recurrence is silent (the text stays right, only acceptance collapses), so it is data:
the trainer writes it, the engine reads it, and code that loads weights assumes no default.
"""

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp.errors import UserError

RECURRENCES = ("chained", "target_fed", "recursive")
CHOICES = {
    "recurrence": RECURRENCES,
    "target_hidden": ("post_norm", "pre_norm"),
    "chain_hidden": ("post_norm", "pre_norm"),
    "concat": ("embed_first", "hidden_first"),
    "positions": ("row", "token"),
}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Every field is required: :meth:`for_new_modules` is the only place with defaults.

    Attributes:
        recurrence: ``chained`` (module i reads module i-1: DeepSeek-V3), ``target_fed`` (every module
            reads the target's hidden state: MiMo-V2) or ``recursive`` (one module, applied again to its
            own output at advancing rows: FastMTP, GLM).
        num_modules: how many modules have weights; 1 for ``recursive``.
        draft_steps: k, how many drafts a round they were trained for; ``num_modules``, but for
            ``recursive``, which can also draft more.
        target_hidden: the point of the target that module 1 reads: after or before its final norm.
        chain_hidden: what a module hands on: after or before its own ``post_norm``.
        concat: order of embedding and hidden state into ``eh_proj``.
        positions: the RoPE position of cell (t, i): its row t, or its token t + i.
        mask_first_embedding: the embedding read at row 0 of a document is zeroed.
        draft_vocab: the token ids the modules can draft, ascending; None means all of them.
    """

    recurrence: str
    num_modules: int
    draft_steps: int
    target_hidden: str
    chain_hidden: str
    concat: str
    positions: str
    mask_first_embedding: bool
    draft_vocab: tuple[int, ...] | None

    def __post_init__(self) -> None:
        for field, choices in CHOICES.items():
            value = getattr(self, field)
            if value not in choices:
                raise UserError(
                    f"contract field {field!r}: {value!r} is not supported; use one of {', '.join(choices)}"
                )
        for field in ("num_modules", "draft_steps"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise UserError(f"contract field {field!r}: {value!r} is not a whole number of at least 1")
        if self.recursive and self.num_modules != 1:
            raise UserError(f"contract field 'num_modules': recursive has 1 module, not {self.num_modules}")
        if not self.recursive and self.draft_steps != self.num_modules:
            raise UserError(
                f"contract field 'draft_steps': {self.draft_steps} steps need as many modules, but num_modules is "
                f"{self.num_modules}; only recursive drafts more than one step with a module"
            )
        if type(self.mask_first_embedding) is not bool:
            raise UserError(
                f"contract field 'mask_first_embedding': {self.mask_first_embedding!r} is not true or false"
            )
        if self.draft_vocab is not None:
            self._check_draft_vocab(self.draft_vocab)

    @staticmethod
    def _check_draft_vocab(ids: tuple[int, ...]) -> None:
        if not isinstance(ids, tuple) or not ids or any(type(token) is not int or token < 0 for token in ids):
            raise UserError("contract field 'draft_vocab': expected a non-empty list of token ids")
        if any(low >= high for low, high in itertools.pairwise(ids)):
            raise UserError("contract field 'draft_vocab': token ids must be ascending, each once")

    @property
    def recursive(self) -> bool:
        """Returns whether one module makes all drafts."""
        return self.recurrence == "recursive"

    @classmethod
    def for_new_modules(cls, draft_steps: int, **fields: Any) -> "Contract":
        """Returns the contract of freshly made modules: what the widest set of engines can run."""
        recursive = fields.get("recurrence") == "recursive"
        defaults: dict[str, Any] = {
            "recurrence": "chained",
            "num_modules": 1 if recursive else draft_steps,
            "target_hidden": "post_norm",
            "chain_hidden": "post_norm",
            "concat": "embed_first",
            "positions": "row",
            "mask_first_embedding": False,
            "draft_vocab": None,
        }
        return cls(draft_steps=draft_steps, **(defaults | fields))

    def save(self, path: Path) -> None:
        """Writes the contract as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Contract":
        """Returns the contract in a JSON file.

        Raises:
            UserError: the file is missing, is not JSON, lacks a field or has one too many.
        """
        fields = read_json_object(path)
        names = {field.name for field in dataclasses.fields(cls)}
        if missing := sorted(names - fields.keys()):
            raise UserError(f"{path}: contract field(s) missing: {', '.join(missing)}; nothing is assumed for them")
        if unknown := sorted(fields.keys() - names):
            raise UserError(f"{path}: unknown contract field(s): {', '.join(unknown)}; written by a newer version?")
        if isinstance(fields["draft_vocab"], list):
            fields["draft_vocab"] = tuple(fields["draft_vocab"])
        try:
            return cls(**fields)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; raises :class:`UserError` naming the file otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is this a checkpoint folder of the toolkit?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value

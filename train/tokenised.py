"""Tokenised sources on disk: ``<key>.safetensors``, named by all that the tokens depend on.

The key is made of the source's content, the tokenizer with its template, the options, and the versions that render.
A file holds the tokens of all records one after the other, with a checksum; a damaged one is made again.
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import tokenizers
import torch
import transformers

from mtp import UserError
from mtp.files import write_atomic
from train.chat import Record, Renderer

FORMAT = 1  # raised when the same text gives other tokens or masks than before
TENSORS = ("token_ids", "learn", "ends", "prompt_lengths", "numbers")
NO_PROMPT = -1
NAMED, REASONS_NAMED = 3, 10
Where = TypeVar("Where")


@dataclass
class Tokenised:
    """The records of one source, flat: ``token_ids`` and ``learn`` of all, ``ends``, prompt and number of each."""

    token_ids: array = field(default_factory=lambda: array("i"))
    learn: array = field(default_factory=lambda: array("b"))
    ends: array = field(default_factory=lambda: array("q"))
    prompt_lengths: array = field(default_factory=lambda: array("q"))
    numbers: array = field(default_factory=lambda: array("q"))
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: list[tuple[int, str]] = field(default_factory=list)

    def add(self, number: int, record: Record) -> None:
        """Appends a record, the ``number``-th of its source."""
        self.token_ids.extend(record.token_ids)
        self.learn.extend(record.learn)
        self.ends.append(len(self.token_ids))
        self.prompt_lengths.append(NO_PROMPT if record.prompt_length is None else record.prompt_length)
        self.numbers.append(number)

    def skip(self, number: int, reason: str) -> None:
        """Counts a record that cannot be used; the first ones, and the first of each reason, are named."""
        count_skipped(self.skipped, self.first_skipped, number, reason)

    def records(self, path: str) -> list[Record]:
        """Returns the records; their tokens are views of the flat arrays, not copies."""
        tokens, learn = memoryview(self.token_ids), memoryview(self.learn).cast("B").cast("?")
        starts = [0, *self.ends][:-1]
        return [
            Record(tokens[start:end], learn[start:end], None if prompt == NO_PROMPT else prompt, f"{path}:{number}")
            for start, end, prompt, number in zip(starts, self.ends, self.prompt_lengths, self.numbers, strict=True)
        ]

    def save(self, path: Path) -> None:
        """Writes the file at once; raises :class:`UserError` if the disk refuses."""
        tensors = {name: torch.from_numpy(np.array(getattr(self, name))) for name in TENSORS}
        skipped = json.dumps([self.skipped, self.first_skipped])
        content = safetensors.torch.save(tensors, {"skipped": skipped, "sha256": self._checksum(skipped)})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        except OSError as error:
            raise UserError(
                f"{path.parent}: tokenised data cannot be written ({error.strerror}); set data.cache to another folder"
            ) from None

    @classmethod
    def load(cls, path: Path) -> "Tokenised | None":
        """Returns what a file holds; None if there is none, or a damaged one."""
        found = cls()
        try:
            with safetensors.safe_open(path, framework="np") as file:
                for name in TENSORS:
                    getattr(found, name).frombytes(file.get_tensor(name).tobytes())
                about = file.metadata()
            counts, first = json.loads(about["skipped"])
            if about["sha256"] != found._checksum(about["skipped"]):
                return None
        except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError):
            return None
        found.skipped, found.first_skipped = Counter(counts), [(number, reason) for number, reason in first]
        return found

    def _checksum(self, skipped: str) -> str:
        digest = hashlib.sha256(skipped.encode())
        for name in TENSORS:
            digest.update(memoryview(getattr(self, name)))
        return digest.hexdigest()


def count_skipped(counts: Counter[str], named: list[tuple[Where, str]], where: Where, reason: str) -> None:
    """Counts a skipped record, and names it if it is one of the first or the first of its reason."""
    counts[reason] += 1
    if len(named) < NAMED or (counts[reason] == 1 and len(named) < REASONS_NAMED):
        named.append((where, reason))


def cache_key(content: str, shape: str | None, renderer: Renderer) -> str:
    """Returns the name under which a source's tokens are kept; another content, tokenizer or option gives another."""
    target = renderer.target
    facts: dict[str, Any] = {
        "format": FORMAT,
        "content": content,
        "shape": shape,
        "vocab_size": target.vocab_size,
        "eos_token_ids": list(target.eos_token_ids),
        "tokenizer": _tokenizer_digest(renderer),
        "versions": [transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer_digest(renderer: Renderer) -> str | None:
    try:
        tokenizer = renderer.tokenizer
    except UserError:
        return None  # the data may be token ids alone
    parts: Iterable[Any] = (
        type(tokenizer).__name__,
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items()),
        tokenizer.chat_template,
        {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        {name: str(value) for name, value in tokenizer.init_kwargs.items() if name != "name_or_path"},
    )
    return hashlib.sha256(json.dumps(list(parts), sort_keys=True, default=str).encode()).hexdigest()

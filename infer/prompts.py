"""Prompts from a flag, a file or standard input, turned into token ids."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from infer.requests import validate_prompt
from mtp import Target, UserError
from mtp.errors import one_line
from mtp.turns import Turn, Unusable, tools_of, turns_of, with_system

SHOWN = 3  # broken lines named one by one


@dataclass(frozen=True)
class Prompt:
    """``source`` is the record it came from (other fields are kept by ``distill``), ``line`` its line in a file."""

    token_ids: tuple[int, ...]
    source: dict[str, Any]
    line: int | None = None


@dataclass
class Prompts:
    """Prompts read, and what was skipped: ``skipped`` lines in all, the first ones named in ``problems``."""

    prompts: list[Prompt] = field(default_factory=list)
    skipped: int = 0
    problems: list[str] = field(default_factory=list)

    def skip(self, where: str, reason: str) -> None:
        self.skipped += 1
        if len(self.problems) < SHOWN:
            self.problems.append(f"{where}: {reason}")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Returns the target's tokenizer; raises :class:`UserError` if there is none."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # whatever a library makes of a damaged folder
        raise UserError(f"target {name!r}: no tokenizer could be loaded ({one_line(error)})") from None


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Returns the text of tokens, special ones left out."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Encoder:
    """Turns records into prompts that the target can continue; ``raw``: no chat template, text as it stands."""

    tokenizer: PreTrainedTokenizerBase
    target: Target
    raw: bool = False

    def __call__(self, record: dict[str, Any], line: int | None = None) -> Prompt:
        """Returns the prompt of a record with ``messages``, ``conversations``, ``prompt`` or ``prompt_ids``.

        Raises:
            UserError: no such field, one of the wrong form, or a prompt that the target cannot take.
        """
        token_ids = encode(record, self.tokenizer, raw=self.raw)
        validate_prompt(token_ids, self.target)
        return Prompt(token_ids, record, line)


def encode(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, raw: bool) -> tuple[int, ...]:
    """Returns the token ids of a record; raises :class:`UserError` if it has none."""
    if "prompt_ids" in record:
        ids = record["prompt_ids"]
        if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
            raise UserError("'prompt_ids' is not a non-empty list of token ids")
        return tuple(ids)
    prompt = record.get("prompt")
    try:
        if raw or not tokenizer.chat_template:
            if not isinstance(prompt, str) or not prompt:
                raise UserError("without a chat template (or with --raw) it needs a 'prompt' that is a text")
            return tuple(tokenizer(prompt)["input_ids"])
        return tuple(
            tokenizer.apply_chat_template(
                conversation(record), tools=tools_of(record), add_generation_prompt=True, return_dict=False
            )
        )
    except UserError:
        raise
    except Unusable as error:
        raise UserError(str(error)) from None
    except Exception as error:  # a template is a program of its own, and half a surrogate pair is no text
        raise UserError(f"the tokenizer or its chat template refused it ({one_line(error)})") from None


def conversation(record: dict[str, Any]) -> list[Turn]:
    """Returns the turns of a record with ``messages``, ``conversations`` or ``prompt`` (a text, or turns).

    Raises:
        UserError: it has none of these fields.
        Unusable: the turns are not of a form that training reads.
    """
    for name in ("messages", "conversations", "prompt"):
        if (value := record.get(name)) is not None:
            break
    else:
        raise UserError("none of the fields 'messages', 'conversations', 'prompt', 'prompt_ids'")
    if isinstance(value, str):
        if not value:
            raise UserError("empty prompt: 'prompt' is not a text of one character or more")
        value = [{"role": "user", "content": value}]
    return with_system(record, turns_of(value))


def read_prompts(lines: Iterable[bytes], where: str, encoder: Encoder) -> Prompts:
    """Reads one prompt a line: a JSON object (see :class:`Encoder`), or plain text.

    Broken lines are skipped, counted and the first ones named; empty lines are passed over.

    Args:
        lines: as binary files give them, so that only a line feed ends a line (U+2028 may stand in a prompt).
    """
    result = Prompts()
    for number, line in enumerate(lines, start=1):
        try:
            if record := _parse(line):
                result.prompts.append(encoder(record, number))
        except UserError as error:
            result.skip(f"{where}:{number}", str(error))
    return result


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        text = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    if not text.startswith("{"):
        return {"prompt": text} if text else None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"broken JSON ({error})") from None


def read_prompt_file(path: Path, encoder: Encoder) -> Prompts:
    """Reads a prompt file; raises :class:`UserError` if it cannot be read or holds no prompt."""
    try:
        with path.open("rb") as lines:
            result = read_prompts(lines, str(path), encoder)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not result.prompts:
        detail = f"; {result.problems[0]}" if result.problems else " (the file is empty)"
        raise UserError(f"{path}: no usable prompt{detail}")
    return result

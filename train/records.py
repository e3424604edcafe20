"""JSONL text to token records: which tokens a line has, and which of them are the assistant's.

Three kinds of line: ``prompt_ids`` + ``response_ids`` (distilled text; the ids win over anything else),
``messages`` (the tokenizer's chat template, turn by turn), ``text``. A line that cannot be used is
skipped and counted by reason; the first ones are named with file and line.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from mtp import Target, UserError
from mtp.errors import first_line

SHORTEST = 2  # tokens; from 3 on module 1 has a label


@dataclass(frozen=True)
class Record:
    """One document: ``token_ids``, ``learn`` (true where the token is the assistant's), tokens before the answer."""

    token_ids: list[int]
    learn: list[bool]
    prompt_length: int | None


@dataclass
class ReadReport:
    """What was read from one file, for the log and the provenance."""

    path: str
    sha256: str = ""
    records: int = 0
    cut: int = 0
    vocab_coverage: float = 1.0  # share of the tokens to learn that the draft vocabulary has
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: list[str] = field(default_factory=list)

    def skip(self, line: int, reason: str) -> None:
        """Counts a line that cannot be used; the first three are named."""
        self.skipped[reason] += 1
        if len(self.first_skipped) < 3:
            self.first_skipped.append(f"{self.path}:{line}: {reason}")

    def text(self) -> str:
        """Returns the report as one or more readable lines."""
        said = [f"{self.path}: {self.records} records, {self.cut} of them cut to the row length"]
        if self.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())
            said += [f"warning: {self.path}: {self.skipped.total()} lines skipped ({reasons}); first ones:"]
            said += [f"  {named}" for named in self.first_skipped]
        return "\n".join(said)


class Unusable(Exception):
    """A line that cannot be used; the message is the reason, short enough to count by."""


class Renderer:
    """Turns messages and text into ids; the tokenizer is loaded when the first line needs it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._loaded: Any = None

    @property
    def tokenizer(self) -> Any:
        if self._loaded is None:
            try:
                self._loaded = transformers.AutoTokenizer.from_pretrained(self.target.name, trust_remote_code=False)
            except Exception as error:  # whatever a library makes of a damaged folder
                raise UserError(
                    f"target {self.target.name!r} has no usable tokenizer ({first_line(error)}), and the data "
                    "has messages or text; add the tokenizer to the folder or give prompt_ids and response_ids"
                ) from None
        return self._loaded

    def chat(self, messages: list[dict[str, str]]) -> Record:
        """Returns the conversation with the assistant's spans found by prefixes of the template.

        Raises:
            UserError: the template is missing, or rewrites earlier turns so that no span can be proved.
            Unusable: the template refuses these messages, or there is no assistant turn.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                f"the tokenizer of target {self.target.name!r} has no chat template, but the data has messages; give "
                "prompt_ids and response_ids, or add the template"
            )
        whole = self._render(messages, prompt=False)
        learn, answer_start = [False] * len(whole), None
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:turn], prompt=True) if turn else []
            until = self._render(messages[: turn + 1], prompt=False)
            if until[: len(before)] != before or whole[: len(until)] != until:
                raise UserError(
                    f"the chat template of target {self.target.name!r} rewrites earlier turns, so the assistant's "
                    "tokens cannot be told from the rest; give prompt_ids and response_ids (mtp-infer distill does)"
                )
            answer_start = len(before)
            for place in range(answer_start, len(until)):
                learn[place] = True
                if until[place] in self.target.eos_token_ids:
                    break  # what the template prints after the end of the turn is not the target's to write
        if answer_start is None:
            raise Unusable("no assistant turn")
        return Record(whole, learn, answer_start)

    def text(self, text: str) -> Record:
        """Returns plain text, every token one to learn."""
        try:
            ids = self.tokenizer(text)["input_ids"]
        except TypeError:  # what tokenizers say of half a surrogate pair
            raise Unusable("text that cannot be tokenised") from None
        return Record(ids, [True] * len(ids), None)

    def _render(self, messages: list[dict[str, str]], *, prompt: bool) -> list[int]:
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
            )
        except Exception as error:
            raise Unusable(f"refused by the chat template: {first_line(error)[:80]}") from None


def read_records(path: str, target: Target) -> tuple[list[Record], ReadReport]:
    """Reads a JSONL file, in order.

    Raises:
        UserError: the file cannot be read, or has no usable line; the first reasons are named.
    """
    report = ReadReport(path)
    records: list[Record] = []
    renderer = Renderer(target)
    for number, line in _lines(path, report):
        try:
            records.append(_record(line, renderer))
        except Unusable as unusable:
            report.skip(number, str(unusable))
    report.records = len(records)
    if not records:
        named = "; ".join(report.first_skipped) or "the file is empty"
        raise UserError(
            f"{path}: no usable line ({named}); each line must be JSON with prompt_ids and response_ids, messages, "
            "or text"
        )
    return records, report


def _lines(path: str, report: ReadReport) -> Iterator[tuple[int, bytes]]:
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"data file {path}: {error.strerror or error}; check data.train and data.heldout") from None
    report.sha256 = digest.hexdigest()


def _record(line: bytes, renderer: Renderer) -> Record:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise Unusable("not UTF-8") from None
    except (ValueError, RecursionError):
        raise Unusable("not JSON") from None
    if not isinstance(value, dict):
        raise Unusable("not a JSON object")
    if "prompt_ids" in value or "response_ids" in value:
        prompt, response = _ids(value, "prompt_ids"), _ids(value, "response_ids")
        record = Record(prompt + response, [False] * len(prompt) + [True] * len(response), len(prompt))
    elif "messages" in value:
        record = renderer.chat(_messages(value))
    elif isinstance(value.get("text"), str):
        record = renderer.text(value["text"])
    else:
        raise Unusable("none of prompt_ids + response_ids, messages, text")
    if len(record.token_ids) < SHORTEST:
        raise Unusable("too short")
    if not all(0 <= token < renderer.target.vocab_size for token in record.token_ids):
        raise Unusable("token id outside the vocabulary")
    return record


def _ids(value: dict[str, Any], name: str) -> list[int]:
    ids = value.get(name)
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise Unusable(f"{name} is not a list of whole numbers")
    return ids


def _messages(value: dict[str, Any]) -> list[dict[str, str]]:
    messages = value["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, dict) for turn in messages):
        raise Unusable("messages is not a list of turns")
    turns = [{"role": turn.get("role"), "content": turn.get("content")} for turn in messages]
    if isinstance(value.get("system"), str) and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": value["system"]})
    for turn in turns:
        if isinstance(turn["content"], list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in turn["content"]
        ):
            turn["content"] = "".join(part["text"] for part in turn["content"])
        if not isinstance(turn["role"], str) or not isinstance(turn["content"], str):
            raise Unusable("a turn has no role or no text content")
    return turns

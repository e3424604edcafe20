"""Conversations and text to token ids, and which of those the assistant writes.

What the assistant writes is taken from the template's ``{% generation %}`` markers where it has them. Elsewhere it is
proved: the prompt, rendered as for an answer, must be a prefix of the conversation with that answer. A template that
drops earlier thinking renders an old turn differently from how it was written; such a conversation becomes several
records, each one rendered up to an assistant turn as the target sees it when it answers.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import transformers

from mtp import UserError
from mtp.errors import one_line
from mtp.turns import Turn, Unusable

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Vocabulary(Protocol):
    """What of a target its text depends on; :class:`mtp.Target` is one."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Record:
    """One document.

    ``learn`` is true where the token is the assistant's, ``prompt_length`` the tokens before its last answer (None:
    it is all one text), ``origin`` the file and line it came from.
    """

    token_ids: Sequence[int]
    learn: Sequence[bool]
    prompt_length: int | None
    origin: str = ""


@dataclass(frozen=True)
class Answer:
    """A conversation up to the end of one assistant turn, which begins at ``start``."""

    token_ids: list[int]
    start: int


def masked(token_ids: list[int], learn: list[bool]) -> Record:
    """Returns a record that ends with its last token to learn; raises :class:`Unusable` if there is none."""
    if True not in learn:
        raise Unusable("no token to learn")
    end = len(learn) - learn[::-1].index(True)
    start = end
    while start and learn[start - 1]:
        start -= 1
    return Record(token_ids[:end], learn[:end], start or None)


class Renderer:
    """Turns messages and text into ids; the tokenizer is loaded when the first record needs it."""

    def __init__(self, target: Vocabulary) -> None:
        self.target = target
        self._loaded: Any = None
        self._left_out: dict[tuple[str, bool], bool] = {}

    @property
    def tokenizer(self) -> Any:
        """Returns the target's tokenizer; raises :class:`UserError` if it has none."""
        if self._loaded is None:
            try:
                self._loaded = transformers.AutoTokenizer.from_pretrained(self.target.name, trust_remote_code=False)
            except Exception as error:  # whatever a library makes of a damaged folder
                raise UserError(
                    f"target {self.target.name!r} has no usable tokenizer ({one_line(error)}), and the data "
                    "has messages or text; add the tokenizer to the folder or give prompt_ids and response_ids"
                ) from None
        return self._loaded

    @property
    def has_template(self) -> bool:
        """Returns whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def text(self, text: str) -> Record:
        """Returns plain text, every token one to learn; a BOS in the text is not doubled."""
        ids = self._with_bos(text)
        return Record(ids, [True] * len(ids), None)

    def completion(self, prompt: str, completion: str) -> Record:
        """Returns a text and its continuation, which ends with the end-of-sequence token and is what to learn."""
        before, after = self._with_bos(prompt), self._encoded([completion])[0]
        eos = self.target.eos_token_ids
        if eos and after[-1:] and after[-1] not in eos:
            after.append(self.tokenizer.eos_token_id if self.tokenizer.eos_token_id in eos else eos[0])
        return masked(before + after, [False] * len(before) + [True] * len(after))

    def chat(self, messages: list[Turn], tools: list[Any] | None = None, first_turn: int = 0) -> list[Record]:
        """Returns a conversation as one record, or as several where the template renders old turns otherwise.

        Args:
            tools: what the template gets as ``tools``.
            first_turn: assistant turns before this one are prompt.

        Raises:
            UserError: the template is missing, or rewrites the prompt when it adds the answer.
            Unusable: the template refuses these messages or leaves a part out, or there is no assistant turn.
        """
        if not self.has_template:
            raise UserError(
                f"the tokenizer of target {self.target.name!r} has no chat template, but the data has messages; give "
                "prompt_ids and response_ids, or add the template"
            )
        # What nothing precedes nobody asks a target to write.
        turns = [turn for turn, each in enumerate(messages) if each["role"] == "assistant" and turn >= first_turn]
        turns = [turn for turn in turns if turn]
        if not turns:
            raise Unusable("no assistant turn after a prompt")
        messages = self._settled(messages[: turns[-1] + 1], tools)
        self._refuse_left_out(messages, tools)
        if not first_turn and self.tokenizer.is_fast and MARKER.search(self.tokenizer.get_chat_template(tools=tools)):
            return [self._marked(messages, tools)]
        return self._proved(self._answers(messages, turns, tools))

    def _marked(self, messages: list[Turn], tools: list[Any] | None) -> Record:
        """Returns the record that the template's own markers give, each span up to its end-of-turn token."""
        out = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learn, ended = out["input_ids"], [bool(flag) for flag in out["assistant_masks"]], False
        for place, token in enumerate(ids):
            before = place > 0 and learn[place - 1]
            if token in self.target.eos_token_ids and before:  # inside the markers or right behind them
                learn[place], ended = True, True
            elif learn[place]:
                learn[place] = not ended
            else:
                ended = False
        return masked(ids, learn)

    def _proved(self, answers: list[Answer]) -> list[Record]:
        """Returns records in which every answer stands behind exactly the prompt it was written for, longest first."""
        records = []
        while answers:
            whole = answers[-1]
            learn = [False] * len(whole.token_ids)
            unproved = []
            for answer in answers:
                end = len(answer.token_ids)
                if whole.token_ids[:end] == answer.token_ids:
                    learn[answer.start : end] = [True] * (end - answer.start)
                else:
                    unproved.append(answer)
            records.append(masked(whole.token_ids, learn))
            answers = unproved
        return records

    def _answers(self, messages: list[Turn], turns: list[int], tools: list[Any] | None) -> list[Answer]:
        """Returns the conversation up to each assistant turn and the turn's end-of-sequence token."""
        prompts = [self._render(messages[:turn], tools, prompt=True) for turn in turns]
        whole = [self._render(messages[: turn + 1], tools, prompt=False) for turn in turns]
        ids = self._encoded(prompts + whole)  # in one call, which uses all cores
        return list(map(self._answer, prompts, whole, ids[: len(turns)], ids[len(turns) :]))

    def _answer(self, prompt: str, until: str, before: list[int], ids: list[int]) -> Answer:
        if not until.startswith(prompt):
            raise UserError(
                f"the chat template of target {self.target.name!r} rewrites the prompt once the answer is there, so "
                "the assistant's tokens cannot be told from the rest; put {% generation %} markers around the answer "
                "in the template (chat_template.jinja), or give prompt_ids and response_ids (mtp-infer distill does)"
            )
        if ids[: len(before)] != before:  # the answer's first characters merge with the prompt's last ones
            ids, together = before + self._encoded([until[len(prompt) :]])[0], ids
            if self.tokenizer.decode(ids) != self.tokenizer.decode(together):
                raise Unusable("an answer whose tokens merge with the prompt's")
        for place in range(len(before), len(ids)):
            if ids[place] in self.target.eos_token_ids:
                # What the template prints after the end of the turn is not the target's to write.
                return Answer(ids[: place + 1], len(before))
        return Answer(ids, len(before))

    def _settled(self, messages: list[Turn], tools: list[Any] | None) -> list[Turn]:
        """Returns the messages in the form of tool calls that this template prints.

        Templates differ: content null or empty beside tool calls, arguments as an object or as its JSON text.
        """
        calls = [call for turn in messages for call in turn.get("tool_calls", ())]
        if not calls:
            return messages
        names = [str(call["function"]["name"]) for call in calls]
        for as_text in (False, True):
            for content in ("", None):
                form = [_tool_call_form(turn, content, as_text) for turn in messages]
                try:
                    text = self._render(form, tools, prompt=False)
                except Unusable:
                    continue
                if all(text.count(name) >= names.count(name) for name in names):
                    return form
        raise Unusable("tool calls that the chat template refuses or leaves out")

    def _refuse_left_out(self, messages: list[Turn], tools: list[Any] | None) -> None:
        """Raises :class:`Unusable` if the template silently drops a turn of some role."""
        for place, turn in enumerate(messages):
            kind = (turn["role"], place == 0)
            if turn["role"] in ("user", "assistant") or not turn["content"]:
                continue
            if kind not in self._left_out:
                others = messages[:place] + messages[place + 1 :]
                try:
                    without = self._render(others, tools, prompt=False)
                except Unusable:
                    without = None
                self._left_out[kind] = self._render(messages, tools, prompt=False) == without
            if self._left_out[kind]:
                raise Unusable(f"a {turn['role']} turn that the chat template leaves out")

    def _render(self, messages: list[Turn], tools: list[Any] | None, *, prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # a template is a program of its own: any error in it is about this record
            raise Unusable(f"refused by the chat template: {one_line(error)[:80]}") from None
        if not text.strip():
            raise Unusable("messages of which the chat template prints nothing")
        return text

    def _encoded(self, texts: list[str], *, special: bool = False) -> list[list[int]]:
        try:
            return self.tokenizer(texts, add_special_tokens=special)["input_ids"]
        except TypeError:  # what tokenizers say of half a surrogate pair
            raise Unusable("text that cannot be tokenised") from None

    def _with_bos(self, text: str) -> list[int]:
        """Returns the ids of a text with the special tokens that the tokenizer adds; never two BOS."""
        ids, bos = self._encoded([text], special=True)[0], self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _tool_call_form(turn: Turn, content: str | None, arguments_as_text: bool) -> Turn:
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        arguments = call["function"].get("arguments", {})
        if arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**turn, "content": turn["content"] or content, "tool_calls": calls}

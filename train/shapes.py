"""The shapes a record can have, and how each becomes tokens.

A record says by its fields which shape it has, the first of the table that fits; or the source's ``shape`` says it.

prompt_ids         ``prompt_ids`` + ``response_ids``: distilled text
input_ids          ``input_ids`` + ``loss_mask`` (also ``assistant_masks``, ``completion_mask``; or ``labels``, -100
                   where nothing is to learn); tokens outside an ``attention_mask`` are padding
messages           turns of ``role`` + ``content``, ``tools``, ``system``
conversations      ShareGPT's turns of ``from`` + ``value``
prompt_completion  ``prompt`` + ``completion``: two texts (a chat if the target has a template, else as they stand),
                   or two lists of turns
text               ``text``: every token is to learn
"""

import json
from collections.abc import Callable
from typing import Any

from mtp.turns import Unusable, tools_of, turns_of, with_system
from train.chat import Record, Renderer, masked

SHORTEST = 2  # tokens; from 3 on module 1 has a label
MASKS = ("loss_mask", "assistant_masks", "completion_mask")
IGNORED_LABEL = -100


def to_records(value: Any, shape: str | None, renderer: Renderer) -> list[Record]:
    """Returns the documents of one record: one, or several of a conversation whose template rewrites old turns.

    Args:
        value: the record, or the bytes of a JSONL line.
        shape: the shape it must have; None: by its fields.

    Raises:
        Unusable: it is broken, of no shape, or cannot be learnt from; the message is the reason.
        UserError: no record like it can be used with this target.
    """
    value = _parsed(value) if isinstance(value, bytes) else value
    if not isinstance(value, dict):
        raise Unusable("not a JSON object")
    value = {name: each for name, each in value.items() if each is not None}
    fields, read = SHAPES[shape or _detected(value)]
    if missing := [field for field in fields if field not in value]:
        raise Unusable(f"no {' and no '.join(missing)}")
    records = read(value, renderer)
    for record in records:
        if len(record.token_ids) < SHORTEST:
            raise Unusable("too short")
        if not all(0 <= token < renderer.target.vocab_size for token in record.token_ids):
            raise Unusable("token id outside the vocabulary")
    return records


def _detected(value: dict[str, Any]) -> str:
    for enough in (all, any):  # a shape with a field missing is better named than none
        for name, (fields, _) in SHAPES.items():
            if enough(field in value for field in fields):
                return name
    raise Unusable("none of the known fields")


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise Unusable("not UTF-8") from None
    except (ValueError, RecursionError):
        raise Unusable("not JSON") from None


def _from_prompt_ids(value: dict[str, Any], renderer: Renderer) -> list[Record]:
    prompt, response = _ids(value, "prompt_ids"), _ids(value, "response_ids")
    if not response:
        raise Unusable("an empty response")
    return [Record(prompt + response, [False] * len(prompt) + [True] * len(response), len(prompt))]


def _from_input_ids(value: dict[str, Any], renderer: Renderer) -> list[Record]:
    ids = _ids(value, "input_ids")
    if name := next((name for name in MASKS if name in value), None):
        learn = _flags(value, name)
    elif "labels" in value:
        labels = _ids(value, "labels")
        learn = [label != IGNORED_LABEL for label in labels]
        if len(labels) == len(ids) and any(flag and a != b for flag, a, b in zip(learn, ids, labels, strict=True)):
            raise Unusable("labels that differ from input_ids (they must not be shifted)")
    else:
        raise Unusable("input_ids without loss_mask or labels")
    real = _flags(value, "attention_mask") if "attention_mask" in value else [True] * len(ids)
    if not len(ids) == len(learn) == len(real):
        raise Unusable("a mask that is not as long as input_ids")
    kept = [place for place, flag in enumerate(real) if flag]
    return [masked([ids[place] for place in kept], [learn[place] for place in kept])]


def _from_messages(value: dict[str, Any], renderer: Renderer) -> list[Record]:
    return renderer.chat(with_system(value, turns_of(value["messages"])), tools_of(value))


def _from_conversations(value: dict[str, Any], renderer: Renderer) -> list[Record]:
    return renderer.chat(with_system(value, turns_of(value["conversations"])), tools_of(value))


def _from_prompt_completion(value: dict[str, Any], renderer: Renderer) -> list[Record]:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = with_system(value, turns_of(prompt))
        return renderer.chat([*before, *turns_of(completion)], tools_of(value), first_turn=len(before))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise Unusable("prompt and completion are not two texts or two lists of turns")
    if renderer.has_template:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return renderer.chat(with_system(value, turns), tools_of(value))
    return [renderer.completion(prompt, completion)]


def _from_text(value: dict[str, Any], renderer: Renderer) -> list[Record]:
    if not isinstance(value["text"], str):
        raise Unusable("text is not a string")
    return [renderer.text(value["text"])]


# In order of precedence: the fields of a shape, and what makes records of them.
SHAPES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any], Renderer], list[Record]]]] = {
    "prompt_ids": (("prompt_ids", "response_ids"), _from_prompt_ids),
    "input_ids": (("input_ids",), _from_input_ids),
    "messages": (("messages",), _from_messages),
    "conversations": (("conversations",), _from_conversations),
    "prompt_completion": (("prompt", "completion"), _from_prompt_completion),
    "text": (("text",), _from_text),
}


def _ids(value: dict[str, Any], name: str) -> list[int]:
    ids = value[name]
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise Unusable(f"{name} is not a list of whole numbers")
    return ids


def _flags(value: dict[str, Any], name: str) -> list[bool]:
    flags = value[name]
    if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags):
        raise Unusable(f"{name} is not a list of zeros and ones")
    return [bool(flag) for flag in flags]

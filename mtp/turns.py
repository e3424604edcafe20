"""The turns of a conversation as people write them, brought to one form: for training text and for prompts alike.

Roles of ShareGPT and others, content as text or as a list of parts, ``system`` as a turn or as a field, tool calls.
"""

import json
from typing import Any

Turn = dict[str, Any]
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


class Unusable(Exception):
    """A record that cannot be used; the message is the reason, short enough to count by."""


def turns_of(values: Any) -> list[Turn]:
    """Returns the turns of a conversation; raises :class:`Unusable` if it is none."""
    if not isinstance(values, list) or not values or not all(isinstance(turn, dict) for turn in values):
        raise Unusable("messages is not a list of turns")
    return [_turn(value) for value in values]


def _turn(value: dict[str, Any]) -> Turn:
    """Returns a turn with role, text content and whatever else a template may read (tool calls, reasoning, names)."""
    turn = {name: each for name, each in value.items() if each is not None and name not in ("from", "value")}
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if not isinstance(role, str):
        raise Unusable("a turn without a role")
    if role == "function_call":
        role, content, turn["tool_calls"] = "assistant", None, _from_json(content)
        turn["tool_calls"] = turn["tool_calls"] if isinstance(turn["tool_calls"], list) else [turn["tool_calls"]]
    calls = [_tool_call(call) for call in turn.pop("tool_calls", None) or ()]
    if calls:
        turn["tool_calls"] = calls
    content = "" if content is None and calls else _text(content)
    return {**turn, "role": ROLES.get(role, role), "content": content}


def _text(content: Any) -> str:
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise Unusable("a content part that is not text")
        return "".join(map(str, texts))
    if not isinstance(content, str):
        raise Unusable("a turn without text content")
    return content


def _tool_call(call: Any) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, which is what templates are written for."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("a tool call without a function name")
    outer = call if "function" in call else {"type": "function"}
    return {**outer, "function": {**function, "arguments": _from_json(function.get("arguments", {}))}}


def with_system(value: dict[str, Any], turns: list[Turn]) -> list[Turn]:
    """Returns the turns with the record's ``system`` field as the first one, unless they begin with a system turn."""
    system = value.get("system")
    if not isinstance(system, str) or not system or turns[0]["role"] == "system":
        return turns
    return [{"role": "system", "content": system}, *turns]


def tools_of(value: dict[str, Any]) -> list[Any] | None:
    """Returns a record's ``tools`` as chat templates take them; raises :class:`Unusable` if they are something else."""
    tools = _from_json(value.get("tools"))
    if tools in (None, [], ""):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("tools is not a list of JSON schemas")
    return tools


def _from_json(value: Any) -> Any:
    """Returns the value of a JSON text; what is not JSON text, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value

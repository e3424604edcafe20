"""Every shape of record, detected and named; broken ones are skipped by reason."""

import pytest

from mtp import UserError
from tests.train.texts import chat_target, read, turns, write
from train.config import Source
from train.records import read_records

CHAT = "<|user|>a<|end|><|assistant|>b<|end|>"
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ASK = turns(("user", "a"))
B = 4 + ord("b") - 32


@pytest.mark.parametrize(
    ("record", "shape", "text", "learnt"),
    [
        ({"messages": turns(("user", "a"), ("assistant", "b")), "id": 7}, "messages", CHAT, ["b<|end|>"]),
        (
            {"messages": turns(("user", [{"type": "text", "text": "a"}]), ("assistant", ["b"]))},
            "messages",
            CHAT,
            ["b<|end|>"],
        ),
        ({"conversations": SHAREGPT, "messages": None}, "conversations", CHAT, ["b<|end|>"]),
        ({"prompt": "a", "completion": "b"}, "prompt_completion", CHAT, ["b<|end|>"]),
        (
            {
                "prompt": turns(("user", "x"), ("assistant", "y"), ("user", "a")),
                "completion": turns(("assistant", "b")),
            },
            "prompt_completion",
            "<|user|>x<|end|><|assistant|>y<|end|>" + CHAT,
            ["b<|end|>"],
        ),
        ({"text": "ab"}, "text", "ab", ["ab"]),
        ({"prompt_ids": [B], "response_ids": [B, 3], "text": "x"}, "prompt_ids", "bb<|end|>", ["b<|end|>"]),
        ({"input_ids": [B, B, 3, B], "loss_mask": [0, 1, 1, 0]}, "input_ids", "bb<|end|>", ["b<|end|>"]),
        ({"input_ids": [B, B, 3], "labels": [-100, B, 3]}, "input_ids", "bb<|end|>", ["b<|end|>"]),
        (
            {"input_ids": [3, B, B, 3, 3], "assistant_masks": [1, 0, 1, 1, 1], "attention_mask": [0, 1, 1, 1, 0]},
            "input_ids",
            "bb<|end|>",
            ["b<|end|>"],
        ),
    ],
)
def test_a_shape_is_detected_or_named(tmp_path, record, shape, text, learnt):
    target = chat_target(tmp_path)
    path = write(tmp_path / "data.jsonl", record)
    for source in (path, Source(source=path, shape=shape)):
        assert read(tmp_path, target, record, source=source) == ([(text, learnt)], {})


def test_the_prompt_is_what_comes_before_the_last_answer(tmp_path):
    path = write(tmp_path / "d.jsonl", {"messages": turns(("user", "a"), ("assistant", "b"))}, {"text": "ab"})
    records, _ = read_records(path, chat_target(tmp_path))
    assert [record.prompt_length for record in records] == [4, None]
    assert [record.origin for record in records] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": 3}, "messages is not a list of turns"),
        ({"messages": []}, "messages is not a list of turns"),
        ({"messages": [{"content": "a"}]}, "a turn without a role"),
        ({"messages": turns(("user", "a"), ("assistant", None))}, "a turn without text content"),
        ({"messages": turns(("user", {"a": 1}), ("assistant", "b"))}, "a turn without text content"),
        ({"messages": turns(("user", [{"type": "image"}]), ("assistant", "b"))}, "a content part that is not text"),
        ({"messages": turns(("user", "a"))}, "no assistant turn after a prompt"),
        ({"messages": turns(("assistant", "a"))}, "no assistant turn after a prompt"),
        ({"messages": turns(("user", "\ud800"), ("assistant", "b"))}, "text that cannot be tokenised"),
        ({"messages": turns(("user", "a"), ("assistant", "b")), "tools": "x"}, "tools is not a list of JSON schemas"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}]},
            "a tool call without a function name",
        ),
        ({"text": "\ud800"}, "text that cannot be tokenised"),
        ({"text": 5}, "text is not a string"),
        ({"text": ""}, "too short"),
        ({"text": None}, "none of the known fields"),
        ({"prompt": "a", "completion": ["b"]}, "prompt and completion are not two texts or two lists of turns"),
        ({"prompt": "a"}, "no completion"),
        ({"prompt_ids": [B], "response_ids": []}, "an empty response"),
        ({"prompt_ids": [1], "response_ids": [10**30]}, "token id outside the vocabulary"),
        ({"input_ids": [B, B]}, "input_ids without loss_mask or labels"),
        ({"input_ids": [B, B], "loss_mask": [0, 0]}, "no token to learn"),
        ({"input_ids": [B, B], "loss_mask": [1]}, "a mask that is not as long as input_ids"),
        ({"input_ids": [B, B], "loss_mask": [1, 2]}, "loss_mask is not a list of zeros and ones"),
        (
            {"input_ids": [B, 5], "labels": [5, -100]},
            "labels that differ from input_ids (they must not be shifted)",
        ),
    ],
)
def test_a_useless_record_is_skipped_by_reason(tmp_path, record, reason):
    _, skipped = read(tmp_path, chat_target(tmp_path), record, {"text": "fine"})
    assert skipped == {reason: 1}


def test_a_named_shape_refuses_the_others(tmp_path):
    path = write(tmp_path / "d.jsonl", {"text": "ab"})
    with pytest.raises(UserError, match=r"d\.jsonl:1: no messages"):
        read_records(Source(source=path, shape="messages"), chat_target(tmp_path))

"""What the assistant writes, found in every kind of template; nothing else is learnt."""

import json

import pytest
from transformers import AutoTokenizer

from mtp import UserError
from tests.train.texts import chat_target, read, turns

SIX = turns(("system", "s"), ("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "f"), ("user", "g"))
GENERATION = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}<|end|>{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
# As Qwen3 and DeepSeek-R1 do: thinking stays in the last turn only.
REASONING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('/')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPENS_THINKING = REASONING.replace("%}<|assistant|>{% endif", "%}<|assistant|>T{% endif")
WITH_BOS = "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
WITH_BOS += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TOOLS = (
    "{% if tools %}({{ tools[0]['function']['name'] }}){% endif %}{% for m in messages %}<|{{ m['role'] }}|>"
    "CONTENT{% for call in m.tool_calls or [] %}[{{ call.function.name }} ARGUMENTS]{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL_TURNS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "assistant", "content": "two", "tool_calls": None},
]


@pytest.mark.parametrize("field", [False, True])
@pytest.mark.parametrize("template", ["stock", "markers"])
def test_every_assistant_turn_is_learnt_with_its_end_of_turn(tmp_path, template, field):
    """Six turns, the system turn as a turn and as a field: AngelSlim#345, aiperf#798, Automodel#3144."""
    target = chat_target(tmp_path, **({"template": GENERATION} if template == "markers" else {}))
    line = {"system": "s", "messages": SIX[1:]} if field else {"messages": SIX}
    ((text, learnt),), _ = read(tmp_path, target, line)
    assert learnt == ["cd<|end|>", "f<|end|>"]
    assert text == "<|system|>s<|end|><|user|>ab<|end|><|assistant|>cd<|end|><|user|>e<|end|><|assistant|>f<|end|>"


def test_markers_around_header_and_line_end_are_cut_to_the_answer(tmp_path):
    template = GENERATION.replace("{% endgeneration %}<|end|>", "<|end|>..{% endgeneration %}")
    ((_, learnt),), _ = read(tmp_path, chat_target(tmp_path, template), {"messages": SIX})
    assert learnt == ["cd<|end|>", "f<|end|>"]


def test_a_template_that_prints_after_the_end_of_turn(tmp_path):
    target = chat_target(tmp_path, WITH_BOS.replace("<|end|>", "<|end|>."), bos="~")
    ((text, learnt),), _ = read(tmp_path, target, {"messages": SIX})
    assert learnt == ["cd<|end|>", "f<|end|>"]
    assert "<|end|>.<|user|>" in text


def test_one_bos_and_the_ids_of_generation(tmp_path):
    """A template that prints BOS and a tokenizer that adds one: OpenRLHF#393, mlx-examples#1095."""
    target = chat_target(tmp_path, WITH_BOS, bos="~")
    lines = [{"messages": turns(("user", "a"), ("assistant", "b"))}, {"text": "ab"}, {"text": "~ab"}]
    records, _ = read(tmp_path, target, *lines)
    assert [text for text, _ in records] == ["~<|user|>a<|end|><|assistant|>b<|end|>", "~ab", "~ab"]


@pytest.mark.parametrize("pad", [None, "<|end|>"])
def test_no_pad_token_or_eos_as_pad_keeps_the_real_eos(tmp_path, pad):
    """FastChat#3266, llm-course#33."""
    ((_, learnt),), _ = read(tmp_path, chat_target(tmp_path, pad=pad), {"prompt": "a", "completion": "b"})
    assert learnt == ["b<|end|>"]


def test_a_reasoning_template_gives_one_record_per_rewritten_turn(tmp_path):
    target = chat_target(tmp_path, REASONING)
    line = {"messages": turns(("user", "a"), ("assistant", "t/b"), ("user", "c"), ("assistant", "u/d"))}
    records, skipped = read(tmp_path, target, line)
    assert records == [
        ("<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>u/d<|end|>", ["u/d<|end|>"]),
        ("<|user|>a<|end|><|assistant|>t/b<|end|>", ["t/b<|end|>"]),
    ]
    assert not skipped
    line = {"messages": turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "u/d"))}
    records, _ = read(tmp_path, target, line)  # nothing to drop: one record
    assert [learnt for _, learnt in records] == [["b<|end|>", "u/d<|end|>"]]


@pytest.mark.parametrize(
    "template", [OPENS_THINKING, "{% for m in messages %}{{ messages|length }}{{ m['content'] }}{% endfor %}"]
)
def test_a_template_that_rewrites_the_prompt_is_a_loud_stop(tmp_path, template):
    line = {"messages": turns(("user", "a"), ("assistant", "b"))}
    target = chat_target(tmp_path, template)
    with pytest.raises(UserError, match=r"data\.jsonl:1: the chat template of target .*generation.*prompt_ids"):
        read(tmp_path, target, line)


def test_without_a_template_messages_are_a_loud_stop_and_prompts_are_text(tmp_path):
    """Megatron-Bridge#3359, marin#7237."""
    target = chat_target(tmp_path, None)
    with pytest.raises(UserError, match=r"data\.jsonl:1: .*no chat template"):
        read(tmp_path, target, {"messages": SIX})
    ((text, learnt),), _ = read(tmp_path, target, {"prompt": "a", "completion": "b"})
    assert (text, learnt) == ("ab<|end|>", ["b<|end|>"])


def test_an_answer_that_merges_with_the_prompt_is_tokenised_as_it_is_generated(tmp_path):
    template = WITH_BOS.replace("<|{{ m['role'] }}|>", "<|{{ m['role'] }}|>:")
    template = template.replace("<|assistant|>{% endif", "<|assistant|>:{% endif")
    target = chat_target(tmp_path, template, bos="~", added=["::"])
    ((text, learnt),), _ = read(tmp_path, target, {"messages": turns(("user", "a"), ("assistant", ":b"))})
    assert learnt == [":b<|end|>"]
    assert text == "~<|user|>:a<|end|><|assistant|>::b<|end|>"
    assert len(AutoTokenizer.from_pretrained(tmp_path).tokenize("::")) == 1


@pytest.mark.parametrize("content", ["{{ m.content }}", "{{ m.content | string }}", "{{ '' + m.content }}"])
@pytest.mark.parametrize("arguments", ["{{ call.function.arguments['a'] + 0 }}", "{{ call.function.arguments + '' }}"])
def test_tool_turns_and_null_content(tmp_path, content, arguments):
    """Null content beside tool calls, arguments as an object or as text, whichever the template wants."""
    target = chat_target(tmp_path, TOOLS.replace("CONTENT", content).replace("ARGUMENTS", arguments))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    shown = "1" if "+ 0" in arguments else '{"a": 1}'
    for line in ({"messages": TOOL_TURNS, "tools": tools}, {"messages": TOOL_TURNS, "tools": json.dumps(tools)}):
        ((text, learnt),), _ = read(tmp_path, target, line)
        assert learnt == [f"[add {shown}]<|end|>", "two<|end|>"]
        assert text.startswith("(add)<|user|>q<|end|><|assistant|>[add")
        assert "None" not in text


def test_sharegpt_tool_turns(tmp_path):
    target = chat_target(tmp_path, TOOLS.replace("CONTENT", "{{ m.content }}").replace("ARGUMENTS", ""))
    line = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ]
    }
    ((text, learnt),), _ = read(tmp_path, target, line)
    assert learnt == ["[add ]<|end|>", "two<|end|>"]
    assert "2<|end|>" in text


def test_a_template_that_prints_nothing_is_said_once_for_all_records(tmp_path):
    target = chat_target(tmp_path, "{# nothing #}")
    line = {"messages": turns(("user", "a"), ("assistant", "b"))}
    with pytest.raises(UserError) as error:
        read(tmp_path, target, *[line] * 5)
    assert "data.jsonl:1: messages of which the chat template prints nothing (and 4 more)" in str(error.value)
    assert str(error.value).count("nothing") == 1


def test_turns_that_the_template_leaves_out_are_named(tmp_path):
    silent = "{% for m in messages if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    target = chat_target(tmp_path, silent + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    fine = {"messages": turns(("user", "a"), ("assistant", "b"))}
    records, skipped = read(tmp_path, target, fine, {"messages": SIX}, {"messages": TOOL_TURNS}, {"messages": SIX})
    assert len(records) == 1
    assert skipped == {
        "a system turn that the chat template leaves out": 2,
        "tool calls that the chat template refuses or leaves out": 1,
    }

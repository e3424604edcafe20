"""A tiny target as users have it: a folder with weights and a tokenizer, and a checkpoint made for it."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mtp import Target
from mtp.checkpoint import save_checkpoint
from tests.builders import make_stack, make_target

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder, template=TEMPLATE):
    specials = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    alphabet = [chr(place) for place in range(32, 127)]
    vocab = {token: place for place, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", additional_special_tokens=specials[:3]
    )
    fast.chat_template = template
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target("llama", vocab_size=99).model
    model.generation_config.eos_token_id = 3
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint_folder(target_folder, tmp_path_factory):
    target = Target.load(str(target_folder))
    stack = make_stack(target, 3)
    folder = tmp_path_factory.mktemp("run") / "final"
    save_checkpoint(folder, stack.contract, stack.state_dict(), target, {"step": 0})
    return folder

"""Ladder (f): the adapter equals the Hugging Face model; what does not fit is refused with the reason."""

import pytest
import torch
import transformers

from mtp import Target, UserError
from mtp.target import refuse_recurrent
from tests.builders import EXPERTS, FAMILIES, assert_equal, exact, make_model, make_target, one_document, random_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adapter_equals_the_model(family, dtype):
    target = make_target(family, dtype=dtype)
    tokens = random_tokens(2, 14)
    with exact():
        theirs = target.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        ours = target.forward(tokens, one_document(tokens), target_hidden="post_norm")
        assert_equal(target.head(ours.final), theirs.logits, "logits")
        assert_equal(ours.hidden, theirs.hidden_states[-1], "post-norm hidden")
        before = target.forward(tokens, one_document(tokens), target_hidden="pre_norm")
        assert_equal(target.final_norm(before.hidden), before.final, "pre-norm hidden")
        assert_equal(target.embed(tokens), theirs.hidden_states[0], "embedding with its scale")
        assert_equal(target.head.restricted((3, 9, 60))(ours.final), theirs.logits[..., [3, 9, 60]], "draft vocabulary")


@pytest.mark.parametrize("config", ["MambaConfig", "Qwen3NextConfig", "BambaConfig", "RwkvConfig"])
def test_recurrent_state_is_refused_with_the_reason(config):
    with pytest.raises(UserError, match="cannot be overwritten row by row"):
        refuse_recurrent(getattr(transformers, config)(), config.replace("Config", "ForCausalLM"), "some/model")


def test_a_recurrent_target_is_refused_before_its_weights_are_loaded(tmp_path):
    transformers.MambaConfig(architectures=["MambaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be overwritten row by row"):
        Target.load(str(tmp_path))


def test_an_architecture_of_another_kind_is_refused_by_what_it_lacks():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=61)
    with pytest.raises(UserError, match="has no 'layers'"):
        Target(transformers.GPT2LMHeadModel(config), "gpt2")


def test_experts_in_float64_are_refused_with_the_way_out():
    with pytest.raises(UserError, match=r"does not run in torch\.float64: .*; it may in dtype float32"):
        make_target("Qwen3MoeConfig", dtype=torch.float64, num_experts=4, **EXPERTS)


def test_a_head_that_scales_logits_unseen_is_refused():
    """unsloth-zoo#593, OpenTau#179: a soft-cap or scale applied differently is caught when the target is loaded."""
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(UserError, match="logits"):
        Target(model, "scaled")
    model = make_model("llama")
    model.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]), prepend=True)
    with pytest.raises(UserError, match="not supported"):
        Target(model, "scaled embedding")


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ("GraniteConfig", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
        ("CohereConfig", {"logit_scale": 0.25}),
        ("Phi3Config", {"pad_token_id": 0}),
        ("Olmo2Config", {}),
    ],
)
def test_families_nobody_named_work_or_are_refused_in_one_sentence(config, fields):
    try:
        target = Target(make_model(config, **fields), config)
    except UserError as error:
        assert config.removesuffix("Config") in str(error) or "not supported" in str(error)  # noqa: PT017
        return
    tokens = random_tokens(1, 10)
    with exact():
        theirs = target.model(input_ids=tokens, use_cache=False).logits
        ours = target.head(target.forward(tokens, one_document(tokens), target_hidden="post_norm").final)
    assert_equal(ours, theirs)

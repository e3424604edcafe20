"""Architectures that no line of ours names: the adapter proves itself, and then the cells are exact.

Each differs from Llama in something that an adapter gets wrong: another name for cache or norm, keys and
values of unequal width, attention sinks, parallel blocks, scales on embedding, residual or logits, experts.
"""

import pytest
import torch

from infer.check import run_check
from infer.engine import Engine
from infer.requests import Request
from mtp import UserError
from tests.builders import EXPERTS, LATENT, make_stack, make_target

ARCHITECTURES = {
    "DeepseekV3Config": {**LATENT, **EXPERTS},
    "GPTNeoXConfig": {},
    "PhiConfig": {"num_key_value_heads": 4},
    "OlmoConfig": {},
    "Olmo2Config": {},
    "GptOssConfig": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {"num_experts": 4, **EXPERTS},
    "Cohere2Config": {"sliding_window": 5},
    "GraniteConfig": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "Glm4Config": {},
    "StableLmConfig": {},
    "NemotronConfig": {},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cells_and_text_are_exact(name):
    target = make_target(name, **ARCHITECTURES[name])
    stack = make_stack(target, 3)
    requests = [Request(prompt, 12, key) for key, prompt in enumerate([(5, 6, 7), (9,), tuple(range(3, 20))])]
    for report in run_check(target, stack, requests, min_rounds=30):
        assert report.rounds
        assert report.mismatches == 0, report.first_mismatch
    engine = Engine(target, stack, eos_token_ids=())
    (ours,) = engine.generate(requests[:1])
    theirs = target.model.generate(
        torch.tensor([requests[0].prompt_ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert ours.token_ids == theirs[0, 3:].tolist()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Llama4TextConfig", {"num_local_experts": 2}, "chunked_attention: their keys"),
        ("GPT2Config", {}, "no 'layers'"),
        (
            "Phi3Config",
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "original_max_position_embeddings": 16,
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                },
            },
            "longrope.*within 16 tokens",
        ),
        ("OPTConfig", {}, "no 'rotary_emb'"),
        ("MambaConfig", {}, "running summary"),
        ("Qwen3NextConfig", {"num_experts": 4, **EXPERTS}, "running summary"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(name, fields, message):
    with pytest.raises(UserError, match=message):
        make_target(name, **fields)

"""Tiny random targets and module stacks for all test folders: ``from tests.builders import make_target``.

Weights are seeded and large, so that logits of different inputs differ by far more than noise:
every parameter is redrawn, norms and biases too, so no field of the contract is a no-op.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mtp import Contract, MTPStack, Target
from mtp.cache import Cells, CellTable, Packed
from mtp.precision import KeepFloat64

VOCAB, WIDTH, WINDOW = 61, 32, 5
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA2 = {
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
}
# Name -> (config class, what differs). The modules' block is the target's last layer, so both kinds end a stack here.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**GEMMA2, "final_logit_softcapping": 3.0, "layer_types": ALTERNATING[:3]}),
    "gemma2_untied": (
        "Gemma2Config",
        {**GEMMA2, "tie_word_embeddings": False, "num_hidden_layers": 2, "layer_types": ALTERNATING[:2]},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "layer_types": ALTERNATING,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
}
# What experts and latent attention (DeepSeek) ask of a tiny config.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# One rule for "equal": largest difference over largest value. The noise of a dtype, never of a test.
NOISE = {torch.float32: 1e-5, torch.float64: 1e-10}


def make_config(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """Returns the tiny config of a family of ``FAMILIES``, or of any config class by its name."""
    name, fields = FAMILIES.get(family, (family, {}))
    return getattr(transformers, name)(**(COMMON | fields | overrides))


def make_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> nn.Module:
    """Returns a causal LM of transformers with random weights."""
    config = make_config(family, **overrides)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomize(model, seed)
    return model.eval()


def make_target(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Target:
    """Returns the target of :func:`make_model`."""
    return Target(make_model(family, dtype=dtype, seed=seed, **overrides), f"tiny-{family}-{seed}")


def make_stack(target: Target, k: int = 3, *, seed: int = 100, **contract_fields: Any) -> MTPStack:
    """Returns k modules with random weights: the same ones for the same seed, whatever the contract."""
    stack = MTPStack(Contract.for_new_modules(k, **contract_fields), target)
    randomize(stack, seed)
    return stack.eval().requires_grad_(False)


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Redraws every parameter in place: matrices wide, norms and biases around their first value."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        if parameter.dim() > 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.add_(0.2 * noise)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    """Returns seeded token ids."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def one_document(tokens: Tensor) -> Packed:
    """Returns the context in which every sequence of a batch is one document."""
    return Packed(torch.zeros_like(tokens))


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """No gradients, and float64 that stays float64 in model code."""
    with torch.no_grad(), KeepFloat64():
        yield


def unroll(stack: MTPStack, tokens: Tensor, context: Packed) -> dict[int, Any]:
    """Returns the training forward, target included: ``outputs[i]`` of module i, ``outputs[0]`` of the target."""
    target = stack.target.forward(tokens, context, target_hidden=stack.contract.target_hidden)
    return {0: target} | dict(stack.unroll(target.hidden, tokens, context))


def cached(tables: list[CellTable], first: int, end: int, *, batch: int = 1) -> Cells:
    """Returns the context of rows ``first..end-1`` of every sequence."""
    rows = torch.arange(first, end).expand(batch, -1)
    return Cells(tables, rows, slice(0, batch), end)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest difference over the largest value."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} against {tuple(theirs.shape)}"
    assert torch.isfinite(theirs).all()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def assert_equal(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    """Asserts equality up to the noise of the dtype."""
    assert ours.dtype == theirs.dtype
    assert (apart := difference(ours, theirs)) <= NOISE[theirs.dtype], f"{what}: relative difference {apart:.1e}"


def assert_differs(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    """Asserts a difference that no noise explains."""
    assert (apart := difference(ours, theirs)) > 1e-3, f"{what}: relative difference only {apart:.1e}"

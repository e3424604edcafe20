"""The frozen target: a Hugging Face causal LM seen through the four things that modules need.

Hidden states at the contract's point, the embedding (with its scale), the head (with its
soft-cap), and the decoder layer class. Nothing here asks for a model's name: what differs
between families is read from the config and then *proved* on a short probe when the target is
loaded, so an architecture that does not fit is refused instead of decoded wrongly.

Shapes: B sequences, R rows, H hidden size, V vocabulary.
"""

import contextlib
import copy
import inspect
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import get_layer_types_and_kwargs

from mtp.cache import Cells, CellTable, Context, Packed
from mtp.errors import UserError, one_line

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm")
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def eos_token_ids(text_config: Any, generation_config: Any) -> tuple[int, ...]:
    """Returns every end-of-sequence id of the generation config, or of the text config where that has none.

    Raises:
        UserError: one is not a token id.
    """
    eos = getattr(generation_config, "eos_token_id", None)
    eos = text_config.eos_token_id if eos is None else eos
    ids = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
    if wrong := [token for token in ids if type(token) is not int]:
        raise UserError(f"eos_token_id {wrong[0]!r} is not a token id; mend the target's configs")
    return tuple(ids)


class TargetOutput(NamedTuple):
    """``hidden`` [B, R, H] at the contract's point, ``final`` [B, R, H] after the final norm (the head's input)."""

    hidden: Tensor
    final: Tensor


@dataclass(frozen=True)
class Head:
    """The target's head, whole or cut to a draft vocabulary: [..., H] -> logits [..., V]."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    token_ids: Tensor | None = None

    def __call__(self, final: Tensor) -> Tensor:
        """Returns the logits of the target's own forward for the kept tokens, in the weights' dtype."""
        logits = nn.functional.linear(final.to(self.weight.dtype), self.weight, self.bias) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def restricted(self, token_ids: tuple[int, ...] | None) -> "Head":
        """Returns the head of a draft vocabulary (None: the whole one).

        Raises:
            UserError: an id lies outside the vocabulary.
        """
        if token_ids is None:
            return self
        if token_ids[-1] >= self.weight.shape[0]:
            raise UserError(
                f"draft_vocab: token id {token_ids[-1]} is outside the target's {self.weight.shape[0]} tokens"
            )
        kept = torch.tensor(token_ids, device=self.weight.device)
        bias = None if self.bias is None else self.bias[kept]
        return Head(self.weight[kept], bias, self.scale, self.softcap, kept)

    def tokens(self, choice: Tensor) -> Tensor:
        """Maps indices into these logits to token ids."""
        return choice if self.token_ids is None else self.token_ids[choice]

    def places(self, tokens: Tensor) -> Tensor:
        """Maps token ids to indices into these logits, -1 for those outside the draft vocabulary."""
        if self.token_ids is None:
            return tokens
        places = torch.searchsorted(self.token_ids, tokens).clamp(max=len(self.token_ids) - 1)
        return torch.where(self.token_ids[places] == tokens, places, -1)


class Target:
    """A frozen causal LM. Not an ``nn.Module``, so no optimizer, engine or state dict can reach its weights."""

    def __init__(self, model: Any, name: str) -> None:
        """Wraps a loaded transformers model and proves on a probe that the adapter equals it.

        Raises:
            UserError: the architecture is not supported; the message says why.
        """
        self.name = name
        self.model: Any = model.eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        refuse_recurrent(self.config, type(model), name)
        refuse_rope_by_length(self.config, name)
        self.decoder = self.model.get_decoder()
        final_norms = [each for each in FINAL_NORMS if isinstance(getattr(self.decoder, each, None), nn.Module)]
        for part in ("layers", "rotary_emb", *(() if final_norms else FINAL_NORMS[:1])):
            if not isinstance(getattr(self.decoder, part, None), nn.Module):
                raise UserError(
                    f"target {name!r}: {type(self.decoder).__name__} has no {part!r}; the toolkit needs a "
                    "decoder of rotary-position layers with a final norm (Llama, Qwen, Mistral, Gemma, ...)"
                )
        if not len(self.decoder.layers):
            raise UserError(f"target {name!r} has no layers; modules are made from the last one")
        self.final_norm = getattr(self.decoder, final_norms[0])
        self.layer_types, kwargs = get_layer_types_and_kwargs(self.config)
        self.windows = {kind: kw.get("sliding_window") for kind, kw in zip(self.layer_types, kwargs, strict=True)}
        self._cache_argument = cache_argument(self.decoder, default="past_key_values")
        self._layer_cache_argument = cache_argument(self.decoder.layers[-1], default=self._cache_argument)
        self._rope_by_layer_type = "layer_type" in inspect.signature(self.decoder.rotary_emb.forward).parameters
        self._embedding = self.model.get_input_embeddings()
        self._embedding_scale = float(getattr(self.config, "embedding_multiplier", None) or 1.0)
        self.head = self._make_head()
        self.vocab_size: int = self.head.weight.shape[0]
        try:
            self._prove()
        except UserError:
            raise
        except Exception as error:  # whatever an architecture's own code makes of our calls
            advice = "please report the architecture"
            if self.dtype == torch.float64:  # kernels of experts, say, have none
                advice = "it may in dtype float32; otherwise " + advice
            raise UserError(
                f"target {name!r} ({type(model).__name__}) does not run in {self.dtype}: a short probe through its "
                f"layers failed ({type(error).__name__}: {one_line(error)}); {advice}"
            ) from error

    @classmethod
    def load(cls, name: str, *, dtype: str = "float32", device: str | torch.device = "cpu") -> "Target":
        """Loads a target from a local folder or a hub name; remote code is never run.

        Raises:
            UserError: nothing there, not a causal LM, or an unsupported architecture.
        """
        return cls(load_model(name, dtype).to(device), name)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def context_length(self) -> int:
        """Returns the most tokens a sequence may have."""
        return int(self.config.max_position_embeddings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Returns every end-of-sequence id of the generation config, or of the config."""
        return eos_token_ids(self.config, getattr(self.model, "generation_config", None))

    def whole_ends(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which embedding and head can be used: here always, elsewhere they may be in parts."""
        return contextlib.nullcontext()

    def whole_layer(self, layer: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which a layer's weights can be read: here always."""
        return contextlib.nullcontext()

    def any_rank(self, flag: bool) -> bool:
        """Returns whether any process that must run this target together with this one raises the flag."""
        return flag

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Returns what the target's first layer would read for these tokens: [B, R] -> [B, R, H]."""
        embedded = self._embedding(tokens)
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    @torch.no_grad()
    def rope(self, like: Tensor, positions: Tensor) -> Any:
        """Returns the position embeddings of the last layer's kind (what modules use) at [B, R] positions."""
        if self._rope_by_layer_type:
            return self.decoder.rotary_emb(like, positions, self.layer_types[-1])
        return self.decoder.rotary_emb(like, positions)

    def attention_mask(self, context: Context, layer_type: str, dtype: torch.dtype) -> Tensor:
        """Returns the mask that a layer of this kind takes: bool for sdpa, additive for eager."""
        visible = context.visible(self.windows[layer_type])
        if self.config._attn_implementation != "eager":
            return visible
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor, context: Context, *, target_hidden: str) -> TargetOutput:
        """Runs the target's layers over [B, R] tokens at the context's rows; no logits are made.

        Args:
            target_hidden: the contract's point, ``post_norm`` or ``pre_norm``.
        """
        masks = {kind: self.attention_mask(context, kind, self.dtype) for kind in dict.fromkeys(self.layer_types)}
        store = context.store(index=None)
        before_norm: list[Tensor] = []
        hook = self.final_norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
        try:
            final = self.decoder(
                input_ids=tokens,
                attention_mask=masks if len(masks) > 1 else masks[self.layer_types[0]],
                position_ids=context.rows,
                use_cache=store is not None,
                **{self._cache_argument: store},
            ).last_hidden_state
        finally:
            hook.remove()
        return TargetOutput(final if target_hidden == "post_norm" else before_norm[0], final)

    def run_block(self, block: nn.Module, inputs: Tensor, context: Context, positions: Tensor, *, index: int) -> Tensor:
        """Runs the block of module ``index`` (a layer of the last layer's kind) over the context's rows.

        Args:
            inputs: [B, R, H].
            positions: int [B, R], for RoPE.

        Returns:
            [B, R, H], before any final norm.
        """
        output = block(
            inputs,
            attention_mask=self.attention_mask(context, self.layer_types[-1], inputs.dtype),
            position_embeddings=self.rope(inputs, positions),
            position_ids=positions,
            **{self._layer_cache_argument: context.store(index=index)},
        )
        return output[0] if isinstance(output, tuple) else output

    def new_block(self) -> nn.Module:
        """Returns a trainable copy of the target's last decoder layer: class, config and weights."""
        return copy.deepcopy(self.decoder.layers[-1]).requires_grad_(True)

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """Redraws the weights that a module of a block has itself, as the architecture draws them for a new model."""
        self.model._init_weights(module)

    def new_norm(self) -> nn.Module:
        """Returns a trainable norm of the target's class that does not rescale (its weights as made new)."""
        norm = self.final_norm
        eps = {"eps": getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6))}
        known = inspect.signature(type(norm)).parameters
        return type(norm)(self.hidden_size, **(eps if "eps" in known else {})).to(self.device, self.dtype)

    def new_post_norm(self) -> nn.Module:
        """Returns a trainable copy of the target's final norm, the one its head expects."""
        return copy.deepcopy(self.final_norm).requires_grad_(True)

    def fingerprint(self) -> list[float]:
        """Returns two weights of every tensor of the layers, and more of embedding and head.

        Targets of equal shape differ in it, a model and its fine-tuned descendant too.
        """
        sample = [_sample(self._embedding.weight, 32), _sample(self.head.weight, 32)]
        for layer in self.decoder.layers:
            with self.whole_layer(layer):
                sample += [_sample(weight, 2) for weight in layer.parameters()]
        return [round(value, 8) for value in torch.cat(sample).tolist()]

    def _make_head(self) -> Head:
        head = self.model.get_output_embeddings()
        scale = float(getattr(self.config, "logit_scale", None) or 1.0)
        scale /= float(getattr(self.config, "logits_scaling", None) or 1.0)
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return Head(head.weight, getattr(head, "bias", None), scale, softcap)

    @torch.no_grad()
    def _prove(self) -> None:
        """Compares embedding, logits, the last layer and passes in two pieces with the model's own forward."""
        tokens = (torch.arange(6, device=self.device) * 31 + 5)[None] % self.vocab_size
        layers, seen = self.decoder.layers, {}

        def keep(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            inputs = args[0] if args else kwargs["hidden_states"]
            seen[layer] = inputs, output[0] if isinstance(output, tuple) else output

        hooks = [layer.register_forward_hook(keep, with_kwargs=True) for layer in {layers[0], layers[-1]}]
        try:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        context = Packed(torch.zeros_like(tokens))
        packed = self.forward(tokens, context, target_hidden="post_norm")
        last_inputs, last_outputs = seen[layers[-1]]
        block = self.run_block(layers[-1], last_inputs, context, context.rows, index=1)
        tables = [CellTable(1) for _ in self.layer_types]
        module_tables = [CellTable(1)]
        finals, blocks = [], []
        for rows in context.rows.split(4, dim=1):
            end = int(rows.max()) + 1
            cells, module_cells = (Cells(each, rows, slice(0, 1), end) for each in (tables, module_tables))
            finals.append(self.forward(tokens.gather(1, rows), cells, target_hidden="post_norm").final)
            inputs = last_inputs.gather(1, rows[..., None].expand(-1, -1, last_inputs.shape[-1]))
            blocks.append(self.run_block(layers[-1], inputs, module_cells, rows, index=1))
        in_pieces = "in two pieces (its cache cannot be addressed by row)"
        checks = {
            "the embedding (its scale)": (self.embed(tokens), seen[layers[0]][0]),
            "the logits (scale or soft-cap of the head)": (self.head(packed.final), logits),
            "the last layer alone (what modules are made of)": (block, last_outputs),
            f"a prefill {in_pieces}": (torch.cat(finals, 1), packed.final),
            f"the last layer {in_pieces}": (torch.cat(blocks, 1), block),
        }
        noise = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.1
        for what, (ours, theirs) in checks.items():
            scale = theirs.float().abs().max().clamp(min=1e-30)
            difference = float((ours.float() - theirs.float()).abs().max() / scale)
            if not difference <= noise:
                raise UserError(
                    f"target {self.name!r} ({type(self.model).__name__}) is not supported: {what} differs from the "
                    f"model's own forward by {difference:.1e}; please report the architecture"
                )


def _sample(weight: Tensor, count: int) -> Tensor:
    places = torch.arange(1, count + 1, device=weight.device) * (weight.numel() - 1) // (count + 1)
    return weight.detach().flatten()[places].float()


def refuse_incomplete(report: dict[str, Any], name: str) -> None:
    """Raises :class:`UserError` if weights of the target were made up because its files lack them."""
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"target {name!r}: tensor {missing[0]!r} is missing from its files ({len(missing)} in all); random weights "
            "would stand in for it"
        )
    for key, stored, expected in sorted(report["mismatched_keys"], key=lambda item: item[0]):
        raise UserError(
            f"target {name!r}: tensor {key!r} has shape {list(stored)} in its files, but its config.json makes it "
            f"{list(expected)}"
        )


def refuse_rope_by_length(config: Any, name: str) -> None:
    """Raises :class:`UserError` if the position embedding of a row changes as its text grows (longrope).

    Cells computed while the text was short would then differ from those of the training forward.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        known = each.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", config.max_position_embeddings
        )
        if each.get("rope_type") == "longrope" and config.max_position_embeddings > known:
            raise UserError(
                f"target {name!r}: its rotary embedding (longrope) changes all rows once a text is longer than {known} "
                f"tokens, so cells cannot be kept; to use it within {known} tokens, set max_position_embeddings to "
                f"{known} in its config.json"
            )


def load_model(name: str, dtype: str) -> Any:
    """Loads a causal LM of transformers into host memory; raises :class:`UserError` as :meth:`Target.load`."""
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # whatever a library makes of a damaged folder
        raise UserError(_load_message(name, error)) from None
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    refuse_recurrent(config.get_text_config(), architectures[0], name)
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below
        )
    except Exception as error:
        raise UserError(_load_message(name, error)) from None
    model, report = loaded
    refuse_incomplete(report, name)
    return model


def cache_argument(layer: nn.Module, *, default: str) -> str:
    """Returns what a layer or decoder calls its cache (transformers renamed it within our range of versions)."""
    known = inspect.signature(layer.forward).parameters
    return next((name for name in ("cache", "past_key_values", "layer_past") if name in known), default)


def refuse_recurrent(config: Any, architecture: Any, name: str) -> None:
    """Raises :class:`UserError` if the target keeps recurrent state, whose slots cannot be overwritten."""
    cls = getattr(transformers, architecture, None) if isinstance(architecture, str) else architecture
    try:
        kinds = set(get_layer_types_and_kwargs(config)[0])
    except (AttributeError, KeyError, TypeError):
        kinds = {"unknown"}
    if getattr(cls, "_is_stateful", False):
        kinds.add("recurrent state")
    if not (unsupported := sorted(kinds - SUPPORTED_LAYERS)):
        return
    why = "their keys and values cannot be addressed by row yet"
    if any("attention" not in kind or kind == "linear_attention" for kind in unsupported):
        why = (
            "their state is a running summary that cannot be overwritten row by row when drafts are rejected, so "
            "module and target caches could not be corrected"
        )
    raise UserError(
        f"target {name!r} has layers of kind {', '.join(unsupported)}: {why}; only full and sliding-window attention "
        "targets are supported"
    )


def _load_message(name: str, error: Exception) -> str:
    why = one_line(error)
    if not os.path.exists(name):
        folder = os.path.abspath(name)
        why = f"no such folder as {folder}" + ("" if name.startswith(("/", ".", "~")) else f"; as a hub name: {why}")
    return (
        f"target {name!r} could not be loaded: {why} (expected a folder written by save_pretrained, with "
        "config.json and safetensors, or the name of a hub model; remote code is never run)"
    )

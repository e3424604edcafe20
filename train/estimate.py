"""What a run will take, from the target's config alone: weights, memory of a rank by part, disk, tokens, steps.

``python -m train --config FILE --dry-run --ranks N`` prints it; no weight is read. Bytes are those of the tensors
that stay between steps, by deepspeed's own layout (fp32 copies and Adam's two moments), and of what is gathered
around them; activations come on top, with micro_rows and row_length.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from mtp import UserError
from mtp.errors import one_line
from mtp.target import FINAL_NORMS, refuse_recurrent
from train.config import Config, accumulation, read_deepspeed
from train.data import read_rows

BYTES = {"float32": 4, "bfloat16": 2}
BUCKET, MAX_LIVE = 500_000_000, 1_000_000_000  # deepspeed's defaults: reduce_bucket_size, stage3_max_live_parameters


@dataclass
class TargetShape:
    """Numbers of weights of a target, and what else data and modules ask of it."""

    name: str
    architecture: str
    weights: int
    layers: list[int]
    ends: int  # embedding and head, once if they are tied
    norm: int
    hidden_size: int
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def module(self) -> int:
        """Returns the weights of one module: a layer, the projection of embedding and hidden state, three norms."""
        return self.layers[-1] + 2 * self.hidden_size**2 + 3 * self.norm


@dataclass
class Estimate:
    """``parts`` are bytes of one rank, by name: on the device, and in host memory."""

    shape: TargetShape
    modules: int
    ranks: int
    stage: int
    tokens_per_step: int
    steps: str
    rows: int | None
    disk: dict[str, int]
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        return sum(device for device, _ in self.parts.values())

    def text(self, config: Config) -> str:
        """Returns the estimate as lines for people."""
        shape, count = self.shape, config.modules.num_modules
        lines = [
            f"target    {shape.architecture}: {_count(shape.weights)} weights, {len(shape.layers)} layers, the last of "
            f"{_count(shape.layers[-1])}, embedding and head {_count(shape.ends)}",
            f"modules   {count} of {_count(shape.module)}: {_count(self.modules)} weights to train",
            f"step      {self.tokens_per_step:,} tokens at most ({config.steps.rows_per_step} rows of "
            f"{config.data.row_length}), each rank {accumulation(config, self.ranks)} x {config.steps.micro_rows} rows",
            f"steps     {self.steps}",
            f"memory    of each of {self.ranks} ranks, ZeRO stage {self.stage}, {config.dtype}, in GB (10^9 bytes); "
            "activations come on top",
        ]
        lines += [f"  {name:<38} {_gb(device)} device {_gb(host)} host" for name, (device, host) in self.parts.items()]
        host = sum(host for _, host in self.parts.values())
        lines += [f"  {'sum':<38} {_gb(self.device_bytes)} device {_gb(host)} host", "disk      GB"]
        lines += [f"  {name:<38} {_gb(size)}" for name, size in self.disk.items()]
        return "\n".join(lines)


def estimate(config: Config, ranks: int) -> Estimate:
    """Returns what the run takes on this many ranks.

    Raises:
        UserError: the target's config cannot be had, or the settings contradict each other.
    """
    accumulation(config, ranks)
    shape = read_shape(config.target, config.dtype)
    zero = read_deepspeed(config.deepspeed).get("zero_optimization") or {}
    stage, width = int(zero.get("stage", 0)), BYTES[config.dtype]
    modules = config.modules.num_modules * shape.module
    optimizer = modules * (8 if stage == 0 and config.dtype == "float32" else 12)
    rows, steps = _steps(config, shape)
    off = {key: (zero.get(f"offload_{key}") or {}).get("device", "none") != "none" for key in ("optimizer", "param")}
    partitioned = stage == 3 and ranks > 1

    def part(size: int, shared_from: int) -> int:
        return -(-size // ranks) if stage >= shared_from else size

    rest = shape.weights - sum(shape.layers) - shape.ends
    cut = (sum(shape.layers) + shape.ends) * width
    parts = {
        "target": _at(-(-cut // ranks) if partitioned else cut, off["param"] and partitioned, always=rest * width),
        "modules' weights": _at(part(modules * width, 3), off["param"] and stage == 3),
        "gradients": _at(part(modules * width, 2), off["optimizer"] and stage >= 2),
        "optimizer": _at(part(optimizer, 1), off["optimizer"] and stage >= 1),
    }
    if partitioned:
        parts["target's largest layer and ends, whole"] = ((max(shape.layers) + shape.ends) * width, 0)
    if stage == 3:
        live = min(modules, max(shape.module, _setting(zero, "stage3_max_live_parameters", MAX_LIVE)))
        parts["modules' weights, whole while they run"] = (live * width, 0)
    if stage:
        parts["gradients being reduced"] = (_setting(zero, "reduce_bucket_size", BUCKET) * width, 0)
    if config.data.keep_hidden and rows:
        points = 1 if config.modules.target_hidden == "post_norm" else 2
        a_token = points * shape.hidden_size * width + 4
        parts["kept hidden states"] = (0, -(-rows // ranks) * config.data.row_length * a_token)
    state, kept = modules * width + optimizer, config.keep_checkpoints
    disk = {
        "modules of one checkpoint": modules * width,
        "state to resume from": state,
        f"in all, keep_checkpoints = {kept}": (kept + 1) * state + (kept + 3) * modules * width,
    }
    return Estimate(
        shape,
        modules,
        ranks,
        stage,
        config.steps.rows_per_step * config.data.row_length,
        steps,
        rows,
        disk,
        parts,
    )


def read_shape(name: str, dtype: str = "float32") -> TargetShape:
    """Returns a target's numbers from its config; the model is built without weights.

    Raises:
        UserError: no config there (and none to be fetched), or an unsupported architecture.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a library makes of a missing network or a damaged folder
        raise UserError(
            f"target {name!r}: its config cannot be had ({one_line(error)[:200]}); without a connection to the hub a "
            "dry run needs a local folder with config.json: target=FOLDER"
        ) from None
    text = config.get_text_config()
    refuse_recurrent(text, type(model), name)
    decoder, sizes = model.get_decoder(), {id(each): each.numel() for each in model.parameters()}
    norms = [getattr(decoder, each) for each in FINAL_NORMS if isinstance(getattr(decoder, each, None), nn.Module)]
    if not norms or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UserError(f"target {name!r}: {type(decoder).__name__} has no 'layers' with a final norm; not supported")
    ends = {
        id(each) for end in (model.get_input_embeddings(), model.get_output_embeddings()) for each in end.parameters()
    }
    eos = text.eos_token_id
    return TargetShape(
        name,
        type(model).__name__,
        sum(sizes.values()),
        [sum(each.numel() for each in layer.parameters()) for layer in decoder.layers],
        sum(sizes[end] for end in ends),
        sum(each.numel() for each in norms[0].parameters()),
        text.hidden_size,
        text.vocab_size,
        int(text.max_position_embeddings),
        tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
    )


def _steps(config: Config, shape: TargetShape) -> tuple[int | None, str]:
    """Returns the packed rows if the text is there, and the number of steps in words."""
    limits, rows, why = config.steps, None, ""
    try:
        rows = len(read_rows(config, SimpleNamespace(**vars(shape)), write_cache=False)[0])  # type: ignore[arg-type]
    except UserError as error:
        why = str(error)
    per_epoch = -(-rows // limits.rows_per_step) if rows else None
    by_epochs = limits.epochs and per_epoch and limits.epochs * per_epoch
    known = [each for each in (limits.max_steps, by_epochs) if each]
    said = f"{min(known):,}" if known else "not known"
    if limits.max_minutes:
        said += f", or as many as fit into {limits.max_minutes:g} minutes"
    if limits.epochs and not rows:
        said += f"; {limits.epochs} epochs cannot be counted: {why}"
    return rows, said + (f" ({rows:,} packed rows, {per_epoch:,} steps an epoch)" if per_epoch else "")


def _setting(zero: dict[str, Any], key: str, default: int) -> int:
    return default if zero.get(key, "auto") == "auto" else int(zero[key])


def _at(size: int, on_host: bool, *, always: int = 0) -> tuple[int, int]:
    """Returns bytes on the device and on the host; ``always`` ones are on the device."""
    return (always, size) if on_host else (always + size, 0)


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _gb(size: int) -> str:
    return f"{size / 1e9:9.3f}"

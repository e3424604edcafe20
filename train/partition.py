"""The frozen target in parts: under ZeRO stage 3 every rank keeps 1/N of it and gathers a layer while it runs.

The target has no gradients and no optimizer state, so nothing of deepspeed's stage 3 is needed for it: a unit (a
decoder layer, or embedding and head together) is one flat tensor cut into N equal parts. Rank 0 reads the weights
from disk, the others make the model without weights; they are sent a unit at a time. Norms, buffers and whatever
else stands outside of layers and ends stay whole on every rank.

A gather is a collective: all ranks run the target equally often (``Target.any_rank``).
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn

from mtp import Target, UserError
from mtp.target import DTYPES, load_model
from train.config import Config, read_deepspeed

ALIGNED = 64  # elements; where a tensor may begin in its unit, so that kernels read it as if it were alone
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class Unit:
    """Weights that are whole together, in this rank's part otherwise (every parameter is then empty)."""

    def __init__(self, parameters: list[nn.Parameter], values: list[Tensor], store: torch.device) -> None:
        """Cuts a unit; every rank must call it.

        Args:
            parameters: new and empty ones, of one dtype, on the device to run on.
            values: their weights on rank 0, anything of equal shape elsewhere.
            store: where this rank's part lies.
        """
        ranks, rank = dist.get_world_size(), dist.get_rank()
        sizes = [-(-value.numel() // ALIGNED) * ALIGNED for value in values]
        starts = [0, *itertools.accumulate(sizes)]
        self._places = [
            (parameter, start, value.shape) for parameter, start, value in zip(parameters, starts, values, strict=False)
        ]
        share = -(-starts[-1] // ranks)
        whole = parameters[0].new_zeros(share * ranks)
        if rank == 0:
            for (_, start, shape), value in zip(self._places, values, strict=True):
                whole[start : start + shape.numel()] = value.to(whole.device).flatten()
        dist.broadcast(whole, 0)
        self.part = whole[rank * share :][:share].to(store, copy=True)
        self._holders = 0

    @torch.no_grad()
    def open(self) -> None:
        """Makes the weights whole, until as many calls of :meth:`close`; every rank must call it."""
        self._holders += 1
        if self._holders > 1:
            return
        device = self._places[0][0].device
        whole = self.part.new_empty(len(self.part) * dist.get_world_size(), device=device)
        all_gather(whole, self.part.to(device))
        for parameter, start, shape in self._places:
            parameter.data = whole[start : start + shape.numel()].view(shape)

    def close(self) -> None:
        """Lets go of the other ranks' parts."""
        self._holders -= 1
        if not self._holders:
            for parameter, _, _ in self._places:
                parameter.data = parameter.new_empty(0)


class Units(list[Unit]):
    """The units of one layer or of the ends, one for each dtype."""

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Holds the weights whole; every rank must enter it."""
        self.open()
        try:
            yield
        finally:
            self.close()

    def open(self) -> None:
        for unit in self:
            unit.open()

    def close(self) -> None:
        for unit in self:
            unit.close()

    def hook(self, layer: nn.Module) -> list[Any]:
        """Makes the layer's weights whole for as long as its forward runs; returns the hooks' handles."""
        return [
            layer.register_forward_pre_hook(lambda *_: self.open()),
            layer.register_forward_hook(lambda *_: self.close(), always_call=True),
        ]


class PartitionedTarget(Target):
    """A target of which this rank holds a part; embedding and head are used inside of :meth:`whole_ends`."""

    def __init__(self, model: Any, name: str, device: torch.device, store: torch.device) -> None:
        """Cuts a model, whose weights only rank 0 needs, and proves it as any target; every rank must call it.

        Raises:
            UserError: the architecture is not supported.
        """
        layers = getattr(model.get_decoder(), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise UserError(f"target {name!r}: its decoder has no 'layers' to partition; use ZeRO stage 0, 1 or 2")
        self._layers, self._ends = _cut(model, layers, device, store)
        self._hooks = {layer: units.hook(layer) for layer, units in self._layers.items()}
        with self.whole_ends():
            super().__init__(model, name)
            self._fingerprint = super().fingerprint()

    def whole_ends(self) -> contextlib.AbstractContextManager[None]:
        return self._ends.whole()

    def whole_layer(self, layer: nn.Module) -> contextlib.AbstractContextManager[None]:
        return self._layers[layer].whole()

    def any_rank(self, flag: bool) -> bool:
        flags = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def new_block(self) -> nn.Module:
        last = self.decoder.layers[-1]
        for hook in self._hooks.pop(last):
            hook.remove()  # a copy of the layer is a module of its own
        with self._layers[last].whole():
            block = super().new_block()
        self._hooks[last] = self._layers[last].hook(last)
        return block

    def fingerprint(self) -> list[float]:
        return self._fingerprint

    def held(self) -> int:
        """Returns how many parameters this rank holds between forwards."""
        units = itertools.chain(self._ends, *self._layers.values())
        return sum(len(unit.part) for unit in units) + sum(each.numel() for each in self.model.parameters())


def load_target(config: Config, device: torch.device) -> Target:
    """Returns the run's target: whole on every rank, or under ZeRO stage 3 on several ranks in parts.

    Parts lie in host memory if the deepspeed settings offload parameters.

    Raises:
        UserError: it cannot be loaded, or is not supported.
    """
    zero = read_deepspeed(config.deepspeed).get("zero_optimization") or {}
    if zero.get("stage") != 3 or dist.get_world_size() == 1:
        return Target.load(config.target, dtype=config.dtype, device=device)
    offloaded = (zero.get("offload_param") or {}).get("device", "none") != "none"
    model, error = None, None
    try:
        if dist.get_rank() == 0:
            model = load_model(config.target, config.dtype)
        else:
            hull = transformers.AutoConfig.from_pretrained(config.target, trust_remote_code=False)
            with init_empty_weights(include_buffers=False):
                model = transformers.AutoModelForCausalLM.from_config(hull, dtype=DTYPES[config.dtype])
            model.tie_weights()
    except Exception as caught:  # every rank must know before it waits for weights
        error = caught
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, error and str(error))
    if error is not None:
        raise error
    if failed := [failure for failure in failures if failure]:
        raise UserError(failed[0])
    return PartitionedTarget(model, config.target, device, torch.device("cpu") if offloaded else device)


def _cut(
    model: Any, layers: nn.ModuleList, device: torch.device, store: torch.device
) -> tuple[dict[nn.Module, Units], Units]:
    """Replaces every parameter of the model; returns the units of each layer and of the ends."""
    named = dict(model.named_parameters())
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
        dist.broadcast(buffer.data, 0)
    rank0: list[Any] = [{name: weight.dtype for name, weight in named.items()}, model.generation_config]
    dist.broadcast_object_list(rank0, 0)
    dtypes, model.generation_config = rank0
    assert dtypes.keys() == named.keys(), "the model without weights is built otherwise than the loaded one"
    fresh = {
        weight: nn.Parameter(torch.empty(0, dtype=dtypes[name], device=device), requires_grad=False)
        for name, weight in named.items()
    }
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, fresh[weight])

    def units(weights: list[nn.Parameter]) -> Units:
        kinds = dict.fromkeys(fresh[weight].dtype for weight in weights)
        groups = [[weight for weight in weights if fresh[weight].dtype == kind] for kind in kinds]
        return Units(Unit([fresh[weight] for weight in group], list(group), store) for group in groups)

    prefixes = {module: f"{name}." for name, module in model.named_modules()}
    owned = [[weight for name, weight in named.items() if name.startswith(prefixes[layer])] for layer in layers]
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    new = {id(parameter) for end in ends for parameter in end.parameters()}
    at_ends = [weight for weight in named.values() if id(fresh[weight]) in new]
    cut = {id(weight) for weight in itertools.chain(at_ends, *owned)}
    by_layer = {layer: units(weights) for layer, weights in zip(layers, owned, strict=True)}
    ends_units = units(at_ends)
    for weight in named.values():
        if id(weight) not in cut:
            whole = fresh[weight].new_empty(weight.shape)
            if dist.get_rank() == 0:
                whole.copy_(weight.data)
            dist.broadcast(whole, 0)
            fresh[weight].data = whole
    return by_layer, ends_units

"""What the modules start from: the target's last layer, random weights, or the modules of a checkpoint."""

import dataclasses
from pathlib import Path
from typing import cast

import torch

from mtp import Contract, MTPStack, Target, UserError
from mtp.checkpoint import load_checkpoint
from mtp.modules import MTPModule
from train.config import Init

FREE_FIELDS = ("num_modules", "draft_steps", "draft_vocab")  # no weight of a module depends on them


def new_stack(contract: Contract, target: Target, options: Init) -> MTPStack:
    """Returns modules on their target, ready to train; frozen ones require no gradient.

    Raises:
        UserError: the checkpoint is damaged, for another target, or wired otherwise (the field is named).
    """
    stack = MTPStack(contract, target)
    if options.checkpoint:
        _grow(stack, Path(options.checkpoint), freeze=options.freeze)
    elif options.block == "random":
        for module in stack.layers:
            cast(MTPModule, module).mtp_block.apply(target.initialise)
    return stack


@torch.no_grad()
def _grow(stack: MTPStack, folder: Path, *, freeze: bool) -> None:
    """Copies the checkpoint's modules to the first ones and its last one to the rest."""
    earlier = load_checkpoint(folder, stack.target)
    _check_fits(folder, earlier.contract, stack.contract)
    for place, module in enumerate(stack.layers):
        last = len(earlier.layers) - 1
        module.load_state_dict(earlier.layers[min(place, last)].state_dict())
        if freeze and place <= last:
            module.requires_grad_(False)
    if freeze and len(earlier.layers) == len(stack.layers):
        raise UserError(
            f"init.freeze: {folder} has {len(earlier.layers)} modules already, so none would be trained; raise "
            "modules.num_modules, or leave init.freeze out"
        )


def _check_fits(folder: Path, theirs: Contract, ours: Contract) -> None:
    for field in dataclasses.fields(Contract):
        before, now = getattr(theirs, field.name), getattr(ours, field.name)
        if field.name not in FREE_FIELDS and before != now:
            raise UserError(
                f"init.checkpoint {folder}: its modules have {field.name} = {before!r}, this run has "
                f"modules.{field.name} = {now!r}; set modules.{field.name}: {before}"
            )
    if theirs.num_modules > ours.num_modules:
        raise UserError(
            f"init.checkpoint {folder}: it has num_modules = {theirs.num_modules}, more than this run's "
            f"modules.num_modules = {ours.num_modules}; raise that"
        )

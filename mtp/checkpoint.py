"""Modules on disk: safetensors + contract + provenance, written at once or not at all, read strictly.

A checkpoint folder holds ``modules.safetensors``, ``contract.json`` and ``provenance.json``
(target name, fingerprint, shape; versions; steps). It never holds weights of the target.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from mtp.contract import Contract, read_json_object
from mtp.errors import UserError
from mtp.files import sync
from mtp.modules import MTPStack
from mtp.target import Target

WEIGHTS, CONTRACT, PROVENANCE = "modules.safetensors", "contract.json", "provenance.json"
FINGERPRINT_NOISE = 0.01  # relative, of each weight: more than the rounding of bfloat16 (2^-8)


def target_provenance(target: Target) -> dict[str, Any]:
    """Returns what identifies a target: name, architecture, shape, a sample of its weights."""
    return {
        "name": os.path.abspath(target.name) if os.path.isdir(target.name) else target.name,
        "architecture": type(target.model).__name__,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_layers": len(target.layer_types),
        "fingerprint": target.fingerprint(),
    }


def save_checkpoint(
    folder: Path, contract: Contract, weights: dict[str, Tensor], target: Target, training: dict[str, Any]
) -> None:
    """Writes a complete checkpoint folder; a crash or a full disk leaves no half of one under its name.

    Args:
        weights: the stack's state dict, full shapes.
        training: provenance of the run (steps, tokens, data, config), JSON values.

    Raises:
        UserError: a tensor is empty (an uncollected ZeRO-3 partition), or the disk refused.
    """
    if empty := [name for name, tensor in weights.items() if tensor.numel() == 0]:
        raise UserError(f"{folder}: tensor {empty[0]!r} is empty, the partitions were not collected; nothing written")
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        safetensors.torch.save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        contract.save(partial / CONTRACT)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        provenance = {"target": target_provenance(target), "versions": versions, "training": training}
        (partial / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
        sync(partial)
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)  # a folder cannot be replaced at once; a crash here loses neither
        os.replace(partial, folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{folder}: checkpoint could not be written ({error}); earlier checkpoints are intact"
        ) from error


def read_provenance(folder: Path) -> dict[str, Any]:
    """Returns the provenance of a checkpoint; raises :class:`UserError` if there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such checkpoint folder")
    return read_json_object(folder / PROVENANCE)


def target_of(folder: Path) -> str:
    """Returns the name of the target a checkpoint was made for; raises :class:`UserError` if it has none."""
    return _made_for(folder, read_provenance(folder))["name"]


def _made_for(folder: Path, provenance: dict[str, Any]) -> dict[str, Any]:
    target = provenance.get("target")
    kinds = {"name": str, "architecture": str, "hidden_size": int, "vocab_size": int, "num_layers": int}
    if not isinstance(target, dict):
        raise UserError(f"{folder / PROVENANCE}: field 'target' is missing; the checkpoint is damaged")
    for field, kind in kinds.items():
        if not isinstance(target.get(field), kind):
            raise UserError(f"{folder / PROVENANCE}: field 'target.{field}' is missing; the checkpoint is damaged")
    weights = target.get("fingerprint")
    if not isinstance(weights, list) or not all(isinstance(value, float) for value in weights):
        raise UserError(f"{folder / PROVENANCE}: field 'target.fingerprint' is missing; the checkpoint is damaged")
    return target


def load_checkpoint(folder: Path, target: Target) -> MTPStack:
    """Returns the modules of a checkpoint on their target, ready to decode (frozen, in the target's dtype).

    Raises:
        UserError: made for another target, or a tensor is missing, extra or misshapen (named).
    """
    provenance = read_provenance(folder)
    check_target(folder, provenance, target)
    contract, weights = Contract.load(folder / CONTRACT), read_weights(folder)
    count = contract.num_modules
    if (last := f"layers.{count - 1}.eh_proj.weight") not in weights:  # seen before modules are made
        raise UserError(f"{folder / WEIGHTS}: tensor {last!r} is missing, and {CONTRACT} has {count} module(s)")
    stack = MTPStack(contract, target)
    copy_weights(folder / WEIGHTS, weights, stack)
    return stack.eval().requires_grad_(False)


def check_target(folder: Path, provenance: dict[str, Any], target: Target) -> None:
    """Raises :class:`UserError` unless the checkpoint's modules were trained on this target."""
    made_for, given = _made_for(folder, provenance), target_provenance(target)
    for field in ("architecture", "hidden_size", "vocab_size", "num_layers"):
        if made_for[field] != given[field]:
            raise UserError(
                f"{folder}: made for target {made_for['name']!r} with {field} {made_for[field]}, but target "
                f"{target.name!r} has {given[field]}; give the target it was trained on"
            )
    ours, theirs = torch.tensor(given["fingerprint"]), torch.tensor(made_for["fingerprint"])
    if ours.shape != theirs.shape or ((ours - theirs).abs() > FINGERPRINT_NOISE * theirs.abs() + 1e-7).any():
        raise UserError(
            f"{folder}: made for target {made_for['name']!r}; target {target.name!r} has the same shape but other "
            "weights; give the target it was trained on"
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns a checkpoint's tensors; raises :class:`UserError` if the file is missing or broken."""
    path = folder / WEIGHTS
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the checkpoint is incomplete") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: broken file ({error})") from None


def copy_weights(path: Path, weights: dict[str, Tensor], stack: MTPStack) -> None:
    """Copies a checkpoint's tensors into the stack, strict both ways.

    Raises:
        UserError: a tensor is missing, extra, misshapen or not made of finite numbers (named).
    """
    expected = stack.state_dict()
    if missing := sorted(expected.keys() - weights.keys()):
        raise UserError(f"{path}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    if extra := sorted(weights.keys() - expected.keys()):
        raise UserError(f"{path}: tensor {extra[0]!r} is not part of these modules ({len(extra)} in all)")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise UserError(
                f"{path}: tensor {name!r} has shape {list(weights[name].shape)}, expected {list(tensor.shape)}"
            )
        if not weights[name].is_floating_point() or not weights[name].isfinite().all():
            raise UserError(f"{path}: tensor {name!r} does not hold finite floating-point numbers")
    stack.load_state_dict(weights)

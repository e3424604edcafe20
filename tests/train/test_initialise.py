"""What modules start from: the target's last layer, random weights, a checkpoint with as many modules or fewer."""

from pathlib import Path

import pytest
import torch

from mtp import Contract, UserError
from mtp.checkpoint import save_checkpoint
from tests.builders import FAMILIES, make_stack, make_target
from train.config import Init
from train.engine import parameter_groups
from train.initialise import new_stack
from train.objective import Objective


def saved(folder, target, k, **contract):
    stack = make_stack(target, k, **contract)
    save_checkpoint(folder / "modules", stack.contract, stack.state_dict(), target, {})
    return stack, Init(checkpoint=str(folder / "modules"))


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_the_default_is_the_targets_last_layer():
    target = make_target()
    stack = new_stack(Contract.for_new_modules(2), target, Init())
    for module in stack.layers:
        assert torch.equal(weights(module.mtp_block), weights(target.decoder.layers[-1]))
    assert all(parameter.requires_grad for parameter in stack.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_random_blocks_are_drawn_anew_and_the_target_is_left_alone(family):
    target = make_target(family)
    last = weights(target.decoder.layers[-1])
    stack = new_stack(Contract.for_new_modules(2), target, Init(block="random"))
    copied = dict(target.decoder.layers[-1].named_parameters())
    for module in stack.layers:
        for name, parameter in module.mtp_block.named_parameters():
            assert not torch.equal(parameter, copied[name]), name
            assert parameter.std() < 0.05 if parameter.dim() > 1 else True, name
    assert not torch.equal(weights(stack.layers[0]), weights(stack.layers[1]))
    assert torch.equal(last, weights(target.decoder.layers[-1]))


@pytest.mark.parametrize("freeze", [False, True])
def test_new_modules_are_copies_of_the_last_one_of_the_checkpoint(tmp_path, freeze):
    target = make_target()
    earlier, init = saved(tmp_path, target, 2, draft_vocab=(1, 2, 3))
    stack = new_stack(Contract.for_new_modules(4), target, init.model_copy(update={"freeze": freeze}))
    for module, origin in zip(stack.layers, (0, 1, 1, 1), strict=True):
        assert torch.equal(weights(module), weights(earlier.layers[origin]))
    trained = [all(parameter.requires_grad for parameter in module.parameters()) for module in stack.layers]
    assert trained == ([False, False, True, True] if freeze else [True] * 4)
    assert stack.contract.draft_vocab is None
    assert weights(stack.layers[2]).data_ptr() != weights(stack.layers[3]).data_ptr()


def test_frozen_modules_are_in_no_optimizer_group(tmp_path):
    target = make_target()
    _, init = saved(tmp_path, target, 1)
    stack = new_stack(Contract.for_new_modules(3), target, init.model_copy(update={"freeze": True}))
    grouped = {id(p) for group in parameter_groups(Objective(stack, 4), 0.01) for p in group["params"]}
    assert grouped == {id(p) for module in list(stack.layers)[1:] for p in module.parameters()}


def test_as_many_modules_go_on_training(tmp_path):
    target = make_target()
    earlier, init = saved(tmp_path, target, 2)
    assert torch.equal(weights(new_stack(Contract.for_new_modules(2), target, init)), weights(earlier))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"recurrence": "target_fed"}, {}),
        ({"target_hidden": "pre_norm"}, {}),
        ({"chain_hidden": "pre_norm"}, {}),
        ({"concat": "hidden_first"}, {}),
        ({}, {"positions": "token"}),
        ({}, {"mask_first_embedding": True}),
    ],
)
def test_a_checkpoint_wired_otherwise_is_refused_by_field(tmp_path, theirs, ours):
    target = make_target()
    _, init = saved(tmp_path, target, 2, **theirs)
    (field,) = {**theirs, **ours}
    with pytest.raises(UserError, match=rf"init\.checkpoint .*modules.*modules\.{field}"):
        new_stack(Contract.for_new_modules(3, **ours), target, init)


def test_what_else_does_not_fit_is_said(tmp_path):
    target = make_target()
    _, init = saved(tmp_path, target, 2)
    with pytest.raises(UserError, match=r"num_modules = 2, more than this run's modules.num_modules = 1"):
        new_stack(Contract.for_new_modules(1), target, init)
    with pytest.raises(UserError, match=r"init\.freeze.*none would be trained"):
        new_stack(Contract.for_new_modules(2), target, init.model_copy(update={"freeze": True}))
    with pytest.raises(UserError, match="other weights"):
        new_stack(Contract.for_new_modules(3), make_target(seed=1), init)
    with pytest.raises(UserError, match="nowhere"):
        new_stack(Contract.for_new_modules(3), target, Init(checkpoint=str(Path("nowhere"))))

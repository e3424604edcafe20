"""What is saved: strict both ways, written at once or not at all."""

import json
import shutil

import pytest
import safetensors.torch
import torch

import mtp.checkpoint
from mtp import Contract, UserError
from mtp.checkpoint import load_checkpoint, save_checkpoint
from tests.builders import assert_equal, exact, make_stack, make_target, one_document, random_tokens, unroll


def test_contract_round_trip(tmp_path):
    contract = Contract.for_new_modules(2, recurrence="target_fed", draft_vocab=(1, 5, 9), positions="token")
    contract.save(tmp_path / "contract.json")
    assert Contract.load(tmp_path / "contract.json") == contract


@pytest.mark.parametrize("field", ["recurrence", "num_modules", "target_hidden", "positions", "draft_vocab", "concat"])
def test_a_contract_with_a_missing_field_is_refused_by_name(tmp_path, field):
    path = tmp_path / "contract.json"
    Contract.for_new_modules(2).save(path)
    fields = json.loads(path.read_text())
    del fields[field]
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=field):
        Contract.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft_steps", 3),
        ("draft_steps", 0),
        ("recurrence", "eagle"),
        ("num_modules", 0),
        ("num_modules", True),
        ("concat", "both"),
        ("mask_first_embedding", 1),
        ("draft_vocab", (3, 2)),
        ("draft_vocab", ()),
        ("new_field", 1),
    ],
)
def test_a_contract_with_a_bad_field_is_refused_by_name(tmp_path, field, value):
    path = tmp_path / "contract.json"
    Contract.for_new_modules(2).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=field):
        Contract.load(path)


def test_checkpoint_round_trip_gives_the_same_outputs(tmp_path):
    target = make_target("llama_tied")
    stack = make_stack(target, 3, draft_vocab=tuple(range(0, 61, 2)))
    save_checkpoint(tmp_path / "final", stack.contract, stack.state_dict(), target, {"step": 7})
    loaded = load_checkpoint(tmp_path / "final", target)
    assert loaded.contract == stack.contract
    tokens = random_tokens(1, 9)
    with exact():
        ours, theirs = unroll(loaded, tokens, one_document(tokens)), unroll(stack, tokens, one_document(tokens))
    for index in (1, 2, 3):
        assert torch.equal(ours[index].final, theirs[index].final)
    names = safetensors.torch.load_file(tmp_path / "final" / "modules.safetensors")
    assert not [name for name in names if "embed" in name or "lm_head" in name]


def test_a_failing_save_leaves_the_last_complete_checkpoint(tmp_path, monkeypatch):
    target = make_target()
    stack = make_stack(target, 2)
    folder = tmp_path / "final"
    save_checkpoint(folder, stack.contract, stack.state_dict(), target, {"step": 1})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mtp.checkpoint.safetensors.torch, "save_file", full_disk)
    with pytest.raises(UserError, match="No space left"):
        save_checkpoint(folder, stack.contract, stack.state_dict(), target, {"step": 2})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_an_uncollected_partition_is_never_saved(tmp_path):
    """DeepSpeed#2413: ZeRO-3 saves zero-size tensors."""
    target = make_target()
    stack = make_stack(target, 1)
    weights = stack.state_dict() | {"layers.0.eh_proj.weight": torch.empty(0)}
    with pytest.raises(UserError, match=r"layers\.0\.eh_proj\.weight"):
        save_checkpoint(tmp_path / "final", stack.contract, weights, target, {})
    assert not (tmp_path / "final").exists()


def test_another_target_is_refused_whether_its_shape_differs_or_not(tmp_path):
    target = make_target()
    stack = make_stack(target, 1)
    save_checkpoint(tmp_path / "final", stack.contract, stack.state_dict(), target, {})
    for other, reason in ((make_target(seed=1), "other weights"), (make_target("qwen2"), "architecture")):
        with pytest.raises(UserError, match=reason):
            load_checkpoint(tmp_path / "final", other)
    for changed in ("decoder.layers.0.mlp.down_proj", "decoder.layers.2.self_attn.q_proj", "head"):
        tuned = make_target()
        weight = tuned.head.weight if changed == "head" else tuned.model.get_submodule("model" + changed[7:]).weight
        with torch.no_grad():
            weight.mul_(1.02)
        with pytest.raises(UserError, match="other weights"):  # same embedding: a fine-tuned descendant
            load_checkpoint(tmp_path / "final", tuned)
    half = make_target(dtype=torch.bfloat16)
    assert load_checkpoint(tmp_path / "final", half).layers[0].eh_proj.weight.dtype == torch.bfloat16


def test_a_truncated_file_is_named(tmp_path):
    target = make_target()
    stack = make_stack(target, 1)
    save_checkpoint(tmp_path / "a", stack.contract, stack.state_dict(), target, {})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b" / "modules.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"modules\.safetensors"):
        load_checkpoint(tmp_path / "b", target)
    assert_equal(load_checkpoint(tmp_path / "a", target).layers[0].eh_proj.weight, stack.layers[0].eh_proj.weight)


def test_a_recursive_contract_has_one_module_and_any_number_of_steps(tmp_path):
    contract = Contract.for_new_modules(4, recurrence="recursive")
    assert (contract.num_modules, contract.draft_steps) == (1, 4)
    contract.save(tmp_path / "contract.json")
    assert Contract.load(tmp_path / "contract.json") == contract
    with pytest.raises(UserError, match="num_modules"):
        Contract.for_new_modules(4, recurrence="recursive", num_modules=4)

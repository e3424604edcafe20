"""The chunked loss against full logits in float64, and its invariances: packing, accumulation, short texts."""

import json

import pytest
import torch

from mtp import alignment
from mtp.cache import Packed
from mtp.precision import KeepFloat64
from tests.builders import VOCAB, make_stack, make_target
from train.config import load_config
from train.data import lay_out, read_rows
from train.objective import CELLS, CROSS_ENTROPY, DIVERGENCE, Objective, depth_weights, objective_inputs
from train.records import Record
from train.teacher import TeacherMemory, teach

K = 3
DRAFT_VOCAB = tuple(range(0, VOCAB, 2))


def make_records(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    records = []
    for n in lengths:
        tokens = torch.randint(0, VOCAB, (n,), generator=draw).tolist()
        records.append(Record(tokens, (torch.rand(n, generator=draw) < 0.7).tolist(), 1))
    return records


def make_objective(family="llama", *, chunk_rows=5, draft_vocab=DRAFT_VOCAB, **contract):
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, K, draft_vocab=draft_vocab, **contract).requires_grad_(True)
    return Objective(stack, chunk_rows)


def loss_and_gradients(objective, batches, *, scale=None):
    """Sums the micro batches as the engine does, and returns loss, statistics and gradients."""
    cells = sum(rows.supervised(K) for rows in batches)
    scales = torch.tensor(depth_weights(0.6, K), dtype=torch.float64) / cells.clamp(min=1)
    objective.zero_grad()
    loss, statistics = 0.0, 0.0
    with KeepFloat64():
        for rows in batches:
            teacher = teach(objective.stack.target, rows, target_hidden="post_norm", chunk_rows=3)
            part, figures = objective(*objective_inputs(rows, teacher), scales)
            part.backward()
            loss, statistics = loss + part.item(), statistics + figures
    return loss, statistics, {name: p.grad.clone() for name, p in objective.named_parameters()}


def plain(objective, rows):
    """The same loss by full logits and plain autograd, cell by cell as ALIGNMENT.md says."""
    stack, target = objective.stack, objective.stack.target
    objective.zero_grad()
    with KeepFloat64():
        hidden, final = target.forward(rows.tokens, Packed(rows.documents), target_hidden="post_norm")
        p = target.head(final).softmax(-1)
        if stack.contract.draft_vocab is not None:
            p = p[..., list(stack.contract.draft_vocab)]
        loss, weights = 0.0, depth_weights(0.6, K)
        for index, output in stack.unroll(hidden, rows.tokens, Packed(rows.documents)):
            cells = alignment.supervised_cells(rows.loss_mask, rows.documents, index=index)
            count = cells.shape[1]
            log_q = stack.head(output.final[:, :count]).log_softmax(-1)
            cross_entropy = -(p[:, index : index + count] * log_q).sum(-1)
            loss = loss + weights[index - 1] * (cross_entropy * cells).sum() / cells.sum().clamp(min=1)
        loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in objective.named_parameters()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_chunked_equals_full_logits(family, draft_vocab, chunk_rows):
    objective = make_objective(family, chunk_rows=chunk_rows, draft_vocab=draft_vocab)
    rows = lay_out([make_records(9, 4), make_records(12, seed=1), make_records(2, 3, 4, seed=2)], 14)
    loss, statistics, gradients = loss_and_gradients(objective, [rows])
    expected_loss, expected = plain(objective, rows)
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    assert_same(gradients, expected)
    assert statistics[CELLS].tolist() == rows.supervised(K).tolist()
    assert (statistics[DIVERGENCE] < statistics[CROSS_ENTROPY]).all()
    if draft_vocab is None:
        assert (statistics[DIVERGENCE] > 0).all()


def test_packed_equals_unpacked():
    objective = make_objective()
    records = make_records(9, 4, 2, 7, 3)
    packed = lay_out([records[:2], records[2:]], 14)
    alone = [lay_out([[record]], len(record.token_ids) + 5) for record in records]
    together, apart = loss_and_gradients(objective, [packed]), loss_and_gradients(objective, alone)
    assert together[0] == pytest.approx(apart[0], rel=1e-10)
    assert_same(together[2], apart[2])


@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB])
def test_one_document_a_row_equals_packing(draft_vocab, tmp_path):
    """Distinct documents share rows; neither labels nor attention cross: Megatron-LM#7278, PaddleFleet#1808."""
    objective = make_objective(draft_vocab=draft_vocab)
    objective.stack.target.name = str(tmp_path)  # no tokenizer there, and none is needed
    lines = [{"prompt_ids": [3 * n, 1], "response_ids": list(range(n, 2 * n))} for n in (2, 9, 5, 1, 7)]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for packing in ("documents", "one_per_row"):
        settings = [f"data.train={path}", f"output={tmp_path}", "data.row_length=16", f"data.packing={packing}"]
        rows, _, _ = read_rows(load_config("tiny.yaml", settings), objective.stack.target)
        found.append((loss_and_gradients(objective, [rows]), len(rows)))
    (together, few), (apart, many) = found
    assert few < many == len(lines)
    assert together[0] == pytest.approx(apart[0], rel=1e-10)
    torch.testing.assert_close(together[1], apart[1])
    assert_same(together[2], apart[2])


def test_accumulation_of_unequal_answers_equals_one_batch():
    objective = make_objective()
    records = make_records(30, 3, 29, 4)
    whole = loss_and_gradients(objective, [lay_out([[record] for record in records], 30)])
    split = loss_and_gradients(
        objective, [lay_out([[r] for r in records[:2]], 30), lay_out([[r] for r in records[2:]], 30)]
    )
    assert whole[0] == pytest.approx(split[0], rel=1e-10)
    torch.testing.assert_close(whole[1], split[1])
    assert_same(whole[2], split[2])


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("row_length", [None, 8])
def test_texts_shorter_than_the_chain_give_a_finite_loss(length, row_length):
    objective = make_objective()
    record = Record(list(range(5, 5 + length)), [True] * length, 1)
    rows = lay_out([[record]], row_length or length)
    cells = rows.supervised(K).tolist()
    assert cells == [max(length - 2, 0), max(length - 3, 0), max(length - 4, 0)]
    scales = torch.ones(K, dtype=torch.float64)
    teacher = teach(objective.stack.target, rows, target_hidden="post_norm", chunk_rows=4)
    loss, statistics = objective(*objective_inputs(rows, teacher), scales)
    assert torch.isfinite(loss)
    assert statistics[CELLS].tolist() == cells
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in objective.parameters() if p.grad is not None)


def test_a_row_of_padding_reaches_every_parameter_with_zero():
    objective = make_objective()
    rows = lay_out([make_records(9)], 9).take([-1], "cpu")
    loss, _, gradients = loss_and_gradients(objective, [rows])
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_only_the_modules_are_trained():
    objective = make_objective()
    assert len(list(objective.parameters())) == len(list(objective.stack.layers.parameters()))
    before = [p.clone() for p in objective.stack.target.model.parameters()]
    loss_and_gradients(objective, [lay_out([make_records(9)], 9)])
    assert all(p.grad is None for p in objective.stack.target.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, objective.stack.target.model.parameters(), strict=True))


@pytest.mark.parametrize("point", ["post_norm", "pre_norm"])
def test_kept_hidden_states_are_those_of_a_fresh_forward(point):
    target = make_target()
    rows = lay_out([make_records(9, 4), make_records(12, seed=1)], 14)
    memory = TeacherMemory(target, target_hidden=point, chunk_rows=3, keep=True)
    memory([1], rows.take([1], "cpu"))
    batch = [1, -1, 0]
    kept = memory(batch, rows.take(batch, "cpu"))
    fresh = teach(target, rows, target_hidden=point, chunk_rows=3)
    for ours, theirs in zip(kept, fresh, strict=True):
        torch.testing.assert_close(ours[[2, 0]], theirs)

"""The chunked loss against full logits in float64, and its invariances: packing, accumulation, short texts."""

import json
import math
from contextlib import nullcontext

import pytest
import torch

from mtp.cache import Packed
from mtp.precision import KeepFloat64
from tests.builders import VOCAB, make_stack, make_target
from train.config import Loss, load_config
from train.data import lay_out, read_rows
from train.objective import CELLS, DIVERGENCE, LOSS, ChunkedLoss, Objective, StepLoss, Work, objective_inputs
from train.records import Record
from train.teacher import TeacherMemory, probabilities, teach

K = 3
DRAFT_VOCAB = tuple(range(0, VOCAB, 2))
SOFT = StepLoss("soft")
FORMS = [SOFT, StepLoss("hard"), StepLoss("soft", 0.3), StepLoss("end_to_end")]


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


def loss_and_gradients(objective, batches, step_loss=SOFT, mode=KeepFloat64):
    """Sums the micro batches as the engine does, and returns loss, statistics and gradients."""
    cells = sum(rows.supervised(K) for rows in batches)
    scales = torch.tensor(step_loss.weights(Loss(), K), dtype=torch.float64) / cells.clamp(min=1)
    objective.zero_grad()
    loss, statistics = 0.0, 0.0
    with mode():
        for rows in batches:
            teacher = teach(objective.stack.target, rows, target_hidden="post_norm", chunk_rows=3)
            part, figures = objective(*objective_inputs(rows, teacher), scales, step_loss)
            part.backward()
            loss, statistics = loss + part.item(), statistics + figures
    gradients = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    return loss, statistics, gradients


def plain(objective, rows, step_loss):
    """The same loss by full logits and plain autograd, cell by cell as ALIGNMENT.md says, over the whole vocabulary."""
    stack, target = objective.stack, objective.stack.target
    kept = list(stack.contract.draft_vocab or range(VOCAB))
    objective.zero_grad()
    summed, count, divergence = [0.0] * K, [0] * K, [0.0] * K
    with KeepFloat64():
        hidden, final = target.forward(rows.tokens, Packed(rows.documents), target_hidden="post_norm")
        p = target.head(final).softmax(-1)
        outputs = dict(stack.unroll(hidden, rows.tokens, Packed(rows.documents)))
        batch = zip(rows.tokens.tolist(), rows.documents.tolist(), rows.loss_mask.tolist(), strict=True)
        for b, (tokens, documents, learn) in enumerate(batch):
            for t in range(len(tokens)):
                accepted = 1.0  # the chance that all sampled drafts of this row so far are
                for i in range(1, K + 1):
                    label = t + i + 1
                    if label >= len(tokens) or documents[t] != documents[label] or not learn[label]:
                        continue
                    log_q = stack.head(outputs[i].final[b, t]).log_softmax(-1)
                    q = torch.zeros(VOCAB, dtype=torch.float64).index_put((torch.tensor(kept),), log_q.exp())
                    soft = -(p[b, t + i, kept] * log_q).sum()
                    rejected = (p[b, t + i] - q).abs().sum() / 2
                    accepted = accepted * (1 - rejected)
                    if step_loss.form == "hard":
                        cell = -log_q[kept.index(tokens[label])] if tokens[label] in kept else 0.0
                    elif step_loss.form == "end_to_end":
                        cell = 1 - accepted
                    else:
                        cell = step_loss.kl_share * soft + (1 - step_loss.kl_share) * rejected
                    summed[i - 1], count[i - 1] = summed[i - 1] + cell, count[i - 1] + 1
                    divergence[i - 1] += (soft + (p[b, t + i, kept] * p[b, t + i, kept].log()).sum()).item()
        weights = step_loss.weights(Loss(), K)
        loss = sum(weight * total / max(cells, 1) for weight, total, cells in zip(weights, summed, count, strict=True))
        loss.backward()
    return loss.item(), divergence, {name: p.grad.clone() for name, p in objective.named_parameters()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB])
@pytest.mark.parametrize("step_loss", FORMS, ids=str)
def test_chunked_equals_full_logits(family, draft_vocab, step_loss):
    objective = make_objective(family, draft_vocab=draft_vocab)
    rows = lay_out([make_records(9, 4), make_records(12, seed=1), make_records(2, 3, 4, seed=2)], 14)
    expected_loss, divergence, expected = plain(objective, rows, step_loss)
    for chunk_rows in (1, 5, 1000):
        objective.chunk_rows = chunk_rows
        loss, statistics, gradients = loss_and_gradients(objective, [rows], step_loss)
        assert loss == pytest.approx(expected_loss, rel=1e-10)
        assert_same(gradients, expected)
        assert statistics[CELLS].tolist() == rows.supervised(K).tolist()
        hard = step_loss.form == "hard"
        assert statistics[DIVERGENCE].tolist() == ([0.0] * K if hard else pytest.approx(divergence, rel=1e-9))


def test_end_to_end_is_the_formula_and_has_its_gradient():
    """L = 1 - (1/k) sum_j prod_{i<=j} (1 - TV_i) of one row, differentiated by hand through the softmax."""
    objective = make_objective(draft_vocab=None)
    rows = lay_out([[Record([1, 2, 3, 4, 5, 6], [True] * 6, 1)]], 6)
    stack, step_loss = objective.stack, StepLoss("end_to_end")
    with KeepFloat64():
        teacher = teach(stack.target, rows, target_hidden="post_norm", chunk_rows=3)
        p = stack.target.head(teacher.final).softmax(-1)
        finals = [output.final for _, output in stack.unroll(teacher.hidden, rows.tokens, Packed(rows.documents))]
        labelled = [torch.zeros(1, 6, dtype=torch.bool) for _ in range(K)]
        for index in range(1, K + 1):
            labelled[index - 1][0, index] = True  # row 0's alone
        leaves = [final.detach().requires_grad_() for final in finals]
        work = Work(stack.head, rows.tokens, teacher.final, teacher.log_normaliser, labelled, 2, step_loss)
        loss, _ = ChunkedLoss.apply(work, torch.full((K,), 1 / K, dtype=torch.float64), *leaves)
        loss.backward()
    q = [stack.head(final[0, 0]).softmax(-1).detach() for final in finals]
    alpha = [torch.minimum(p[0, i + 1], q[i]).sum() for i in range(K)]
    products = [math.prod(alpha[: j + 1]) for j in range(K)]
    assert loss.item() == pytest.approx(1 - sum(products).item() / K, rel=1e-12)
    for i in range(K):
        by_alpha = -sum(products[j] / alpha[i] for j in range(i, K)) / K
        below = (q[i] < p[0, i + 1]).double()
        by_logit = by_alpha * q[i] * (below - (q[i] * below).sum())
        torch.testing.assert_close(leaves[i].grad[0, 0], by_logit @ stack.head.weight, rtol=1e-9, atol=1e-12)
        assert not leaves[i].grad[0, 1:].any()


def test_a_hard_label_outside_the_draft_vocabulary_adds_nothing_but_counts():
    objective = make_objective(draft_vocab=(0, 2, 4))
    inside, outside = [5, 7, 9, 2], [5, 7, 9, 3]  # module 1 predicts 9 and the last token, module 2 the last token
    for tokens, learns in ((inside, [True, True, False]), (outside, [False, False, False])):
        rows = lay_out([[Record(tokens, [True] * 4, 1)]], 5)
        _, statistics, gradients = loss_and_gradients(objective, [rows], StepLoss("hard"))
        assert statistics[CELLS].tolist() == [2, 1, 0]
        assert (statistics[LOSS] > 0).tolist() == learns
        assert any(gradient.any() for gradient in gradients.values()) == any(learns)


def test_the_teachers_distribution_is_made_once_a_label_row_for_all_modules(monkeypatch):
    objective, rows, made = make_objective(), lay_out([make_records(9, 4)], 14), []

    def counted(head, final, log_normaliser):
        made.append(len(final))
        return probabilities(head, final, log_normaliser)

    monkeypatch.setattr("train.objective.probabilities", counted)
    loss_and_gradients(objective, [rows])
    assert sum(made) == rows.supervised(1) < rows.supervised(K).sum()


def test_hard_labels_never_ask_the_teacher_for_a_distribution():
    memory = TeacherMemory(make_target(), target_hidden="post_norm", chunk_rows=3, keep=False, soft=False)
    assert not memory([0], lay_out([make_records(9, 4)], 14)).log_normaliser.any()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", [SOFT] * 4),
        ("cross_entropy", [StepLoss("hard")] * 4),
        ("lk", [SOFT, SOFT, StepLoss("soft", 0.5), StepLoss("soft", 0.0)]),
        ("tv", [SOFT, *[StepLoss("end_to_end")] * 3]),
    ],
)
def test_which_loss_a_step_has(kind, expected):
    options = Loss(kind=kind, kl_warmup_fraction=0.5)
    assert [StepLoss.at(options, progress) for progress in (0.49, 0.5, 0.75, 1.0)] == expected


def test_depths_weigh_by_beta_and_alike_end_to_end():
    assert StepLoss("end_to_end").weights(Loss(beta=0.6), 4) == [0.25] * 4
    assert SOFT.weights(Loss(beta=0.5), 2) == [2 / 3, 1 / 3]


def test_depths_weigh_as_given():
    assert SOFT.weights(Loss(step_weights=(1, 3)), 2) == [0.25, 0.75]
    assert StepLoss("end_to_end").weights(Loss(step_weights=(1, 3)), 2) == [0.5, 0.5]


@pytest.mark.parametrize("step_loss", FORMS, ids=str)
def test_frozen_modules_get_no_gradient_and_change_no_other(step_loss):
    objective = make_objective()
    rows = lay_out([make_records(9, 4), make_records(12, seed=1)], 14)
    free = loss_and_gradients(objective, [rows], step_loss)
    objective.stack.layers[0].requires_grad_(False)
    objective.zero_grad()
    frozen = loss_and_gradients(objective, [rows], step_loss)
    assert frozen[0] == pytest.approx(free[0], rel=1e-12)
    torch.testing.assert_close(frozen[1], free[1])
    assert_same(frozen[2], {name: g for name, g in free[2].items() if not name.startswith("stack.layers.0.")})


@pytest.mark.parametrize(
    ("recurrence", "frozen", "expected_runs"),
    [
        ("chained", False, [1, 1, 2, 2, 3, 3]),
        ("chained", True, [1, 2, 2, 3, 3]),
        ("target_fed", False, [1, 1, 2, 2, 3, 3]),
        ("target_fed", True, [1, 2, 2, 3, 3]),
        ("recursive", False, [1] * 6),
    ],
)
def test_activation_checkpointing_runs_modules_again_and_changes_nothing(
    recurrence, frozen, expected_runs, monkeypatch
):
    objective = make_objective("gemma2", recurrence=recurrence)
    objective.stack.layers[0].requires_grad_(not frozen)
    rows = lay_out([make_records(9, 4), make_records(12, seed=1)], 14)
    stored = loss_and_gradients(objective, [rows], mode=nullcontext)  # backward recomputes outside of any mode
    objective.stack.activation_checkpointing = True
    runs, run = [], objective.stack.target.run_block
    count = lambda *args, index: runs.append(index) or run(*args, index=index)  # noqa: E731
    monkeypatch.setattr(objective.stack.target, "run_block", count)
    recomputed = loss_and_gradients(objective, [rows], mode=nullcontext)
    assert recomputed[0] == stored[0]
    assert recomputed[2].keys() == stored[2].keys()
    assert all(torch.equal(recomputed[2][name], gradient) for name, gradient in stored[2].items())
    assert sorted(runs) == expected_runs


@pytest.mark.parametrize("step_loss", FORMS, ids=str)
def test_packed_equals_unpacked(step_loss):
    objective = make_objective()
    records = make_records(9, 4, 2, 7, 3)
    packed = lay_out([records[:2], records[2:]], 14)
    alone = [lay_out([[record]], len(record.token_ids) + 5) for record in records]
    together, apart = (loss_and_gradients(objective, batches, step_loss) for batches in ([packed], alone))
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


@pytest.mark.parametrize("step_loss", FORMS, ids=str)
@pytest.mark.parametrize("micro_rows", [1, 2])
def test_accumulation_of_unequal_answers_equals_one_batch(step_loss, micro_rows):
    """Also where a micro batch has one supervised token, or none at all, or is padding."""
    objective = make_objective()
    nothing, last_only = (Record(list(range(7)), [False] * 6 + [last], 1) for last in (False, True))
    batch = lay_out([[r] for r in (*make_records(30, 3, 29), last_only, nothing)] + [[]], 30)
    places = [list(range(first, first + micro_rows)) for first in range(0, len(batch), micro_rows)]
    whole = loss_and_gradients(objective, [batch], step_loss)
    split = loss_and_gradients(objective, [batch.take(micro, "cpu") for micro in places], step_loss)
    assert batch.take(places[-1], "cpu").supervised(K).tolist() == [0, 0, 0]
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
    loss, statistics = objective(*objective_inputs(rows, teacher), scales, SOFT)
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

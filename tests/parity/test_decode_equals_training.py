"""Ladder (c): after any accepts and rejects every cell equals the training forward; so training == decode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.check import run_check
from infer.engine import Engine
from infer.requests import Request
from mtp import alignment
from mtp.precision import KeepFloat64
from tests.builders import FAMILIES, make_stack, make_target


def requests_of(lengths, target, max_new_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(tuple(torch.randint(target.vocab_size, (length,), generator=generator).tolist()), max_new_tokens, key)
        for key, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recurrence", ["chained", "target_fed", "recursive"])
def test_every_cell_in_every_family(family, recurrence):
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, 3, recurrence=recurrence)
    real, forced = run_check(target, stack, requests_of((1, 2, 9, 20), target, 14), min_rounds=60, batch_size=3)
    for report in (real, forced):
        assert report.cells > 500
        assert report.mismatches == 0, report.first_mismatch
        assert report.largest < 1e-10
    assert set(forced.accept_patterns) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "fields",
    [
        {"target_hidden": "pre_norm"},
        {"chain_hidden": "pre_norm"},
        {"concat": "hidden_first"},
        {"positions": "token"},
        {"mask_first_embedding": True},
        {"draft_vocab": tuple(range(0, 61, 3))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_cell_under_every_contract_field(fields):
    target = make_target("llama", dtype=torch.float64)
    stack = make_stack(target, 3, **fields)
    for report in run_check(target, stack, requests_of((1, 5, 12), target, 14), min_rounds=60, batch_size=2):
        assert report.mismatches == 0, report.first_mismatch


@pytest.mark.parametrize("recurrence", ["chained", "target_fed", "recursive"])
@pytest.mark.parametrize("num_modules", [2, 3, 5])
def test_planted_fault_exceeds_the_noise_by_far(num_modules, recurrence):
    """Provisional cells left in place (the seed's bug) are found, at differences far above arithmetic noise."""
    target = make_target("llama")
    stack = make_stack(target, num_modules, recurrence=recurrence)
    requests = requests_of((3, 8), target, 20)
    for report in run_check(target, stack, requests, min_rounds=40, correct=False):
        assert report.mismatches > 0
        assert report.largest > 100 * report.noise
    for report in run_check(target, stack, requests, min_rounds=40):
        assert report.mismatches == 0


def test_a_step_that_sees_another_row_is_found(monkeypatch):
    """The training forward of recursive with its own earlier step hidden from step 3: a difference of wiring."""
    target = make_target("llama", dtype=torch.float64)
    stack = make_stack(target, 3, recurrence="recursive")
    whole = alignment.visible_in_steps

    def one_row_less(documents, window, *, index):
        visible = whole(documents, window, index=index)
        if index == 3:
            rows = documents.shape[1]
            visible[..., rows : 2 * rows] = False
        return visible

    requests = requests_of((1, 5, 12), target, 14)
    _, forced = run_check(target, stack, requests, min_rounds=60)
    assert forced.mismatches == 0
    monkeypatch.setattr(alignment, "visible_in_steps", one_row_less)
    _, forced = run_check(target, stack, requests, min_rounds=60)
    assert forced.mismatches > 0
    assert forced.largest > 1e4 * forced.noise
    assert "module 3" in forced.first_mismatch


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=5),
    num_modules=st.integers(1, 5),
    drafts=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    family=st.sampled_from(["llama", "mistral", "gemma2"]),
    recurrence=st.sampled_from(["chained", "target_fed", "recursive"]),
    seed=st.integers(0, 10**6),
)
def test_any_batch_mix_and_accept_pattern(lengths, num_modules, drafts, batch_size, family, recurrence, seed):
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, num_modules, recurrence=recurrence)
    requests = requests_of(lengths, target, 11, seed)
    for report in run_check(
        target,
        stack,
        requests,
        num_drafts=min(drafts, num_modules),
        batch_size=batch_size,
        min_rounds=10,
        seed=seed,
    ):
        assert report.cells > 0
        assert report.mismatches == 0, report.first_mismatch


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
@pytest.mark.parametrize("length", [1, 2, 3, 20])
def test_prefill_in_chunks_drafts_the_same(chunk, length):
    """lattice#1364, mlx-vlm#2096: module caches primed over the whole prompt, across chunk edges."""
    target = make_target("qwen3", dtype=torch.float64)
    stack = make_stack(target, 3)
    (request,) = requests_of((length,), target, 10)
    with KeepFloat64():
        whole, chunked = Engine(target, stack), Engine(target, stack, prefill_chunk=chunk)
        whole.submit(request)
        chunked.submit(request)
        for ours, theirs in zip(chunked.module_tables, whole.module_tables, strict=True):
            torch.testing.assert_close(ours.keys[:, :length], theirs.keys[:, :length], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(ours.values[:, :length], theirs.values[:, :length], rtol=1e-10, atol=1e-12)


def test_same_context_by_two_accept_histories_drafts_the_same():
    """vllm#14649, TensorRT-LLM#5285: caches keep nothing of how a context was reached."""
    target = make_target("llama", dtype=torch.float64)
    stack = make_stack(target, 3)
    (request,) = requests_of((4,), target, 12)
    with KeepFloat64():
        answer = next(iter(Engine(target, stack, eos_token_ids=()).generate([request]))).token_ids
        stepped, fresh = Engine(target, stack, eos_token_ids=()), Engine(target, stack, eos_token_ids=())
        stepped.submit(request)
        while len(stepped.active[0].token_ids) < 8:
            stepped.step()
        context = request.prompt_ids + tuple(stepped.active[0].token_ids)
        fresh.submit(Request(context[:-1], 5))
        last = len(context) - 1
        assert fresh.active[0].last_token == stepped.active[0].last_token == last
        assert fresh._tokens[0, last : last + 4].tolist() == stepped._tokens[0, last : last + 4].tolist()
    assert answer[:8] == list(context[4:12])

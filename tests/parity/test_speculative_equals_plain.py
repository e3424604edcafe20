"""Ladder (d): greedy speculative token ids equal the target's own greedy ids, however drafts fare."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.engine import Engine
from infer.requests import Request
from mtp.precision import KeepFloat64
from mtp.replay import replay_text
from tests.builders import FAMILIES, make_stack, make_target
from tests.parity.test_decode_equals_training import requests_of


def transformers_greedy(target, request):
    prompt = torch.tensor([request.prompt_ids])
    output = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, prompt.shape[1] :].tolist()


def decode(target, stack, requests, **options):
    done = Engine(target, stack, eos_token_ids=(), **options).generate(requests)
    return {completion.request.key: completion for completion in done}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_drafts_equals_transformers_generate(family):
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, 3)
    requests = requests_of((1, 7, 30), target, 16)
    with KeepFloat64():
        expected = {request.key: transformers_greedy(target, request) for request in requests}
        for drafts in range(4):
            for correct in (True, False):
                got = decode(target, stack, requests, num_drafts=drafts, batch_size=3, correct=correct)
                assert {key: done.token_ids for key, done in got.items()} == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_recursive_module_drafts_any_number_of_steps(family):
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, 2, recurrence="recursive")
    requests = requests_of((1, 7, 30), target, 16)
    with KeepFloat64():
        expected = {key: done.token_ids for key, done in decode(target, None, requests).items()}
        for drafts in (0, 1, 2, 5):
            for correct in (True, False):
                got = decode(target, stack, requests, num_drafts=drafts, batch_size=2, correct=correct)
                assert {key: done.token_ids for key, done in got.items()} == expected


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    batch_size=st.integers(1, 4),
    drafts=st.integers(0, 3),
    budget=st.integers(1, 15),
    seed=st.integers(0, 10**6),
)
def test_each_row_of_a_batch_equals_its_solo_run(lengths, batch_size, drafts, budget, seed):
    """unsloth#4078, mlxcel#162: unequal prompts, rows accepting unequally; max_new_tokens exact."""
    target = make_target("llama", dtype=torch.float64)
    stack = make_stack(target, 3)
    requests = requests_of(lengths, target, budget, seed)
    with KeepFloat64():
        together = decode(target, stack, requests, num_drafts=drafts, batch_size=batch_size)
        for request in requests:
            alone = decode(target, None, [request])[request.key]
            assert together[request.key].token_ids == alone.token_ids
            assert len(alone.token_ids) == budget


@pytest.mark.parametrize("recurrence", ["chained", "target_fed", "recursive"])
def test_replay_counts_the_rounds_of_a_real_decode(recurrence):
    """Replay of the training forward == decoding, round for round (EAGLE#195, SpecForge#128)."""
    target = make_target("llama", dtype=torch.float64)
    stack = make_stack(target, 3, recurrence=recurrence)
    # Modules that are often right: a target that repeats itself.
    requests = [Request(request.prompt_ids, 40, request.key) for request in requests_of((1, 5, 9, 17), target, 40)]
    accepted = 0
    with KeepFloat64():
        for key, done in decode(target, stack, requests).items():
            prompt = requests[key].prompt_ids
            text = torch.tensor([*prompt, *done.token_ids])
            replayed = replay_text(target, stack, text, len(prompt), limit=len(text))
            assert replayed.rounds_by_accepted == done.stats.rounds_by_accepted
            assert replayed.proposed == done.stats.proposed
            accepted += done.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("place", range(1, 9))
def test_replay_counts_what_was_proposed_before_an_end_of_sequence(place):
    """A produced token is declared to end sequences; the last round proposes as many drafts as any."""
    target = make_target("llama", dtype=torch.float64)
    stack = make_stack(target, 3)
    (request,) = requests_of((5,), target, 40)
    with KeepFloat64():
        end = decode(target, None, [request])[0].token_ids[place]
        (done,) = Engine(target, stack, eos_token_ids=(end,)).generate([request])
        text = torch.tensor([*request.prompt_ids, *done.token_ids])
        replayed = replay_text(target, stack, text, 5, limit=45)
    assert done.finish_reason == "stop"
    assert replayed.summary() == done.stats.summary()

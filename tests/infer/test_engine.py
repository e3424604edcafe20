"""The engine's bounds: ends of sequences, limits, context, statistics, bad requests."""

import pytest
import torch

from infer.engine import Engine
from infer.pickers import Greedy
from infer.requests import Request
from mtp import UserError
from tests.builders import make_stack, make_target


class Oracle(Greedy):
    """A scripted drafter: right for the first ``right`` drafts of every round, wrong after."""

    def __init__(self, text, right, vocab_size):
        self.text, self.right, self.vocab_size = text, right, vocab_size

    def draft(self, logits, last_token, requests, *, index):
        truth = self.text[(last_token + index).clamp(max=len(self.text) - 1)]
        return truth if index <= self.right else (truth + 1) % self.vocab_size


@pytest.fixture(scope="module")
def target():
    return make_target("llama")


@pytest.fixture(scope="module")
def stack(target):
    return make_stack(target, 3)


PROMPT = (5, 9, 2, 17)


def plain(target, budget, prompt=PROMPT):
    return next(iter(Engine(target, eos_token_ids=()).generate([Request(prompt, budget)]))).token_ids


def oracle_decode(target, stack, right, budget=24, **options):
    text = torch.tensor([*PROMPT, *plain(target, budget)])
    engine = Engine(target, stack, picker=Oracle(text, right, target.vocab_size), **options)
    return next(iter(engine.generate([Request(PROMPT, budget)])))


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_scripted_drafter_gives_its_acceptance_length(target, stack, right):
    done = oracle_decode(target, stack, right, budget=1 + 4 * (right + 1), eos_token_ids=())
    assert done.stats.acceptance_length == 1 + right
    assert done.stats.rounds == -(-(len(done.token_ids) - 1) // (right + 1))
    assert done.token_ids == plain(target, 1 + 4 * (right + 1))


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("right", [0, 2, 3])
def test_eos_inside_an_accepted_block_ends_the_text_there(target, stack, place, right):
    """transformers#47912, llama.cpp#28049: block offsets 0, 1, 2 and the bonus; one of several ids."""
    answer = plain(target, 24)
    eos = answer[place]
    expected = answer[: answer.index(eos) + 1]
    done = oracle_decode(target, stack, right, eos_token_ids=(eos, target.vocab_size + 7))
    assert done.token_ids == expected
    assert done.finish_reason == "stop"
    assert done.stats.accepted + done.stats.rounds == len(expected) - 1


@pytest.mark.parametrize("budget", range(1, 10))
def test_max_new_tokens_is_exact_and_drafts_beyond_it_do_not_count(target, stack, budget):
    done = oracle_decode(target, stack, 3, budget=budget, eos_token_ids=())
    assert len(done.token_ids) == budget
    assert done.finish_reason == "length"
    assert done.stats.accepted + done.stats.rounds == budget - 1
    assert done.stats.proposed <= budget


@pytest.mark.parametrize("length", range(60, 64))
def test_drafting_up_to_the_last_position_of_the_context(length):
    """exllamav2#274, TensorRT-LLM#16826: context of 64, prompts of 60-63."""
    target = make_target("llama", max_position_embeddings=64)
    stack = make_stack(target, 3)
    prompt = tuple(range(1, 1 + length % 61)) + (3,) * (length - length % 61)
    done = next(iter(Engine(target, stack, eos_token_ids=()).generate([Request(prompt[:length], 50)])))
    assert len(done.token_ids) == 64 - length
    assert done.finish_reason == "length"
    with pytest.raises(UserError, match="context of 64"):
        Engine(target, stack).submit(Request((1,) * 64, 5))


def test_k_launches_a_round(target, stack):
    """Correcting and drafting are one pass: a round launches every module once and the target once."""
    launches = []
    hook = stack.register_forward_hook(lambda m, a, kw, o: launches.append(kw["index"]), with_kwargs=True)
    engine = Engine(target, stack, eos_token_ids=())
    engine.submit(Request(PROMPT, 20))
    launches.clear()
    engine.step()
    hook.remove()
    assert launches == [1, 2, 3]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 5), "empty"),
        (Request((1, 2), 0), "max_new_tokens"),
        (Request((1, 10_000), 5), "token id"),
        (Request((1, -1), 5), "token id"),
    ],
)
def test_bad_requests_are_refused_by_name(target, stack, request_, message):
    with pytest.raises(UserError, match=message):
        next(iter(Engine(target, stack).generate([request_])))


@pytest.mark.parametrize("drafts", [-1, 4, 5])
def test_more_drafts_than_trained_modules_are_refused(target, stack, drafts):
    """vllm#52688: never the first module again in silence."""
    with pytest.raises(UserError, match="3 trained modules"):
        Engine(target, stack, num_drafts=drafts)


def test_module_i_drafts_token_i(target):
    """Each module is used, and at its own depth: randomising module i changes draft i and none before it."""
    drafts = {}
    for changed in (None, 1, 2, 3):
        stack = make_stack(target, 3)
        if changed:
            generator = torch.Generator().manual_seed(9)
            for parameter in stack.layers[changed - 1].parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator)
        engine = Engine(target, stack, eos_token_ids=())
        engine.submit(Request(PROMPT, 20))
        last = engine.active[0].last_token
        drafts[changed] = engine._tokens[0, last + 1 : last + 4].tolist()
    for changed in (1, 2, 3):
        assert drafts[changed][: changed - 1] == drafts[None][: changed - 1]
        assert drafts[changed] != drafts[None]

import itertools

import pytest
import torch

from mtp import UserError, alignment
from mtp.cache import Packed
from mtp.precision import KeepFloat64
from mtp.replay import draft_choices
from tests.builders import make_stack, make_target
from train.config import load_config
from train.data import pack
from train.evaluate import Evaluation, Replay, expected_accepted
from train.records import ReadReport, Record
from train.teacher import Teacher
from train.trainer import learning_rate


def make_replay(records, target, **more):
    return Replay(
        records, ReadReport("heldout"), target, target_hidden="post_norm", chunk_rows=4, **{"keep": True} | more
    )


def random_record(n, prompt, seed):
    tokens = torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Record(tokens, [place >= prompt for place in range(n)], prompt)


def test_replay_walks_the_modules_own_choices_record_by_record():
    target = make_target()
    stack = make_stack(target, 3, draft_vocab=tuple(range(0, 61, 2)))
    records = [random_record(n, prompt, n) for n, prompt in ((20, 5), (9, 1), (6, 4), (30, 12))]
    # Make text that the modules half agree with: put their own choices where later rows read them.
    for record in records:
        for _ in range(3):
            tokens = torch.tensor(record.token_ids)[None]
            hidden = target.forward(tokens, Packed(torch.zeros_like(tokens)), target_hidden="post_norm").hidden
            first = dict(stack.unroll(hidden, tokens, Packed(torch.zeros_like(tokens))))[1]
            choice = stack.head.tokens(stack.head(first.final[0]).argmax(-1)).tolist()
            for row in range(record.prompt_length, len(record.token_ids) - 2, 3):
                record.token_ids[row + 2] = choice[row]
    replay = make_replay(records, target)
    runs = [replay.run(stack, rank=0, world_size=1, device=torch.device("cpu")) for _ in range(2)]
    assert runs[0].record() == runs[1].record()  # kept hidden states change nothing
    parts = [replay.run(stack, rank=rank, world_size=2, device=torch.device("cpu")) for rank in range(2)]
    both = Evaluation.from_tensor(parts[0].tensor() + parts[1].tensor())
    assert both.record() == pytest.approx(runs[0].record(), rel=1e-12)
    merged = both.replayed
    assert merged.accepted > 0

    rounds = accepted = 0
    for record in records:  # plain walk, module by module, over full logits
        tokens = torch.tensor(record.token_ids)[None]
        hidden = target.forward(tokens, Packed(torch.zeros_like(tokens)), target_hidden="post_norm").hidden
        drafts = {
            index: stack.head.tokens(stack.head(output.final[0]).argmax(-1)).tolist()
            for index, output in stack.unroll(hidden, tokens, Packed(torch.zeros_like(tokens)))
        }
        last, end = record.prompt_length, len(record.token_ids) - 1
        while last < end:
            row, right = last - 1, 0
            while right < min(3, end - last - 1) and drafts[right + 1][row] == record.token_ids[row + right + 2]:
                right += 1
            rounds, accepted, last = rounds + 1, accepted + right, last + right + 1
    assert (merged.rounds, merged.accepted) == (rounds, accepted)
    assert both.record()["eval/acceptance_length"] == 1 + accepted / rounds


def test_only_wanted_rows_get_a_choice():
    target = make_target()
    stack = make_stack(target, 3)
    rows = pack([random_record(9, 3, 0)], 12, 0)
    wanted = torch.zeros(1, 12, dtype=torch.bool)
    wanted[0, 4:8] = True
    hidden = target.forward(rows.tokens, Packed(rows.documents), target_hidden="post_norm").hidden
    outputs = stack.unroll(hidden, rows.tokens, Packed(rows.documents))
    drafts = draft_choices(stack, outputs, rows.tokens, wanted, chunk_rows=3)
    assert (drafts[0, 4:8] >= 0).all()
    assert (drafts[0, :4] == -1).all()
    assert (drafts[0, 8:] == -1).all()


def test_heldout_without_answers_is_an_error():
    with pytest.raises(UserError, match="heldout"):
        make_replay([Record([1, 2, 3], [True] * 3, None), Record([1, 2, 3], [True] * 3, 2)], make_target())


@pytest.mark.parametrize("draft_vocab", [None, tuple(range(0, 61, 2))])
@pytest.mark.parametrize("point", ["post_norm", "pre_norm"])
def test_expected_acceptance_is_the_mean_over_rows_that_a_round_can_start_from(draft_vocab, point):
    target = make_target(dtype=torch.float64)
    stack = make_stack(target, 3, draft_vocab=draft_vocab, target_hidden=point)
    records = [random_record(n, prompt, n) for n, prompt in ((20, 5), (9, 1), (6, 4), (3, 1), (4, 2))]
    replay = Replay(records, ReadReport("heldout"), target, target_hidden=point, chunk_rows=4, keep=True)
    rows, expected = 0, 0.0
    with KeepFloat64():
        runs = [replay.run(stack, rank=0, world_size=1, device=torch.device("cpu")) for _ in range(2)]
        for record in records:  # record by record over full logits, TV as half the sum of differences
            tokens = torch.tensor(record.token_ids)[None]
            hidden, final = target.forward(tokens, Packed(torch.zeros_like(tokens)), target_hidden=point)
            p = target.head(final[0]).softmax(-1)
            q = {}
            for index, output in stack.unroll(hidden, tokens, Packed(torch.zeros_like(tokens))):
                q[index] = torch.zeros(output.final.shape[1], 61, dtype=torch.float64)
                q[index][:, list(draft_vocab or range(61))] = stack.head(output.final[0]).softmax(-1)
            last, end = record.prompt_length, len(record.token_ids) - 1
            while last < end:  # as a decode would that accepts nothing: every row it can start a round from
                row, survival, rows = last - 1, 1.0, rows + 1
                for index in range(1, min(3, end - last - 1) + 1):
                    survival *= 1 - (p[row + index] - q[index][row]).abs().sum().item() / 2
                    expected += survival
                last += 1
    for run in runs:  # kept hidden states change nothing
        assert run.rows == rows
        assert run.record()["eval/expected_acceptance_length"] == pytest.approx(1 + expected / rows, rel=1e-9)


def test_modules_that_equal_the_target_are_expected_to_be_accepted_always():
    documents = torch.tensor([[0, 0, 0, 0, 0, 0, 0, -1]])
    prompts = torch.tensor([2])
    proposed = [alignment.proposed_label_rows(documents, prompts, index=index) for index in range(4)]
    assert [rows[0].nonzero().flatten().tolist() for rows in proposed] == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4]]
    head = make_target(dtype=torch.float64).head
    final = torch.randn(1, 8, 32, dtype=torch.float64)
    teacher = Teacher(final, final, head(final).logsumexp(-1))
    accepted = expected_accepted(head, [final[:, 1:], final[:, 2:], final[:, 3:]], teacher, proposed[1:], 2)
    assert accepted[0].tolist() == pytest.approx([0, 3, 2, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("linear", 0.55, 0.1), ("constant", 1, 1), ("cosine", 0.55, 0.1)]
)
def test_learning_rate_schedules(schedule, middle, end):
    flags = [f"optimizer.schedule={schedule}", "optimizer.learning_rate=1", "optimizer.warmup_fraction=0.1"]
    config = load_config("tiny.yaml", flags)
    rates = [learning_rate(config, progress) for progress in (0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.5, 1, middle, end])


def test_learning_rate_warms_up_and_falls():
    config = load_config("tiny.yaml", ["optimizer.learning_rate=1", "optimizer.warmup_fraction=0.1"])
    rates = [learning_rate(config, place / 100) for place in range(101)]
    assert rates[5] == pytest.approx(0.5)
    assert max(rates) == rates[10] == pytest.approx(1)
    assert rates[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))

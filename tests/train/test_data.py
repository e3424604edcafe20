import json

import pytest
import torch

from mtp import UserError, alignment
from tests.builders import make_target
from tests.train.texts import write
from train.config import load_config
from train.data import FILL, Order, draft_vocabulary, micro_batches, pack, read_training, usable_records, weighted
from train.records import Record, read_records

GOOD = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}


def test_broken_lines_are_skipped_counted_and_named(tmp_path):
    target = make_target()
    path = write(
        tmp_path / "d.jsonl",
        b"\xef\xbb\xbf" + json.dumps(GOOD | {"extra": None, "messages": 3}).encode() + b"\n",
        b"{broken\n",
        b"\xff\xfe\n",
        b"\n",
        {"prompt_ids": [1], "response_ids": [True]},
        {"prompt_ids": [1], "response_ids": [10**6]},
        {"prompt_ids": [1], "response_ids": []},
        {"prompt_ids": [1]},
        [1],
        {"other": "中文🙂"},
        GOOD,
    )
    records, report = read_records(path, target)
    assert [list(record.token_ids) for record in records] == [[5, 6, 7, 8, 9]] * 2
    assert list(records[0].learn) == [False, False, True, True, True]
    assert report.skipped.total() == 8
    assert report.named()[0] == f"{path}:2: not JSON"
    assert {reason for _, reason in report.first_skipped} == set(report.skipped)  # one of each
    assert "8 records skipped" in report.text()


def test_no_usable_line_or_no_file_is_an_error(tmp_path):
    target = make_target()
    with pytest.raises(UserError, match=r"empty\.jsonl.*empty"):
        read_records(write(tmp_path / "empty.jsonl"), target)
    with pytest.raises(UserError, match="1: not JSON"):
        read_records(write(tmp_path / "x.jsonl", b"nothing\n"), target)
    with pytest.raises(UserError, match=r"x.jsonl:1: not JSON \(and 1 more\); .*x.jsonl:3: none of the known fields\)"):
        read_records(write(tmp_path / "x.jsonl", b"nothing\n", b"{\n", {"other": 1}), target)
    with pytest.raises(UserError, match=r"none\.jsonl"):
        read_records(str(tmp_path / "none.jsonl"), target)
    target.name = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no usable tokenizer"):
        read_records(write(tmp_path / "t.jsonl", {"text": "hello"}), target)


def records_of(*lengths):
    return [Record(list(range(3, 3 + n)), [False] + [True] * (n - 1), 1) for n in lengths]


def test_packing_keeps_whole_documents_apart_and_pads_by_length():
    records = records_of(7, 3, 9, 4, 2, 12, 5)
    rows = pack(records, 12, seed=1)
    found = []
    for tokens, documents in zip(rows.tokens, rows.documents, strict=True):
        real = documents != alignment.PADDING
        assert (documents[real].diff() >= 0).all()
        assert not real.int().diff().gt(0).any()  # padding only at the end
        found += [tokens[documents == number].tolist() for number in documents[real].unique()]
    assert sorted(found) == sorted(record.token_ids for record in records)
    assert not rows.loss_mask[rows.documents == alignment.PADDING].any()
    assert rows.loss_mask.sum() == sum(sum(record.learn) for record in records)


def test_long_records_are_cut_and_counted_and_useless_ones_dropped(tmp_path):
    records, report = read_records(
        write(tmp_path / "d.jsonl", GOOD, {"prompt_ids": [1] * 9, "response_ids": [2]}), make_target()
    )
    usable = usable_records(records, 4, "assistant", report)
    assert [list(record.token_ids) for record in usable] == [[5, 6, 7, 8]]
    assert report.cut == 2
    assert report.named() == [f"{report.path}:2: no token to learn within the row length"]
    assert len(usable_records(records, 4, "all", report)) == 2
    with pytest.raises(UserError, match="row_length"):
        usable_records(records, 2, "assistant", report)


def test_weights_repeat_whole_sources_and_draw_the_rest(tmp_path):
    records = records_of(*range(3, 13))
    assert weighted(records, 1, seed=0) == records
    assert weighted(records, 2, seed=0) == records * 2
    part = weighted(records, 1.5, seed=0)
    assert part[:10] == records and len(part) == 15 and len({id(r) for r in part[10:]}) == 5
    assert weighted(records, 1.5, seed=0) == part != weighted(records, 1.5, seed=1)
    assert len(weighted(records, 0.01, seed=0)) == 1

    write(tmp_path / "a.jsonl", *[GOOD] * 4)
    write(tmp_path / "b.jsonl", {"prompt_ids": [1], "response_ids": [2, 3]}, {})
    sources = f"[{tmp_path / 'a.jsonl'}, {{source: {tmp_path / 'b.jsonl'}, weight: 3}}]"
    config = load_config("tiny.yaml", ["target=t", f"output={tmp_path}", f"data.train={sources}"])
    target = make_target()
    target.name = str(tmp_path)  # no tokenizer there, and none is needed
    epoch, reports = read_training(config, target)
    assert [list(record.token_ids) for record in epoch] == [[5, 6, 7, 8, 9]] * 4 + [[1, 2, 3]] * 3
    assert [report.skipped.total() for report in reports] == [0, 1]
    assert "1 records, 0 of them cut to the row length, 3 in an epoch" in reports[1].text()


def test_every_row_once_per_epoch_for_any_number_of_ranks():
    order = Order(11, 4, seed=3)
    epochs = [[row for step in range(3) for row in order.step(3 * epoch + step)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(row for row in epoch if row != FILL) == list(range(11))
    assert epochs[0] != epochs[1]
    assert Order(11, 4, seed=3).step(4) == order.step(4)  # a resume sees the same rows
    step = order.step(1)
    for world in (1, 2):
        shares = [micro_batches(step, 2, rank=rank, world_size=world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(row for share in shares for micro in share for row in micro) == sorted(step)


def test_more_rows_a_step_than_there_are():
    order = Order(3, 8, seed=0)
    assert order.steps_per_epoch == 1
    assert sorted(order.step(5)) == [FILL] * 5 + [0, 1, 2]


def test_draft_vocabulary_is_the_most_frequent_ids_and_every_eos():
    target = make_target(eos_token_id=[2, 60])
    records = [Record([7, 7, 5, 5, 9, 8], [True] * 5 + [False], 1)]
    assert draft_vocabulary(records, target, size=2, coverage=None)[0] == (2, 5, 7, 60)
    assert draft_vocabulary(records, target, size=None, coverage=None) == (None, 1.0)
    assert torch.tensor(draft_vocabulary(records, target, size=60, coverage=None)[0]).max() == 60


@pytest.mark.parametrize(
    ("coverage", "kept", "share"),
    [(0.3, {5}, 0.5), (0.5, {5}, 0.5), (0.51, {5, 7}, 0.8), (0.8, {5, 7}, 0.8), (0.9, {5, 7, 8}, 1), (1, {5, 7, 8}, 1)],
)
def test_draft_vocabulary_by_coverage_is_the_smallest_that_covers(coverage, kept, share):
    target = make_target(eos_token_id=60)
    records = [Record([9] * 40 + [5] * 5 + [7] * 3 + [8] * 2, [False] * 40 + [True] * 10, 40)]
    ids, covers = draft_vocabulary(records, target, size=None, coverage=coverage)
    assert set(ids) == kept | {60}
    assert covers == pytest.approx(share)

"""Counting accepted drafts, and tables addressed by row."""

import torch

from mtp.acceptance import AcceptanceStats, emitted, leading_matches, replay
from mtp.cache import Cells, CellTable
from mtp.precision import KeepFloat64


def test_only_the_prefix_counts():
    """Flags [1, 0, 1]: accepted flags after the first rejection are no acceptance (vllm#2658, #10604)."""
    drafts, truth = torch.tensor([[1, 9, 3], [1, 2, 3], [9, 2, 3]]), torch.tensor([[1, 2, 3]] * 3)
    assert leading_matches(drafts, truth).tolist() == [1, 3, 0]
    assert leading_matches(drafts[:, :0], truth[:, :0]).tolist() == [0, 0, 0]


def test_cut_at_the_first_end_of_any_id():
    assert emitted([4, 7, 5, 9], (9, 7)) == [4, 7]
    assert emitted([4, 7], ()) == [4, 7]


def test_figures_and_their_conventions():
    stats = AcceptanceStats(3)
    assert (stats.acceptance_length, stats.acceptance_rate, stats.survival()) == (1.0, 0.0, [0.0] * 3)
    for accepted in (0, 1, 3, 3):
        stats.add_round(accepted, proposed=3)
    assert stats.acceptance_length == 1 + 7 / 4  # bonus included
    assert stats.acceptance_rate == 7 / 12  # bonus in neither
    assert stats.survival() == [0.75, 0.5, 0.5]
    assert stats.conditional() == [0.75, 0.5 / 0.75, 1.0]
    assert sum(stats.survival()) == stats.accepted / stats.rounds
    zero = AcceptanceStats(2)
    zero.add_round(0, proposed=2)
    assert (zero.acceptance_rate, zero.conditional()) == (0.0, [0.0, 0.0])


def test_replay_of_a_text_by_hand():
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    drafts = torch.zeros(8, 2, dtype=torch.long)
    drafts[1] = torch.tensor([4, 5])  # prompt of 2: L = 2, both right -> L = 5
    drafts[4] = torch.tensor([9, 8])  # L = 5, first wrong -> L = 6
    drafts[5] = torch.tensor([8, 9])  # L = 6, one token left: no draft is worth verifying
    stats = replay(drafts, tokens, prompt_length=2, limit=8)
    assert dict(stats.rounds_by_accepted) == {2: 1, 0: 2}
    assert stats.proposed == 2 + 1 + 0


def cells(table, rows, sequences=slice(0, 2)):
    rows = torch.tensor(rows)
    return Cells([table], rows, sequences, int(rows.max()) + 1)


def test_slots_are_rows_overwritten_grown_and_moved():
    table = CellTable(3)
    ones = torch.ones(2, 1, 2, 4)
    keys, values = table.write(ones, 2 * ones, cells(table, [[0, 1], [2, 3]]))
    assert keys.shape == values.shape == (2, 1, 4, 4)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 0, 0]
    assert keys[1, 0, :, 0].tolist() == [0, 0, 1, 1]
    keys, _ = table.write(5 * ones, ones, cells(table, [[1, 1], [3, 300]]))
    assert keys[0, 0, :2, 0].tolist() == [1, 5]
    assert keys[1, 0, [2, 3, 300], 0].tolist() == [1, 5, 5]
    assert table.keys.isfinite().all()
    table.move(1, 2)
    assert torch.equal(table.keys[2], table.keys[1])


def test_float64_stays_float64():
    value = torch.tensor([1 / 3], dtype=torch.float64)
    assert value.to(torch.float32).dtype == torch.float32
    with KeepFloat64():
        assert value.to(torch.float32).dtype == torch.float64
        assert value.float().dtype == torch.float64
        assert torch.softmax(value, -1, dtype=torch.float32).dtype == torch.float64
        assert value.half().dtype == torch.float16
        assert torch.ones(1, dtype=torch.long).float().dtype == torch.float32

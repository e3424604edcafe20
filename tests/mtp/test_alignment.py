"""The expected tensors are those of mtp/ALIGNMENT.md, written out by hand."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp import alignment

TOKENS = torch.arange(10, 17)[None]  # x_t = 10 + t, n = 7
ONE = torch.zeros(1, 7, dtype=torch.long)
TWO = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
ALL = torch.ones(1, 7, dtype=torch.bool)


def test_tokens_and_labels_of_every_module():
    expected = {
        1: ([11, 12, 13, 14, 15, 16], [12, 13, 14, 15, 16]),
        2: ([12, 13, 14, 15, 16], [13, 14, 15, 16]),
        3: ([13, 14, 15, 16], [14, 15, 16]),
    }
    for index, (read, labels) in expected.items():
        assert alignment.cell_tokens(TOKENS, index=index).tolist() == [read]
        assert alignment.hard_labels(TOKENS, index=index).tolist() == [labels]
        rows = torch.arange(len(labels))
        assert alignment.label_rows(rows, index=index).tolist() == [row + index for row in range(len(labels))]


def test_supervised_cells_of_one_document_and_of_two():
    for index, rows in {1: 5, 2: 4, 3: 3}.items():
        assert alignment.supervised_cells(ALL, ONE, index=index).tolist() == [[True] * rows]
    packed = {
        1: [True, True, False, False, True],
        2: [True, False, False, False],
        3: [False, False, False],
    }
    for index, expected in packed.items():
        assert alignment.supervised_cells(ALL, TWO, index=index).tolist() == [expected]


def test_only_label_tokens_to_learn_are_supervised_and_padding_never():
    """ms-swift#8192: a long prompt, one answer token."""
    answer = torch.tensor([[False] * 5 + [True, False]])
    assert alignment.supervised_cells(answer, ONE, index=1).tolist() == [[False, False, False, True, False]]
    assert alignment.supervised_cells(answer, ONE, index=3).tolist() == [[False, True, False]]
    padded = torch.tensor([[0, 0, 0, 0, -1, -1, -1]])
    assert alignment.supervised_cells(ALL, padded, index=1).tolist() == [[True, True, False, False, False]]


def test_texts_shorter_than_the_modules_have_no_cells():
    """mcore-bridge#104."""
    for n in (1, 2, 3):
        mask, documents = torch.ones(1, n, dtype=torch.bool), torch.zeros(1, n, dtype=torch.long)
        assert alignment.supervised_cells(mask, documents, index=3).shape == (1, 0)


def test_positions_and_visibility_in_documents():
    assert alignment.positions_in_documents(TWO).tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    visible = alignment.visible_in_documents(TWO, None)[0, 0].int().tolist()
    assert visible == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]
    windowed = alignment.visible_in_documents(TWO, 2)[0, 0, 3].int().tolist()
    assert windowed == [0, 0, 1, 1, 0, 0, 0]
    slots = alignment.visible_slots(torch.tensor([[1, 3]]), 5, 2)[0, 0].int().tolist()
    assert slots == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]]


def test_redo_windows_of_the_table():
    old = torch.tensor([10, 10, 10, 10])
    accepted = torch.tensor([0, 1, 2, 3])
    start = alignment.redo_start(old, accepted, 3)
    assert start.tolist() == [9, 10, 11, 11]
    rows = alignment.window_rows(start, old + accepted + 1)
    assert rows.tolist() == [[9, 9, 10, 11], [10, 10, 11, 12], [11, 11, 12, 13], [11, 12, 13, 14]]


def test_walk_of_rounds():
    assert alignment.walk_rounds([0] * 8, 3, 8, 3, limit=8) == [(0, 3), (0, 2), (0, 1), (0, 0)]
    assert alignment.walk_rounds([3] * 8, 3, 8, 3, limit=8) == [(3, 3)]
    assert alignment.walk_rounds([3] * 9, 3, 9, 3, limit=9) == [(3, 3), (0, 0)]
    assert alignment.walk_rounds([], 3, 4, 3, limit=4) == []
    # Ended before its limit: as many drafts are proposed as ever, and none beyond the end is accepted.
    assert alignment.walk_rounds([3] * 9, 3, 9, 3, limit=99) == [(3, 3), (0, 3)]
    drafts = torch.tensor([[12, 13, 99], [13, 99, 15], [99, 15, 16], [15, 16, 0], [16, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert alignment.matches_with_text(drafts, TOKENS[0]) == [2, 1, 0, 2, 1, 0, 0]


def wrong_cells(num_modules, accepts, rows_short):
    """Runs rounds symbolically and counts committed cells that read, or attend to, a token that was never committed.

    A draft that the next round accepts is the text's own token; any other is a token of its own.
    """
    last, cells, attended, wrong = 3, {}, {}, 0

    def read(t, index, drafts):
        return ("x", t + index) if t + index <= last else drafts[t + index - last - 1]

    def run(start, next_accepted):
        drafts = [("x", last + 1 + p) if p < next_accepted else ("draft", last, p) for p in range(num_modules)]
        for index in range(1, num_modules + 1):
            for t in range(start, last):
                below = cells[t, index - 1] if index > 1 else ()
                cells[t, index] = (*below, read(t, index, drafts))
                attended[t, index] = [cells.get((s, index)) for s in range(t)]

    run(0, accepts[0])
    for accepted, next_accepted in zip(accepts, [*accepts[1:], 0], strict=True):
        old_row = last - 1
        last += accepted + 1
        start = int(alignment.redo_start(torch.tensor([old_row]), torch.tensor([accepted]), num_modules))
        run(min(start + rows_short, last - 1), next_accepted)
        for index in range(1, num_modules + 1):
            for t in range(alignment.exact_rows(last, index=index)):
                truth = [tuple(("x", s + j) for j in range(1, index + 1)) for s in range(t + 1)]
                wrong += cells.get((t, index)) != truth[t] or attended[t, index] != truth[:t]
    return wrong


@settings(max_examples=60, deadline=None)
@given(num_modules=st.integers(1, 8), data=st.data())
def test_the_redo_window_leaves_no_wrong_cell_and_one_row_less_does(num_modules, data):
    accepts = data.draw(st.lists(st.integers(0, num_modules), min_size=1, max_size=6))
    assert wrong_cells(num_modules, accepts, rows_short=0) == 0
    if any(accepted < num_modules - 1 for accepted in accepts):
        assert wrong_cells(num_modules, accepts, rows_short=1) > 0

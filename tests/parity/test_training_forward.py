"""Ladder (a), (b), (f), (g): packing, cached prefill, transformers' own MTP layer, and mutations."""

import pytest
import torch
from transformers.modeling_layers import MtpLayer

from mtp.cache import Cells, CellTable, Packed
from tests.builders import (
    FAMILIES,
    assert_differs,
    assert_equal,
    cached,
    difference,
    exact,
    make_stack,
    make_target,
    one_document,
    random_tokens,
    unroll,
)

FIELDS = [
    {},
    {"recurrence": "target_fed"},
    {"target_hidden": "pre_norm", "chain_hidden": "pre_norm"},
    {"positions": "token", "concat": "hidden_first"},
    {"mask_first_embedding": True},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", [*FIELDS, {"recurrence": "recursive"}], ids=str)
def test_packed_equals_each_document_alone(family, fields):
    """(a) attention, positions and every module's shift stay inside a document; padding changes nothing."""
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, 3, **fields)
    lengths = (9, 2, 6)
    tokens = random_tokens(1, 20)
    documents = torch.tensor([[0] * 9 + [1] * 2 + [2] * 6 + [-1] * 3])
    with exact():
        together = unroll(stack, tokens, Packed(documents))
        first = 0
        for length in lengths:
            piece = tokens[:, first : first + length]
            alone = unroll(stack, piece, one_document(piece))
            assert set(alone) == set(range(min(3, length - 1) + 1))
            for index, output in alone.items():
                rows = slice(first, first + length - index)
                assert_equal(together[index].final[:, rows], output.final, f"module {index}")
                assert_equal(together[index].hidden[:, rows], output.hidden, f"module {index}")
            first += length


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_training_forward_equals_cached_prefill_at_every_chunk_boundary(family, fields):
    """(b) the rows of any chunking, run through cells by row, give the outputs of the whole forward."""
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, 3, **fields)
    tokens = random_tokens(1, 12)
    with exact():
        whole = unroll(stack, tokens, one_document(tokens))
        for boundary in range(1, 9):
            layers, modules = [CellTable(1) for _ in target.layer_types], [CellTable(1) for _ in range(3)]
            for first, end in ((0, boundary), (boundary, 9)):  # 9 rows: all three modules know their tokens
                context = cached(layers, first, end)
                hidden = target.forward(
                    tokens[:, first:end], context, target_hidden=stack.contract.target_hidden
                ).hidden
                assert_equal(hidden, whole[0].hidden[:, first:end], "target")
                for index in (1, 2, 3):
                    output = stack(
                        hidden, tokens[:, first + index : end + index], cached(modules, first, end), index=index
                    )
                    assert_equal(output.final, whole[index].final[:, first:end], f"module {index} at {boundary}")
                    hidden = stack.next_input(hidden, output)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", [{}, {"positions": "token", "chain_hidden": "pre_norm"}], ids=str)
def test_unrolled_steps_equal_drafting_from_every_row(family, fields):
    """(b) for recursive: step i started at row t sees the true rows up to t and its own rows, as in decoding."""
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, 4, recurrence="recursive", **fields)
    tokens = random_tokens(1, 14)
    with exact():
        whole = unroll(stack, tokens, one_document(tokens))
        for start in range(10):
            table = [CellTable(1)]
            output = stack(
                whole[0].hidden[:, : start + 1], tokens[:, 1 : start + 2], cached(table, 0, start + 1), index=1
            )
            assert_equal(output.final, whole[1].final[:, : start + 1], "true rows")
            for index in (2, 3, 4):
                row = start + index - 1
                output = stack(output.hidden[:, -1:], tokens[:, [row + 1]], cached(table, row, row + 1), index=index)
                assert_equal(output.final[:, 0], whole[index].final[:, start], f"step {index} from row {start}")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("concat", ["embed_first", "hidden_first"])
def test_our_module_equals_transformers_mtp_layer_on_equal_weights(family, concat):
    """(f) the submodule names are theirs, so weights interchange."""
    target = make_target(family, dtype=torch.float64)
    stack = make_stack(target, 1, concat=concat)
    tokens = random_tokens(1, 8)
    context = one_document(tokens).first_rows(7)
    with exact():
        hidden = target.forward(tokens, one_document(tokens), target_hidden="post_norm").hidden[:, :7]
        ours = stack(hidden, tokens[:, 1:], context, index=1)
        config = target.config
        config.mtp_hidden_states_first = concat == "hidden_first"
        theirs = MtpLayer(config, type(target.decoder.layers[-1]), type(target.final_norm), len(target.layer_types) - 1)
        theirs.double().load_state_dict(stack.layers[0].state_dict())
        embedded = target.embed(tokens[:, 1:])
        expected = theirs.eval()(
            embedded,
            hidden,
            position_embeddings=target.rope(embedded, context.rows),
            attention_mask=target.attention_mask(context, target.layer_types[-1], torch.float64),
            position_ids=context.rows,
            **{target._layer_cache_argument: None},
        )
    assert_equal(ours.final, expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"recurrence": "target_fed"},
        {"recurrence": "recursive"},
        {"target_hidden": "pre_norm"},
        {"chain_hidden": "pre_norm"},
        {"concat": "hidden_first"},
        {"mask_first_embedding": True},
    ],
    ids=str,
)
def test_flipping_a_contract_field_changes_the_logits(fields):
    """(g) no field is a no-op: a wrong one cannot pass unseen."""
    target = make_target("llama", dtype=torch.float64)
    tokens = random_tokens(1, 9)
    with exact():
        stacks = [make_stack(target, 3), make_stack(target, 3, **fields)]
        logits = [stack.head(unroll(stack, tokens, one_document(tokens))[3].final) for stack in stacks]
    assert_differs(logits[0], logits[1])


def test_positions_are_unseen_as_a_whole_and_seen_when_mixed_in_one_cache():
    """(g) RoPE does not see a constant shift; two conventions in one cache it does."""
    target = make_target("llama", dtype=torch.float64)
    tokens = random_tokens(1, 9)
    by_row, by_token = make_stack(target, 3), make_stack(target, 3, positions="token")
    with exact():
        whole = [unroll(stack, tokens, one_document(tokens))[3].final for stack in (by_row, by_token)]
        assert difference(whole[0], whole[1]) < 1e-6  # transformers computes RoPE angles in float32
        hidden = target.forward(tokens, one_document(tokens), target_hidden="post_norm").hidden
        outputs = {}
        for first_half in (by_row, by_token):
            tables = [CellTable(1) for _ in range(3)]
            for stack, first, end in ((first_half, 0, 4), (by_row, 4, 6)):
                context = Cells(tables, torch.arange(first, end)[None], slice(0, 1), end)
                output = stack(hidden[:, first:end], tokens[:, first + 3 : end + 3], context, index=3)
            outputs[first_half] = output.final
        assert_differs(outputs[by_row], outputs[by_token])


def test_a_zeroed_module_2_changes_depth_2_and_not_depth_1():
    """(g) every module is used, at its own depth."""
    target = make_target("llama", dtype=torch.float64)
    tokens = random_tokens(1, 9)
    stack, without = make_stack(target, 3), make_stack(target, 3)
    without.layers[1].eh_proj.weight.data.zero_()
    with exact():
        whole, dropped = (unroll(s, tokens, one_document(tokens)) for s in (stack, without))
    assert_equal(dropped[1].final, whole[1].final)
    assert_differs(dropped[2].final, whole[2].final)
    assert_differs(dropped[3].final, whole[3].final)

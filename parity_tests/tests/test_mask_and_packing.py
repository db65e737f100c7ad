"""The mask rule and the rows of every variant, written twice: the trainer's and the oracle's must be equal."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaxref.layout import lay_out
from jaxref.mask import live_pairs, visible_BQJ
from torchtrain.attention.plan import make_plan
from torchtrain.attention.rule import visible_BTT
from torchtrain.config import BASE_VARIANTS, PackConfig
from torchtrain.data.rows import SpanTokens, build_row
from torchtrain.marks import IGNORED
from torchtrain.tests.layouts import document_ids, named_batch

VARIANTS = [base + tag + merge for base in BASE_VARIANTS for tag in ("", "+tag") for merge in ("", "+interleave")]


def assert_same_rule(ids_BT: torch.Tensor) -> None:
    np.testing.assert_array_equal(visible_BQJ(ids_BT.numpy()), visible_BTT(ids_BT).numpy())
    assert live_pairs(ids_BT.numpy()) == make_plan(ids_BT).live_pairs


def test_the_rule_on_named_rows():
    assert_same_rule(named_batch())


@given(document_ids())
def test_the_rule_on_random_rows(ids_BT):
    assert_same_rule(ids_BT)


@st.composite
def rows(draw) -> dict:
    return {
        "lengths": draw(st.lists(st.integers(1, 12), min_size=1, max_size=5).filter(lambda own: sum(own) > 1)),
        "anchor": draw(st.integers(0, 3)),
        "padding": draw(st.integers(0, 4)),
        "chunks": draw(st.integers(2, 6)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "answers": draw(st.booleans()),
    }


@pytest.mark.parametrize("variant", VARIANTS)
@given(row=rows())
def test_rows_of_every_variant(variant, row):
    """Documents of random lengths, from one token and fewer than chunks on; anchors of 0 to 3 tokens; padding."""
    lengths, anchor, padding, chunks = row["lengths"], row["anchor"], row["padding"], row["chunks"]
    tag = 2 if "+tag" in variant else 0
    T = anchor + sum(lengths) + tag * len(lengths) + padding

    # Every token its own number, so that a token in the wrong place is seen.
    numbers = iter(range(T))
    prefix = [next(numbers) for _ in range(anchor)]
    spans, domains = [], [-1] * anchor
    drawn = np.random.default_rng(row["seed"])
    targets = [drawn.integers(2, size=n).astype(bool) for n in lengths] if row["answers"] else None
    for number, n in enumerate(lengths):
        opening = [next(numbers) for _ in range(tag)]
        tokens = np.array([next(numbers) for _ in range(n)])
        domains += [number] * (tag + n)
        spans.append(SpanTokens(tokens, domain=number, tag=opening, targets=targets and targets[number]))
    pack = PackConfig(sequence_length=T, variant=variant, chunks=chunks)
    trainer = build_row(spans, pack, prefix, pad_id=-7, random=np.random.default_rng(row["seed"]))

    # The order the trainer draws: one turn for each piece of a span, shuffled.
    turns = np.random.default_rng(row["seed"]).permutation(
        np.repeat(np.arange(len(lengths)), [min(chunks, n) for n in lengths])
    )
    oracle = lay_out(
        *(lengths, variant.replace("+tag", ""), anchor, padding, tag, chunks), turns=turns, targets=targets
    )
    np.testing.assert_array_equal(oracle.document_ids, trainer["document_ids"])
    np.testing.assert_array_equal(oracle.position_ids, trainer["position_ids"])
    stored_whole = np.array([*range(T - padding), *[-7] * padding])
    np.testing.assert_array_equal(stored_whole[oracle.source], trainer["input_ids"])
    np.testing.assert_array_equal(np.array(domains + [-1] * padding)[oracle.source], trainer["domain_ids"])
    labelled = trainer["shift_labels"] != IGNORED
    np.testing.assert_array_equal(oracle.labelled, labelled)
    np.testing.assert_array_equal(trainer["shift_labels"][labelled], trainer["input_ids"][labelled] + 1)

"""The rule against masks drawn by hand, and against itself written as plain loops."""

import pytest
import torch
from hypothesis import given

from torchtrain.attention.rule import check_document_ids, visible_BTT
from torchtrain.tests.layouts import document_ids
from torchtrain.tests.tiny import refused


@given(document_ids(max_tokens=12))
def test_the_rule_is_its_own_words(ids_BT):
    mask = visible_BTT(ids_BT)
    for b, row in enumerate(ids_BT.tolist()):
        for q, document_q in enumerate(row):
            for k, document_k in enumerate(row):
                no_padding = document_q != -1 and document_k != -1
                assert mask[b, q, k] == (k <= q and no_padding and document_k in (document_q, 0))


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([1, 1]), "expected an integer tensor [batch, tokens]"),
        (torch.tensor([[1.0, 1.0]]), "torch.float32"),
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.tensor([[1, -2]]), "smallest value -2"),
        (torch.tensor([[0, 1], [1, 0]]), "row 1 has anchor id 0 at index 1"),
    ],
)
def test_ids_that_break_the_contract_are_refused(ids, says):
    assert says in refused(lambda: check_document_ids(ids))

"""The tags that open documents are targets like any other token."""

import numpy as np

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import wrap
from torchtrain.data.rows import build_row
from torchtrain.marks import ANCHOR, IGNORED


def _make(build):
    def unmask(*args, **kwargs):
        row = build(*args, **kwargs)
        documents, labels, ids = row["document_ids"], row["shift_labels"], row["input_ids"]
        has_next = (documents[:-1] == documents[1:]) & (documents[1:] > ANCHOR)
        labels[:-1] = np.where(has_next & (labels[:-1] == IGNORED), ids[1:], labels[:-1])
        return row

    return unmask


BUG = Bug(
    what="domain tags trained on",
    where="seen in reviews of fine-tuning code, where labels = input_ids.clone() undoes the masking of prompts",
    stage="loss",
    apply=lambda: wrap(build_row, _make),
    likely={"variant": ("anchor+tag", "intra+tag")},
)

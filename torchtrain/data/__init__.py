"""From documents to batches: corpus, tokens on disk, packing plan, rows of five arrays."""

from torchtrain.data.dataset import (
    PackedRows,
    Split,
    anchor_ids,
    check_store,
    check_tokenizer,
    pad_id,
    split_documents,
    stack_rows,
    tag_ids,
)
from torchtrain.data.identity import fingerprint, identity, tokenizer_digest
from torchtrain.data.packing import PackPlan
from torchtrain.data.prepare import prepare, prepare_store
from torchtrain.data.store import DomainSummary, TokenStore
from torchtrain.data.writer import PreparationProgress

__all__ = [
    "DomainSummary",
    "PackPlan",
    "PackedRows",
    "PreparationProgress",
    "Split",
    "TokenStore",
    "anchor_ids",
    "check_store",
    "check_tokenizer",
    "fingerprint",
    "identity",
    "pad_id",
    "prepare",
    "prepare_store",
    "split_documents",
    "stack_rows",
    "tag_ids",
    "tokenizer_digest",
]

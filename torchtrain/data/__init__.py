"""From documents to batches: corpus, tokens on disk, packing plan, rows of five arrays."""

from torchtrain.data.dataset import PackedRows, collate
from torchtrain.data.packing import PackPlan, Span
from torchtrain.data.prepare import fingerprint, identity, prepare, tokenizer_identity
from torchtrain.data.split import Split, split_documents
from torchtrain.data.store import DomainSummary, TokenStore
from torchtrain.data.tokenise import PreparationProgress
from torchtrain.data.tokens import anchor_ids, check_store, check_tokenizer, pad_id, tag_ids

__all__ = [
    "DomainSummary",
    "PackPlan",
    "PackedRows",
    "PreparationProgress",
    "Span",
    "Split",
    "TokenStore",
    "anchor_ids",
    "check_store",
    "check_tokenizer",
    "collate",
    "fingerprint",
    "identity",
    "pad_id",
    "prepare",
    "split_documents",
    "tag_ids",
    "tokenizer_identity",
]

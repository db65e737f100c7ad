"""What the three training examples share: a tiny random Llama, and packed rows of random documents."""

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from torchtrain.config import PackConfig
from torchtrain.data.rows import SpanTokens, build_row

BOS, PAD, VOCABULARY = 0, 1, 64


def tiny_llama() -> LlamaForCausalLM:
    """A Llama of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def packed_rows(rows: int = 16) -> Dataset:
    """Rows of 32 tokens: the anchor, and three documents that count up, each from a number of its own.

    `shift_labels` hold each token's target, so documents do not predict one another. transformers wants `labels` as
    well, to compute a loss at all, and leaves them unread.
    """
    random, pack = np.random.default_rng(0), PackConfig(sequence_length=32, variant="anchor")

    def document(tokens: int) -> SpanTokens:
        return SpanTokens(2 + (random.integers(VOCABULARY) + np.arange(tokens)) % (VOCABULARY - 2), domain=0, tag=[])

    made = [build_row([document(n) for n in (12, 9, 10)], pack, [BOS], PAD, random) for _ in range(rows)]
    names = ("input_ids", "position_ids", "document_ids", "shift_labels")
    columns = {name: [row[name] for row in made] for name in names}
    return Dataset.from_dict(columns | {"labels": columns["shift_labels"]})

"""Embeddings times the root of the width."""

from unittest.mock import patch

from torch import nn

from parity_tests.zoo import Bug

_embed = nn.Embedding.forward

BUG = Bug(
    what="embedding scaled by sqrt(width)",
    where="Gemma scales, Llama does not: code shared between the two (seen in reviews of ports)",
    stage="forward",
    apply=lambda: patch.object(nn.Embedding, "forward", lambda self, ids: _embed(self, ids) * self.embedding_dim**0.5),
)

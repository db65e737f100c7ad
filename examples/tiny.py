"""What the training examples share: texts, a tokenizer, rows that are packed from them, a tiny Llama, and a loop."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import torchtrain
from torchtrain.data import PackedRows

WORDS = ["<s>", "</s>", *(f"w{i}" for i in range(62))]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 64 words."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def tiny_rows() -> PackedRows:
    """Rows of 32 tokens: the anchor, and documents that count up, each from a number of its own."""
    texts = [" ".join(f"w{(7 * n + i) % 62}" for i in range(5 + n % 11)) for n in range(67)]
    return torchtrain.pack(texts, tiny_tokenizer(), sequence_length=32)


def tiny_llama() -> LlamaForCausalLM:
    """A random Llama of two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes))


def train(model: Any, **given: Any) -> list[float]:
    """Train 8 steps on all rows, in a plain loop; return the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch, losses = torchtrain.collate(list(tiny_rows())), []
    for _ in range(8):
        loss = model(**batch, **given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

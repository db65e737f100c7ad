"""From strings to a falling loss: python -m examples.train_from_strings"""

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import torchtrain

texts = [f"Take {n} eggs and {n} spoons of flour, stir, and bake it for {n} minutes." for n in range(1, 400)]
words = ByteLevelBPETokenizer()
words.train_from_iterator(texts, vocab_size=400, special_tokens=["<s>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, bos_token="<s>")
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

rows = torchtrain.pack(texts, tokenizer, sequence_length=256)
model = torchtrain.attach(model)
for batch in torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=torchtrain.collate):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")

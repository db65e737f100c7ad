"""AnchorAttention with accelerate, 4 batches to a step: python -m examples.train_with_accelerate"""

import torch
from accelerate import Accelerator

import torchtrain
from examples.tiny import tiny_llama, tiny_rows

accelerator, model, losses = Accelerator(), torchtrain.attach(tiny_llama()), [0.0] * 8
loader = torch.utils.data.DataLoader(tiny_rows(), batch_size=4, collate_fn=torchtrain.collate)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
for step in range(8):
    batches = [batch for _, batch in zip(range(4), loader, strict=False)]
    labelled = accelerator.reduce(sum((batch["shift_labels"] != -100).sum() for batch in batches))
    for batch in batches:  # each adds its share of the mean; accelerate averages gradients over the processes
        loss = model(**batch, num_items_in_batch=labelled).loss
        accelerator.backward(loss * accelerator.num_processes)
        losses[step] += accelerator.reduce(loss.detach()).item()
    optimizer.step()
    optimizer.zero_grad()
print(losses)

"""AnchorAttention under PEFT's LoRA, in a loop of one's own: python -m examples.train_with_lora"""

import torch
from peft import LoraConfig, get_peft_model

import torchtrain
from examples.tiny import tiny_llama, tiny_rows


def main() -> list[float]:
    """Train the adapters for 8 steps; return the losses."""
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = torchtrain.attach(get_peft_model(tiny_llama(), lora))  # attach after PEFT
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows, losses = list(tiny_rows()), []
    for _ in range(8):
        loss = model(**torchtrain.collate(rows)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

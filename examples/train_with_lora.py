"""AnchorAttention under PEFT's LoRA, in a loop of one's own:

python -m examples.train_with_lora
"""

import torch
from peft import LoraConfig, get_peft_model

import torchtrain
from examples.tiny import packed_rows, tiny_llama


def main() -> list[float]:
    """Train the adapters for 8 steps; return the losses."""
    model = get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    torchtrain.attach(model)  # after PEFT: the model that trains is the one that is checked
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = packed_rows().with_format("torch")[:]
    losses = []
    for _ in range(8):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()

"""AnchorAttention in one graph of `torch.compile`, with gradient checkpointing: python -m examples.train_compiled"""

import torch

import torchtrain
from examples.tiny import tiny_llama, train


def main(backend: str = "inductor") -> list[float]:
    """Train 8 steps; return the losses."""
    model = torchtrain.attach(tiny_llama()).train()
    model.gradient_checkpointing_enable()
    return train(torch.compile(model, fullgraph=True, backend=backend), use_cache=False)  # layers recomputed: no cache


if __name__ == "__main__":
    print(main())

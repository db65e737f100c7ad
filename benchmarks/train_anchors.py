"""Adapt a model to an anchor far away, for docs/precision.md: rows of an anchor at 0 and of 256 tokens farther away.

    python -m benchmarks.train_anchors smollm2 models/smollm2-anchors --steps 150

Then `jaxref study configs/study/page-places.yaml model.source=models/smollm2-anchors` measures it, on other texts.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ropestudy.models import find_folder, load_pretrained
from ropestudy.spec import ModelConfig, TextConfig
from ropestudy.text import read_pool

MEASURED, OTHERS, TOKENS, MOST = 8, 40, 256, 8192  # texts of the study, texts to train on, of a row, positions
SHOWN = 4096  # the anchor's distance at which its share of the attention is shown


def main() -> None:
    """Train, show the loss and the anchor's share of the attention before and after, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rate", type=float, default=1e-4)
    given = parser.parse_args()
    pretrained = load_pretrained(ModelConfig(source=given.source))
    pool = read_pool(TextConfig(tokens=MOST), pretrained.tokenizer, MEASURED + OTHERS, MOST, 0)
    folder = find_folder(given.source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    random, optimizer = (
        np.random.default_rng(0),
        torch.optim.AdamW(model.parameters(), lr=given.rate, betas=(0.9, 0.95)),
    )
    mask = torch.full((TOKENS + 1, TOKENS + 1), -torch.inf).triu(1)[None, None]

    def run(number: int, start: int, gap: int, **more: bool):
        ids = torch.tensor([[pretrained.bos, *pool.ids[number][start : start + TOKENS]]])
        positions = torch.arange(TOKENS + 1)[None]
        positions[:, 1:] += gap
        result = model(ids, attention_mask=mask, position_ids=positions, use_cache=False, **more)
        # The anchor predicts no document's first token.
        return torch.nn.functional.cross_entropy(result.logits[0, 1:-1], ids[0, 2:]), result.attentions

    @torch.no_grad()
    def show(when: str) -> None:
        for gap in (0, SHOWN):
            loss, attentions = zip(
                *(run(number, 0, gap, output_attentions=True) for number in range(MEASURED)), strict=True
            )
            share = np.mean([float(layer[..., 1:, 0].mean()) for layers in attentions for layer in layers])
            print(
                f"{when}: anchor {gap} away: loss {np.mean(loss):.3f}, its share of the attention {share:.3f}",
                flush=True,
            )

    show("before")
    for step in range(given.steps):
        for group in optimizer.param_groups:
            group["lr"] = given.rate * min(1, (step + 1) / 10) * (1 - step / given.steps)
        number, start = MEASURED + random.integers(OTHERS), random.integers(MOST - TOKENS)
        loss, _ = run(number, start, int(random.integers(MOST - TOKENS)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 24:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    show("after")
    model.save_pretrained(given.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, given.out)


if __name__ == "__main__":
    main()

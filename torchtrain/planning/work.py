"""What a run computes, how long it takes and what it writes: tokens, FLOPs by live pairs, seconds, checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anchorline.errors import quoted
from anchorline.files import expand
from torchtrain.config import Config, SaveConfig, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30
STATE_BYTES = 12  # of a trained weight in a checkpoint: a float32 master and AdamW's two moments

# E[n^2] / E[n] of the paper's data sets in tokens, from its shares of sequences and tokens by domain (arXiv 2411.13476,
# appendix C), every document as long as its domain's mean. Lengths spread within a domain, so attention takes more. For
# the up-sampled mix the shares of sequences are not published; its documents are longer than those of the sample.
PAPER_LENGTHS = {"slimpajama-64k": 3540, "slimpajama-128k": 4720, "upsampledmix-128k": 4720}


@dataclass(frozen=True)
class Documents:
    """How long documents are, as attention counts it."""

    weighted: float | None  # E[n^2] / E[n], tokens; None: not known, attention is counted as full
    source: str  # in words

    def live_pairs(self, tokens: int, anchor: int) -> int:
        """Return the mean live pairs of a row of `tokens`, where every token sees the first `anchor`."""
        full = tokens * (tokens + 1) // 2
        if self.weighted is None:
            return full
        return min(full, round(tokens * (self.weighted + 1) / 2 + anchor * (tokens - anchor)))


def read_documents(prepared: str | None, sequence_length: int) -> Documents:
    """Find how long documents are in the prepared store, or by the paper's statistics of its data. Raises UserError:
    `data.prepared` holds a damaged store.
    """
    from torchtrain.data.store import HEADER, TokenStore  # imports torch, which `torchtrain config` does without

    if prepared is not None and (expand(prepared) / HEADER).is_file():
        lengths = TokenStore.open(expand(prepared)).lengths
        return Documents(weighted_length(lengths, sequence_length), f"the lengths in {quoted(prepared)}")
    if prepared is not None:
        for name, weighted in PAPER_LENGTHS.items():
            if Path(prepared).name.startswith(name):
                return Documents(weighted, f"the paper's statistics of {name}, a lower bound")
    return Documents(None, "counted as full; give --document-tokens, or prepare the data first")


def weighted_length(lengths: np.ndarray, tokens: int) -> float:
    """Return E[n^2] / E[n] of the pieces of documents, int [documents] tokens long, packed end to end into rows of T.

    A row ends anywhere within a document, so a document of n tokens gives pieces whose squares sum to
    n^2 (1 - n / 3T) on average, or T n - T^2 / 3 where n is over T.
    """
    n = lengths.astype(np.float64)
    squares = np.where(n <= tokens, n**2 * (1 - n / (3 * tokens)), tokens * n - tokens**2 / 3)
    return float(squares.sum() / n.sum())


@dataclass(frozen=True)
class Work:
    """What a run computes."""

    weights: int
    trained: int  # of them
    tokens: int  # of all steps
    flops: int  # of all steps, by live pairs
    live_share: float  # of all pairs of a row up to the diagonal


def count_work(config: Config, model: "PreTrainedModel", documents: Documents) -> Work:
    """Count a run's tokens and FLOPs, every token of every row with a label."""
    from torchtrain.attention.masks import layer_windows
    from torchtrain.training.flops import FlopCounter

    rows, length = config.train.steps * config.train.sequences_per_step, config.pack.sequence_length
    pairs = full = length * (length + 1) // 2
    if config.pack.base_variant.separates:
        pairs = documents.live_pairs(length, anchor=int(config.pack.base_variant.has_anchor))
    windows = layer_windows(model.config)
    # A window leaves no more than this of a row, and of documents no more than they have.
    within = {w: pairs if w is None or w >= length else min(pairs, w * length - w * (w - 1) // 2) for w in windows}
    pairs = round(sum(within[w] * layers for w, layers in windows.items()) / max(1, windows.total()))
    return Work(
        weights=model.num_parameters(),
        trained=model.num_parameters(only_trainable=True),
        tokens=rows * length,
        flops=rows * FlopCounter.of(model).flops(length, length, pairs),
        live_share=pairs / full,
    )


def describe_saves(save: SaveConfig, train: TrainConfig, work: Work, bytes_each: int) -> str:
    """Return, in lines, what a run writes of a model whose weights take `bytes_each`."""
    checkpoints = len(save.before_last(train.steps)) + 1 if save.every else 0
    models = len(save.exports(train.steps)) + 1
    checkpoint, model = STATE_BYTES * work.trained / GIB, bytes_each * work.weights / GIB
    # An old checkpoint is removed once the new one is whole.
    most = min(checkpoints, save.keep + 1) * checkpoint + models * model
    return f"""saves     {checkpoints:,} checkpoints of {checkpoint:,.1f} GiB each, {describe_schedule(save, train)}
models    {models:,} of {model:,.1f} GiB each
disk      {checkpoints * checkpoint + models * model:,.1f} GiB written in all, up to {most:,.1f} GiB there at a time"""


def describe_schedule(save: SaveConfig, train: TrainConfig) -> str:
    """Return, in words, at which steps a run saves."""
    if not save.every:
        return "never"
    if train.epochs is not None:  # the rows say how many steps that is
        return f"every {save.every:,} steps, and after the last"
    steps = [*save.before_last(train.steps)[:3], train.steps]
    shown = [f"{step:,}" for step in steps]
    return f"after step {', '.join(shown)}" if len(steps) < 4 else f"after step {shown[0]}, {shown[1]} ... {shown[-1]}"

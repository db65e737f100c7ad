"""Measure how well a trained model answers questions, where it attends, and how far rounding moves its scores.

A row is one document under plain causal attention, with positions from 0. The model computes in the arithmetic that it
was trained in.

Legend: N rows · T tokens of a row · K queries · M right answers · H heads · D head size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from benchmarks.experiment.documents import Rows
from benchmarks.experiment.spec import round_model
from torchtrain.attention import make_plan
from torchtrain.attention.rounding import round_mantissa
from torchtrain.config import ModelConfig
from torchtrain.modeling.head import head_of, hidden_states
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.source import open_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS_AT_A_TIME = 8
_ROWS_LOOKED_AT = 2  # for scores, of which there are T x T


class Answers(BaseModel):
    """What was measured in rows that open alike."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    nats: list[list[float]]  # [distances][rows]: mean loss at the answers, over the models
    recall: list[float]  # [distances]: share of questions whose likeliest next word is a right one


class Measurement(BaseModel):
    """What was measured of one run: means over its last checkpoints."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    bos: Answers  # in rows that open with BOS
    no_bos: Answers  # in the same rows with filler in its place
    exact: Answers  # in rows that open with BOS, in exact arithmetic
    sink: float  # the largest share of its attention that a head gives to BOS, of the last checkpoint
    losses: list[float]  # training loss, means of tenths of the run (of each step, if there are fewer)
    seconds: float
    contexts: dict[str, float] = {}  # held-out loss of the last model, by where a range of effective contexts begins


def measure(folders: Sequence[Path], arithmetic: str, rows: Rows) -> Answers:
    """Return how well models answer, in the mean over them."""
    every = [answers(load(folder, arithmetic), rows) for folder in folders]
    nats = np.mean([nats for nats, _ in every], axis=0)
    recall = np.mean([recall for _, recall in every], axis=0)
    return Answers(nats=nats.round(6).tolist(), recall=recall.round(4).tolist())


def load(folder: Path, arithmetic: str) -> "PreTrainedModel":
    """Load a model that computes in an arithmetic."""
    config = ModelConfig(source=str(folder), dtype="float32")
    model = load_for_training(str(folder), open_config(str(folder)), config, "sdpa", torch.device("cpu")).eval()
    round_model(model, arithmetic)
    return model


@torch.no_grad()
def answers(model: "PreTrainedModel", rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean loss at right answers, float [distances, N], and the share of right ones, float [distances]."""
    nats_K, right_K = (np.zeros(len(rows.row)) for _ in range(2))
    for first in range(0, len(rows.input_ids), _ROWS_AT_A_TIME):
        ids_NT = torch.from_numpy(rows.input_ids[first : first + _ROWS_AT_A_TIME])
        mine = (rows.row >= first) & (rows.row < first + _ROWS_AT_A_TIME)
        hidden_NTM = hidden_states(model, batch_of(ids_NT), make_plan(torch.ones_like(ids_NT)))
        asked_KM = hidden_NTM[torch.from_numpy(rows.row[mine] - first), torch.from_numpy(rows.place[mine])]
        logs_KV, answers_KM = head_of(model)(asked_KM).log_softmax(-1), torch.from_numpy(rows.answers[mine])
        nats_K[mine] = -logs_KV.gather(-1, answers_KM).double().mean(-1).numpy()
        right_K[mine] = (logs_KV.argmax(-1, keepdim=True) == answers_KM).any(-1).numpy()
    places = [rows.distance == distance for distance in np.unique(rows.distance)]
    each = range(len(rows.input_ids))
    nats = np.array([[nats_K[place & (rows.row == row)].mean() for row in each] for place in places])
    return nats, np.array([right_K[place].mean() for place in places])


@torch.no_grad()
def scores_of(model: "PreTrainedModel", rows: Rows) -> list[dict[str, Tensor]]:
    """Return the queries and keys of each layer in some rows, [N, H, T, D] before RoPE, and the tables cos and sin."""
    ids_NT, kept, hooks = torch.from_numpy(rows.input_ids[:_ROWS_LOOKED_AT]), dict[str, list[Tensor]](), []
    body: Any = model.model
    for layer in body.layers:
        for name in ("q_proj", "k_proj"):
            put = kept.setdefault(name, []).append
            hooks.append(getattr(layer.self_attn, name).register_forward_hook(lambda *of, put=put: put(of[2])))
    batch = batch_of(ids_NT)
    hidden_NTM = hidden_states(model, batch, make_plan(torch.ones_like(ids_NT)))
    for hook in hooks:
        hook.remove()
    cos, sin = body.rotary_emb(hidden_NTM, batch["position_ids"])
    shape = (*ids_NT.shape, model.config.num_attention_heads, -1)
    pairs = zip(kept["q_proj"], kept["k_proj"], strict=True)
    return [
        {"q": q.view(shape).transpose(1, 2), "k": k.view(shape).transpose(1, 2), "cos": cos, "sin": sin}
        for q, k in pairs
    ]


def logits_of(layer: dict[str, Tensor], bits: int | None = None, place: str = "after") -> Tensor:
    """Return attention's logits [N, H, T, T], -inf where a key is later, with q and k rounded before or after RoPE."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = layer["q"], layer["k"]
    if bits is not None and place == "before":
        q, k = round_mantissa(q, bits), round_mantissa(k, bits)
    q, k = apply_rotary_pos_emb(q, k, layer["cos"], layer["sin"])
    if bits is not None and place == "after":
        q, k = round_mantissa(q, bits), round_mantissa(k, bits)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)


def sink_of(model: "PreTrainedModel", rows: Rows) -> float:
    """Return the largest share of its attention that a head gives to the first token, in a row's second half."""
    half = rows.input_ids.shape[1] // 2
    shares = [logits_of(layer).softmax(-1)[:, :, half:, 0].mean((0, 2)).max() for layer in scores_of(model, rows)]
    return round(float(max(shares)), 4)


def noise_of(model: "PreTrainedModel", rows: Rows, bits: Sequence[int]) -> dict[str, float]:
    """Return how far rounding moves attention's logits, and its probabilities, by arithmetic.

    Of each arithmetic, `bits7_after` is the root mean square of the error of a logit under the exact probabilities,
    less what moves all logits of a query, and `bits7_after probabilities` half the sum of how far the probabilities
    move; both in the mean over layers, heads, and the queries in the second half of a row.
    """
    layers, found = scores_of(model, rows), dict[str, float]()
    half = rows.input_ids.shape[1] // 2
    for number in bits:
        for place in ("before", "after"):
            squares, moved = list[float](), list[float]()
            for layer in layers:
                exact, rounded = (logits_of(layer, *of)[:, :, half:] for of in ((), (number, place)))
                weights = exact.softmax(-1)
                error = torch.where(weights > 0, rounded - exact, 0.0)
                error = error - (weights * error).sum(-1, keepdim=True)
                squares.append(float((weights * error**2).sum(-1).mean()))
                moved.append(float((rounded.softmax(-1) - weights).abs().sum(-1).mean() / 2))
            found[f"bits{number}_{place}"] = float(f"{np.mean(squares) ** 0.5:.4g}")
            found[f"bits{number}_{place} probabilities"] = float(f"{np.mean(moved):.4g}")
    return found


def batch_of(ids_NT: Tensor) -> dict[str, Tensor]:
    """Return rows [N, T] of one document each, as a batch."""
    return {
        "input_ids": ids_NT,
        "position_ids": torch.arange(ids_NT.shape[1]).expand(ids_NT.shape),
        "document_ids": torch.ones_like(ids_NT),
    }

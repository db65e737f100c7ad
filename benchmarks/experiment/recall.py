"""Measure how well a trained model answers questions, by the distance from the question to the fact.

A row is one document after a BOS, under plain causal attention, with positions that do not restart. The model computes
in the arithmetic that it was trained in.

Legend: N rows · T tokens of a row · Q queries of a row · H heads.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from benchmarks.experiment.facts import RecallRows
from benchmarks.experiment.spec import ARITHMETICS
from torchtrain.attention import make_plan
from torchtrain.config import ModelConfig
from torchtrain.modeling.load import load_for_training
from torchtrain.modeling.parts import head_of, hidden_states
from torchtrain.modeling.source import open_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS_AT_A_TIME = 8


class Measurement(BaseModel):
    """What was measured of one run: a number for each of its last checkpoints and each distance."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    recall: list[list[float]]  # [checkpoints][distances], share of answers that are given first
    nats: list[list[float]]  # [checkpoints][distances], mean loss at the answers
    losses: list[float]  # training loss, means of tenths of the run (of each step, if there are fewer)
    seconds: float


def measure(folders: Sequence[Path], arithmetic: str, rows: RecallRows) -> tuple[list[list[float]], list[list[float]]]:
    """Return recall and loss at the answers, [models][distances] each, distances in rising order.

    Args:
        folders: of the models.
        arithmetic: that the models compute in.
        rows: the input.
    """
    measured = []
    for folder in folders:
        config = ModelConfig(source=str(folder), dtype="float32", **ARITHMETICS[arithmetic])
        model = load_for_training(str(folder), open_config(str(folder)), config, "sdpa", torch.device("cpu")).eval()
        measured.append(recall(model, rows))
    return [shares for shares, _ in measured], [nats for _, nats in measured]


@torch.no_grad()
def recall(model: "PreTrainedModel", rows: RecallRows) -> tuple[list[float], list[float]]:
    """Return the share of questions that a model answers, and the loss at the answers, by rising distance."""
    right, loss = [], []
    for first in range(0, len(rows.input_ids), _ROWS_AT_A_TIME):
        part = slice(first, first + _ROWS_AT_A_TIME)
        ids_NT, queries_NQ = torch.from_numpy(rows.input_ids[part]), torch.from_numpy(rows.queries[part])
        hidden_NTM = hidden_states(model, batch_of(ids_NT), make_plan(torch.ones_like(ids_NT)))
        index = torch.arange(len(ids_NT))[:, None]
        logs_NQV = head_of(model)(hidden_NTM[index, queries_NQ]).log_softmax(-1)
        answers_NQ = ids_NT[index, queries_NQ + 1]
        right.append((logs_NQV.argmax(-1) == answers_NQ).numpy())
        loss.append(-logs_NQV.gather(-1, answers_NQ[..., None])[..., 0].numpy())
    distances = np.unique(rows.distances)
    shares, nats = (
        [float(all_NQ[rows.distances == distance].mean()) for distance in distances]
        for all_NQ in (np.concatenate(right), np.concatenate(loss))
    )
    return shares, nats


def batch_of(ids_NT: Tensor) -> dict[str, Tensor]:
    """Return rows [N, T] of one document each, as a batch."""
    return {
        "input_ids": ids_NT,
        "position_ids": torch.arange(ids_NT.shape[1]).expand(ids_NT.shape),
        "document_ids": torch.ones_like(ids_NT),
    }

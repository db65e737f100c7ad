"""The oracle's side of a case: truth and reference of every array.

Nothing here depends on the candidate, so that cases and bugs of the zoo share what was computed once.

Legend: B batch · T tokens of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxref.layout import lay_out
from jaxref.loss import IGNORED, mean_and_gradients, token_nll
from jaxref.model import Decoder
from jaxref.optim import step
from jaxref.rounding import preset
from jaxref.weights import cast, from_arrays, load_hf, to_arrays
from parity_tests.gate.case import CHUNKS, GateCase, RowTokens, tiny_weights
from parity_tests.gate.spec import CaseSpec
from parity_tests.oracle import Arrays, adamw_of, oracle_taps, preset_name, rates_of
from torchtrain.config import TrainConfig

QUERY_BLOCK = 256  # longer rows are attended by blocks of queries


@dataclass(frozen=True)
class OracleArrays:
    """Truth in float64 and what the rounding preset makes of it, by the same names. Exact arrays have a truth alone."""

    truth: Mapping[str, np.ndarray]
    reference: Mapping[str, np.ndarray]
    exact: Mapping[str, np.ndarray]


class Oracle:
    """Computes the oracle's side of cases, and keeps it for cases that share it. A real model's arrays fill memory:
    drop the object where no later case shares them.
    """

    def __init__(self) -> None:
        self._rounded: dict[tuple[CaseSpec, str], _RoundedOracle] = {}

    def side(self, case: GateCase) -> OracleArrays:
        """Return truth and reference of the case's stages: forward taps, `loss`, `gradients.*`, `trajectory.*`.

        The AdamW step is not among them: it is judged on the candidate's own gradients.
        """
        exact = self._get(case, "exact")
        sides = (exact, self._get(case, preset_name(case.spec.engine, case.spec.dtype)))
        truth, reference = (
            {k: v for stage in case.spec.stages for k, v in s.stage(stage, case).items()} for s in sides
        )
        inputs = {"forward": ("input_ids", "position_ids", "document_ids"), "loss": ("shift_labels",)}
        names = [name for stage in case.spec.stages for name in inputs.get(stage, ())]
        return OracleArrays(truth, reference, {f"inputs.{name}": exact.batch[name] for name in names})

    def _get(self, case: GateCase, name: str) -> "_RoundedOracle":
        key = case.spec.shared, name
        if key not in self._rounded:
            self._rounded[key] = _RoundedOracle(case, name)
        return self._rounded[key]


class _RoundedOracle:
    """The oracle under one preset on the rows of a case; each stage is computed once."""

    def __init__(self, case: GateCase, name: str) -> None:
        self._case, self._rounding, self._exact = case, preset(name), name == "exact"
        self._dtype: Any = "float64" if self._exact else case.spec.dtype
        # The five arrays (less the domains) of each row [1, T], and of all rows together [B, T].
        self._rows = [_lay_out(row, case.spec.variant, case.spec.position_offset) for row in case.rows]
        self.batch = {name: np.concatenate([row[name] for row in self._rows]) for name in self._rows[0]}
        self._block = QUERY_BLOCK if case.spec.tokens > 2 * QUERY_BLOCK else None
        self._trajectories: dict[tuple[str, int], Arrays] = {}

    def stage(self, stage: str, case: GateCase) -> Arrays:
        """Return the arrays of a stage; of a trajectory under the schedule of this case."""
        if stage == "trajectory":
            key = case.spec.schedule, case.spec.warmup_steps
            if key not in self._trajectories:
                self._trajectories[key] = self._run_steps(case.trajectory)
            return self._trajectories[key]
        return {} if stage == "step" else getattr(self, f"_{stage}")

    @cached_property
    def _decoder(self) -> Decoder:
        """The case's weights, rounded to its dtype; for the truth held in float64, so that gradients come out in it."""
        spec, config, folder = self._case.spec, self._case.decoder_config, self._case.oracle_folder
        if folder is None:
            arrays = tiny_weights(spec.against or spec.model, spec.seed)
        else:
            arrays = to_arrays(load_hf(Path(folder))[1])
        return cast(cast(from_arrays(config, arrays), spec.dtype), self._dtype)

    @cached_property
    def _forward(self) -> Arrays:
        return oracle_taps(self._decoder, self.batch, self._rounding, self._block)

    @cached_property
    def _loss(self) -> Arrays:
        logits_BTV, labels_BT = self._forward["logits"], self.batch["shift_labels"]
        parts = [slice(at, at + QUERY_BLOCK) for at in range(0, labels_BT.shape[1], QUERY_BLOCK)]
        nll = [np.asarray(token_nll(jnp.asarray(logits_BTV[:, at]), labels_BT[:, at])) for at in parts]
        nll_BT = np.concatenate(nll, axis=1)
        return {"loss.tokens": nll_BT, "loss": nll_BT.sum().reshape(1) / (labels_BT != IGNORED).sum()}

    @cached_property
    def _gradients(self) -> Arrays:
        _, gradients = self._losses_and_gradients(self._decoder)
        return {f"gradients.{parameter}": np.asarray(gradient) for parameter, gradient in gradients.items()}

    def _losses_and_gradients(self, decoder: Decoder) -> tuple[np.ndarray, dict[str, Any]]:
        """Of a step whose micro-batches are single rows: the loss of every token; gradients, each rounded where its
        parameter is stored, the sum taken in the carrier.
        """
        labelled = int((self.batch["shift_labels"] != IGNORED).sum())
        found = [mean_and_gradients(decoder, row, self._rounding, self._block, count=labelled) for row in self._rows]
        _, each, nll = zip(*found, strict=True)
        wide = jnp.float64 if self._rounding.carrier == "float64" else jnp.float32
        sums = {parameter: sum(gradients[parameter].astype(wide) for gradients in each) for parameter in each[0]}
        return np.concatenate(nll), sums

    def _run_steps(self, train: TrainConfig) -> Arrays:
        """The rate of each step, the loss of every token before it, its gradient's norm; all take the same rows."""
        decoder, rates = self._decoder, rates_of(train)
        masters = to_arrays(cast(decoder, self._rounding.carrier))
        optimizer = adamw_of(train, masters)
        state, norms = optimizer.init(masters), []
        found = {"trajectory.rates": rates if self._exact else rates.astype(np.float32)}
        for number in range(train.steps):
            found[f"trajectory.{number}"], gradients = self._losses_and_gradients(decoder)
            masters, state, norm = step(optimizer, masters, state, gradients)
            norms.append(float(norm))
            decoder = cast(from_arrays(decoder.config, masters), self._dtype)
        return found | {"trajectory.norms": np.array(norms)}


def _lay_out(row: RowTokens, variant: str, offset: int) -> Arrays:
    pieces = np.repeat(np.arange(len(row.lengths)), [min(CHUNKS, n) for n in row.lengths])
    laid = lay_out(
        row.lengths,
        variant.replace("+tag", ""),
        anchor=len(row.anchor),
        padding=row.padding,
        tag=len(row.tags[0]),
        chunks=CHUNKS,
        turns=np.random.default_rng(row.seed).permutation(pieces).tolist(),
    )
    tokens, labels = [row.anchor], [np.full_like(row.anchor, IGNORED)]
    for tag, document in zip(row.tags, row.documents, strict=True):
        tokens += [tag, document]
        labels += [np.full_like(tag, IGNORED), document[1:], np.array([IGNORED])]
    tokens.append(np.zeros(row.padding, dtype=np.int64))
    labels.append(np.full(row.padding, IGNORED))
    return {
        "input_ids": np.concatenate(tokens)[laid.source][None],
        "position_ids": laid.position_ids[None] + offset,
        "document_ids": laid.document_ids[None],
        "shift_labels": np.concatenate(labels)[laid.source][None],
    }

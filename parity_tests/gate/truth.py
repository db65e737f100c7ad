"""The oracle's side of a case: truth and reference of every array, each computed once a process.

Nothing here depends on the candidate, so that the zoo can ask for it again and again.

Legend: B batch · T tokens of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxref.layout import lay_out
from jaxref.loss import IGNORED, mean_and_gradients, token_nll
from jaxref.model import Decoder
from jaxref.optim import step
from jaxref.rounding import Rounding, preset
from jaxref.weights import cast, from_arrays, load_hf, to_arrays
from parity_tests.gate.material import CHUNKS, TINY, RowTokens, decoder_config, rows, source, tiny_weights, train_of
from parity_tests.gate.spec import CaseSpec, Schedule
from parity_tests.oracle import Arrays, adamw_of, oracle_taps, preset_name, rates_of

QUERY_BLOCK = 256  # longer rows are attended by blocks of queries


@dataclass(frozen=True)
class OracleArrays:
    """Truth in float64 and what the rounding preset makes of it, by the same names. Exact arrays have a truth alone."""

    truth: Mapping[str, np.ndarray]
    reference: Mapping[str, np.ndarray]
    exact: Mapping[str, np.ndarray]


class OracleKey(NamedTuple):
    """The fields of a case that the oracle depends on, but for those of a trajectory: what cases share."""

    model: str
    variant: str
    rope: str
    dtype: str
    tokens: int
    position_offset: int
    seed: int

    @classmethod
    def of(cls, spec: CaseSpec) -> "OracleKey":
        """Return the key of a case."""
        model = spec.against or spec.model
        return cls(model, *(getattr(spec, name) for name in cls._fields[1:]))

    @property
    def spec(self) -> CaseSpec:
        """The forward case that has this key."""
        return CaseSpec(**self._asdict())


def oracle_side(spec: CaseSpec) -> OracleArrays:
    """Truth and reference of the case's stages: forward taps, `loss`, `loss.tokens`, `gradients.*`, `trajectory.*`.

    The AdamW step is not among them: it is judged on the candidate's own gradients.
    """
    key = OracleKey.of(spec)
    run = {"forward": _forward, "loss": _loss, "gradients": _gradients}
    truth: Arrays = {}
    reference: Arrays = {}
    for stage in spec.stages:
        for arrays, name in ((truth, "exact"), (reference, preset_name(spec.engine, spec.dtype))):
            if stage == "trajectory":
                arrays |= _trajectory(key, name, spec.schedule, spec.warmup_steps)
            elif stage in run:
                arrays |= run[stage](key, name)
    batch, _ = _layout(key)
    inputs = {"forward": ("input_ids", "position_ids", "document_ids"), "loss": ("shift_labels",)}
    exact = {f"inputs.{name}": batch[name] for stage in spec.stages for name in inputs.get(stage, ())}
    return OracleArrays(truth, reference, exact)


def forget() -> None:
    """Drop everything remembered: a real model's arrays fill memory."""
    for remembered in (_decoder, _layout, _forward, _loss, _gradients, _trajectory):
        remembered.cache_clear()


@cache
def _decoder(key: OracleKey, weights: str) -> Decoder:
    """The case's weights, rounded to its dtype; for the truth held in float64, so that gradients come out in it."""
    spec = key.spec
    config = decoder_config(spec)
    if spec.model in TINY:
        decoder = from_arrays(config, tiny_weights(spec.model, spec.seed))
    else:
        _, loaded = load_hf(Path(source(spec.model)))
        decoder = from_arrays(config, to_arrays(loaded))
    return cast(cast(decoder, spec.dtype), weights)


def _side(key: OracleKey, name: str) -> tuple[Decoder, Rounding]:
    return _decoder(key, "float64" if name == "exact" else key.dtype), preset(name)


@cache
def _layout(key: OracleKey) -> tuple[Arrays, list[Arrays]]:
    """The five arrays (less the domains) of both rows together [2, T], and of each row [1, T]."""
    parts = [_lay_out(row, key.variant, key.position_offset) for row in rows(key.spec)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, parts


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


def _block(key: OracleKey) -> int | None:
    return QUERY_BLOCK if key.tokens > 2 * QUERY_BLOCK else None


@cache
def _forward(key: OracleKey, name: str) -> Arrays:
    decoder, rounding = _side(key, name)
    batch, _ = _layout(key)
    return oracle_taps(decoder, batch, rounding, _block(key))


@cache
def _loss(key: OracleKey, name: str) -> Arrays:
    logits_BTV, labels_BT = _forward(key, name)["logits"], _layout(key)[0]["shift_labels"]
    starts = range(0, key.tokens, QUERY_BLOCK)
    parts = [(logits_BTV[:, at : at + QUERY_BLOCK], labels_BT[:, at : at + QUERY_BLOCK]) for at in starts]
    nll_BT = np.concatenate([np.asarray(token_nll(jnp.asarray(logits), labels)) for logits, labels in parts], axis=1)
    return {"loss.tokens": nll_BT, "loss": nll_BT.sum().reshape(1) / (labels_BT != IGNORED).sum()}


@cache
def _gradients(key: OracleKey, name: str) -> Arrays:
    _, gradients = _losses_and_gradients(*_side(key, name), key)
    return {f"gradients.{parameter}": np.asarray(gradient) for parameter, gradient in gradients.items()}


def _losses_and_gradients(decoder: Decoder, rounding: Rounding, key: OracleKey) -> tuple[np.ndarray, dict[str, Any]]:
    """Of a step of two micro-batches: the loss of every token; gradients, each rounded where its parameter is stored,
    the sum taken in the carrier.
    """
    batch, parts = _layout(key)
    labelled = int((batch["shift_labels"] != IGNORED).sum())
    found = [mean_and_gradients(decoder, part, rounding, _block(key), count=labelled) for part in parts]
    _, each, nll = zip(*found, strict=True)
    wide = jnp.float64 if rounding.carrier == "float64" else jnp.float32
    sums = {parameter: sum(gradients[parameter].astype(wide) for gradients in each) for parameter in each[0]}
    return np.concatenate(nll), sums


@cache
def _trajectory(key: OracleKey, name: str, schedule: Schedule, warmup_steps: int) -> Arrays:
    """The rate of each step, the loss of every token before it, its gradient's norm; all steps take the same rows."""
    decoder, rounding = _side(key, name)
    spec = key.spec.model_copy(update={"schedule": schedule, "warmup_steps": warmup_steps})
    train = train_of(spec, trajectory=True)
    rates = rates_of(train)
    masters = to_arrays(cast(decoder, rounding.carrier))
    optimizer = adamw_of(train, masters)
    state, norms = optimizer.init(masters), []
    found = {"trajectory.rates": rates if name == "exact" else rates.astype(np.float32)}
    for number in range(train.steps):
        found[f"trajectory.{number}"], gradients = _losses_and_gradients(decoder, rounding, key)
        masters, state, norm = step(optimizer, masters, state, gradients)
        norms.append(float(norm))
        decoder = cast(from_arrays(decoder.config, masters), "float64" if name == "exact" else key.dtype)
    return found | {"trajectory.norms": np.array(norms)}

"""The oracle's side of a case: truth and reference of every array.

Nothing here depends on the candidate, so that cases and bugs of the zoo share what was computed once.

Legend: B batch · T tokens of a row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from anchorline.tolerance import likely_error_of_norms
from jaxref.layout import lay_out
from jaxref.loss import IGNORED, batch_nll, context_weights, mean_and_gradients, token_nll, total_weight
from jaxref.mask import ANCHOR, PADDING, visible_BQJ
from jaxref.model import Decoder, to_arrays
from jaxref.optim import step
from jaxref.rounding import preset
from jaxref.storage.weights import cast, from_arrays, load_hf
from parity_tests.gate.case import CHUNKS, WEIGHTS, GateCase, RowTokens, insert_padding, tiny_config, tiny_weights
from parity_tests.gate.corpus import DOMAINS, draw_corpus
from parity_tests.gate.spec import CaseSpec
from parity_tests.oracle import Arrays, adamw_of, likely_errors_of_rotation, oracle_taps, preset_name, rates_of
from torchtrain.config import TrainConfig

QUERY_BLOCK = 256  # longer rows are attended by blocks of queries
_OF_WEIGHTS = ".of_weights"  # norms [steps, weights], for `likely_error_of_norms`
OTHER_BLOCK = 16  # in which gradients of a real model are summed a second time


def preset_of(spec: CaseSpec) -> str:
    """Return the rounding preset of a case's reference."""
    return preset_name(spec.engine, spec.dtype, spec.rotation)


@dataclass(frozen=True)
class OracleArrays:
    """Truth in float64 and what the rounding preset makes of it, by the same names. Exact arrays have a truth alone.

    likely: what a reference of some arrays may well err (`judge`'s `likely_error`).
    retrain: the losses of the last of so many steps, under other settings.
    """

    truth: Mapping[str, np.ndarray]
    reference: Mapping[str, np.ndarray]
    exact: Mapping[str, np.ndarray]
    likely: Mapping[str, float] = field(default_factory=dict)
    retrain: Callable[[TrainConfig, int], np.ndarray] | None = None


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
        sides = (exact, self._get(case, preset_of(case.spec)))
        truth, reference = (
            {k: v for stage in case.spec.stages for k, v in s.stage(stage, case).items()} for s in sides
        )
        inputs = {
            "forward": ("input_ids", "position_ids", "document_ids"),
            "loss": ("shift_labels", *["weights"] * case.spec.weights),
        }
        names = [name for stage in case.spec.stages for name in inputs.get(stage, ())]
        same = {f"inputs.{name}": exact.batch[name] for name in names} | (exact.of_run if case.spec.is_run else {})
        same |= {
            f"{stage}.counts": exact.counts(stage, case) for stage in ("forward", "loss") if stage in case.spec.stages
        }
        likely = dict(exact.likely)
        if case.oracle_folder is not None and "gradients" in case.spec.stages:
            likely |= self._errors_of_orders(case, truth, reference)
        for name in [name for name in truth if name.endswith(_OF_WEIGHTS)]:
            likely[name.removesuffix(_OF_WEIGHTS)] = likely_error_of_norms(truth.pop(name), reference.pop(name))
        rounded = self._get(case, preset_of(case.spec))
        return OracleArrays(truth, reference, same, likely, lambda train, steps: rounded.retrain(case, train, steps))

    def _errors_of_orders(self, case: GateCase, truth: Arrays, reference: Arrays) -> dict[str, float]:
        """What the gradients err on the root mean square over two orders of summation, by name.

        A real model gives most of its attention to a row's first token. The error of that token's key is then one sum
        over all queries for each head, and with it the error of a norm's weight. In float32 one order had a third of
        such an error of three others (SmolLM2, layer 18).
        """
        key, name = (case.spec.shared, "another order"), preset_of(case.spec)
        other = self._rounded.setdefault(key, _RoundedOracle(case, name, OTHER_BLOCK)).stage("gradients", case)
        squares = [{n: np.mean(np.square(side[n] - truth[n])) for n in other} for side in (reference, other)]
        return {name: float(np.sqrt((squares[0][name] + squares[1][name]) / 2)) for name in other}

    def _get(self, case: GateCase, name: str) -> "_RoundedOracle":
        key = case.spec.shared, name
        if key not in self._rounded:
            self._rounded[key] = _RoundedOracle(case, name)
        return self._rounded[key]


class _RoundedOracle:
    """The oracle under one preset on the rows of a case; each stage is computed once."""

    def __init__(self, case: GateCase, name: str, block: int | None = None) -> None:
        self._case, self._rounding, self._exact = case, preset(name), name == "exact"
        self._dtype: Any = "float64" if self._exact else case.spec.dtype
        # The five arrays (less the domains) of each row [1, T], and of all rows together [B, T].
        self._rows = self._lay_out(case.rows)
        self.batch = {name: np.concatenate([row[name] for row in self._rows]) for name in self._rows[0]}
        self.of_run: Arrays = {}
        self.likely: dict[str, float] = {}
        self._block = block or (QUERY_BLOCK if case.spec.tokens > 2 * QUERY_BLOCK else None)
        self._trajectories: dict[tuple[str, str, int, int], Arrays] = {}

    def stage(self, stage: str, case: GateCase) -> Arrays:
        """Return the arrays of a stage; of a trajectory under the schedule of this case."""
        if stage in ("trajectory", "run"):
            key = stage, case.spec.schedule, case.spec.warmup_steps, case.spec.infinite_step
            if key not in self._trajectories:
                run = stage == "run"
                self._trajectories[key] = self._run(case) if run else self._run_steps(case)
            return self._trajectories[key]
        return {} if stage == "step" else getattr(self, f"_{stage}")

    def counts(self, stage: str, case: GateCase) -> np.ndarray:
        """Numbers that no array shows. forward: visible pairs, longest segment in queries and in keys, and segments.
        loss: visible pairs in the mean over layers, and labels, of a step.
        """
        ids_BT = self.batch["document_ids"]
        if stage == "forward":
            sizes = [
                ((row == document).sum(), (row == ANCHOR).sum() * (document != ANCHOR))
                for row in ids_BT
                for document in np.unique(row[row != PADDING])
            ]
            queries, in_front = np.array(sizes).T
            pairs = sum(_count_pairs(row) for row in ids_BT)
            return np.array([pairs, queries.max(), (queries + in_front).max(), len(queries)])
        windows, keep = case.decoder_config.windows, case.decoder_config.keep_anchor
        each = {window: [_count_pairs(row, window, keep) for row in ids_BT] for window in set(windows)}
        pairs = sum(round(sum(of_row) / len(windows)) for of_row in zip(*(each[w] for w in windows), strict=True))
        return np.array([pairs, (self.batch["shift_labels"] != IGNORED).sum()]) * case.spec.ranks * case.spec.repeats

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
        taps = oracle_taps(self._decoder, self.batch, self._rounding, self._block)
        self.likely |= likely_errors_of_rotation(self._decoder, taps, self.batch["position_ids"])
        return taps

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

    def _losses_and_gradients(
        self, decoder: Decoder, rows: Sequence[Arrays] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Of a step whose micro-batches are single rows: the loss of every token; gradients, each rounded where its
        parameter is stored, the sum taken in the carrier. `rows`: None is the case's.
        """
        rows = self._rows if rows is None else rows
        labelled = sum(total_weight(row) for row in rows)
        found = [mean_and_gradients(decoder, row, self._rounding, self._block, count=labelled) for row in rows]
        _, each, nll = zip(*found, strict=True)
        wide = jnp.float64 if self._rounding.carrier == "float64" else jnp.float32
        sums = {parameter: sum(gradients[parameter].astype(wide) for gradients in each) for parameter in each[0]}
        return np.concatenate(nll), sums

    def _run_steps(self, case: GateCase) -> Arrays:
        """The rate of each step, the loss of every token before it, its gradient's norm; all take the same rows."""
        train = case.trajectory
        masters = to_arrays(cast(self._decoder, self._rounding.carrier))
        losses, norms, _, _ = self._train(self._decoder, masters, case, train, [self._rows] * train.steps)
        found = {f"trajectory.{number}": step_losses for number, step_losses in enumerate(losses)}
        return {"trajectory.rates": self._rates(train), **found} | _norms("trajectory", norms)

    def retrain(self, case: GateCase, train: TrainConfig, steps: int) -> np.ndarray:
        """Return the losses of the last of the first steps of a trajectory under other settings."""
        masters = to_arrays(cast(self._decoder, self._rounding.carrier))
        return self._train(self._decoder, masters, case, train, [self._rows] * steps)[0][-1]

    def _rates(self, train: TrainConfig) -> np.ndarray:
        return rates_of(train) if self._exact else rates_of(train).astype(np.float32)

    def _train(
        self, decoder: Decoder, masters: Any, case: GateCase, train: TrainConfig, rows: Sequence[Sequence[Arrays]]
    ) -> tuple[list[np.ndarray], list[tuple[float, list[float]]], Any, Decoder]:
        """Take the steps, each on rows of its own; return losses, norms, and the masters and decoder after them.

        A step has the global norm of its gradient and the norm of each weight's.

        A step whose gradient is infinite changes neither weights nor moments, and the schedule goes on.
        """
        optimizer = adamw_of(train, masters, case.spec.infinite_step)
        state, losses, norms = optimizer.init(masters), [], []
        for number, own in enumerate(rows, start=1):
            step_losses, gradients = self._losses_and_gradients(decoder, own)
            losses.append(step_losses)
            if number == case.spec.infinite_step:
                norms.append((np.inf, [np.inf] * len(gradients)))
                continue
            masters, state, norm = step(optimizer, masters, state, gradients)
            norms.append(
                (float(norm), [float(np.linalg.norm(np.ravel(g).astype(np.float64))) for g in gradients.values()])
            )
            decoder = cast(from_arrays(decoder.config, masters), self._dtype)
        return losses, norms, masters, decoder

    def _run(self, case: GateCase) -> Arrays:
        """The arrays of a whole run; those that must be exact are left in `of_run`."""
        train = case.run
        spec, config, corpus = self._case.spec, self._case.decoder_config, draw_corpus(self._case.spec)
        rows, held_out = self._lay_out(corpus.training_rows()), self._lay_out(corpus.held_out_rows())
        # Master weights start from the file's numbers; the weights are these, rounded to the run's dtype.
        masters = to_arrays(cast(from_arrays(config, tiny_weights(spec.model, spec.seed)), self._rounding.carrier))
        begin = cast(from_arrays(config, masters), self._dtype)
        steps = [rows[at : at + train.sequences_per_step] for at in range(0, len(rows), train.sequences_per_step)]
        losses, norms, masters, decoder = self._train(begin, masters, case, train, steps)
        found = {f"run.losses.{number}": step_losses for number, step_losses in enumerate(losses)}
        found |= {"run.rates": self._rates(train)} | _norms("run", norms)
        batch = {name: np.concatenate([row[name] for row in held_out]) for name in held_out[0]}
        labelled_BT = batch["shift_labels"] != IGNORED
        new_BT = batch["position_ids"] >= tiny_config(spec).max_position_embeddings
        parts = {"": labelled_BT, ".new_positions": labelled_BT & new_BT}
        parts |= {f".{domain}": labelled_BT & (batch["domain_ids"] == i) for i, domain in enumerate(DOMAINS)}
        parts = {name: chosen_BT for name, chosen_BT in parts.items() if chosen_BT.any()}
        for name, model in (("before", begin), ("after", decoder)):
            nll_BT = np.asarray(batch_nll(model, batch, self._rounding, self._block))
            for of, chosen_BT in parts.items():
                found[f"run.held_out.{name}{of}.tokens"] = own_BT = np.where(chosen_BT, nll_BT, 0)
                found[f"run.held_out.{name}{of}"] = own_BT.sum().reshape(1) / chosen_BT.sum()
        found |= {f"run.masters.{name}": np.asarray(master) for name, master in masters.items()}
        taps = oracle_taps(decoder, batch, self._rounding, self._block)
        found |= {f"run.exported.{name}": tap for name, tap in taps.items()}
        likely = likely_errors_of_rotation(decoder, taps, batch["position_ids"])
        self.likely |= {f"run.exported.{name}": error for name, error in likely.items()}
        self.of_run = {f"run.inputs.{name}": np.concatenate([row[name] for row in rows]) for name in rows[0]}
        # Of the model and of its tokenizer.
        self.of_run["run.lengths"] = np.array([max(spec.tokens, config.max_position_embeddings)] * 2)
        return found

    def _lay_out(self, rows: Iterable[RowTokens]) -> list[Arrays]:
        spec = self._case.spec
        laid = [_lay_out(row, spec.variant, spec.position_offset) for row in rows]
        if not spec.weights:
            return laid
        ids_BT, labels_BT = (np.concatenate([row[name] for row in laid]) for name in ("document_ids", "shift_labels"))
        weights_BT = context_weights(ids_BT, labels_BT, WEIGHTS.tail, WEIGHTS.extra, WEIGHTS.most)
        return [row | {"weights": own_T[None]} for row, own_T in zip(laid, weights_BT, strict=True)]


def _count_pairs(ids_T: np.ndarray, window: int | None = None, keep_anchor: bool = False) -> int:
    parts = [slice(at, at + QUERY_BLOCK) for at in range(0, len(ids_T), QUERY_BLOCK)]
    return sum(int(visible_BQJ(ids_T[None], part, None, window, keep_anchor).sum()) for part in parts)


def _norms(stage: str, norms: Sequence[tuple[float, list[float]]]) -> Arrays:
    of_step, of_weights = zip(*norms, strict=True)
    return {f"{stage}.norms": np.array(of_step), f"{stage}.norms{_OF_WEIGHTS}": np.array(of_weights)}


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
        targets=[targets.tolist() for targets in row.targets] or None,
    )
    tokens, labels = [row.anchor], [np.full_like(row.anchor, IGNORED)]
    domains = [np.full_like(row.anchor, -1)]
    for tag, document, domain in zip(row.tags, row.documents, row.domains, strict=True):
        tokens += [tag, document]
        labels += [np.full_like(tag, IGNORED), document[1:], np.array([IGNORED])]
        domains.append(np.full(len(tag) + len(document), domain))
    tokens.append(np.zeros(row.padding, dtype=np.int64))
    labels.append(np.full(row.padding, IGNORED))
    domains.append(np.full(row.padding, -1))
    laid_out = {
        "input_ids": np.concatenate(tokens)[laid.source],
        "position_ids": laid.position_ids + offset,
        "document_ids": laid.document_ids,
        "shift_labels": np.where(laid.labelled, np.concatenate(labels)[laid.source], IGNORED),
        "domain_ids": np.concatenate(domains)[laid.source],
    }
    return {name: array[None] for name, array in insert_padding(laid_out, row.holes).items()}

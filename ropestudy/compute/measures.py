"""The paper's measures (arXiv 2411.13476, equations 4 and 5), made from the sums of the engine.

Legend: T tokens of a row · L layers · H heads · j column (key) · i row (query).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxref.mask import ANCHOR, PADDING
from ropestudy.schema import Columns, Difference, OutputDivergence, Stat


@dataclass(frozen=True)
class Sums:
    """Sums of |a - b|, the difference of the attention of two runs of one row. All are float64."""

    column_T: np.ndarray  # sum over layers, heads, queries of |dATTN|
    logit_T: np.ndarray  # the same of logits, visible pairs
    row_T: np.ndarray  # sum over layers, heads, keys of |dATTN|
    mass_T: np.ndarray  # sum over layers, heads, queries of ATTN of run a
    heads: int  # of all layers


class Sample(Difference[float]):
    """The difference of one sequence, and its columns."""

    columns: dict[str, list[float]]


DivergenceSample = OutputDivergence[float]


def queries_of_columns(document_ids_T: np.ndarray) -> np.ndarray:
    """Count the queries that see each column, int64 [T]: 0 for padding. Under `full` T, T - 1, ..., 1."""
    document_ids_T = np.asarray(document_ids_T)
    T = len(document_ids_T)
    real = document_ids_T != PADDING
    count = np.zeros(T, np.int64)
    for document in np.unique(document_ids_T[real]):
        seers = real if document == ANCHOR else document_ids_T == document
        later = np.cumsum(seers[::-1])[::-1]  # seers at this index or after it
        own = document_ids_T == document
        count[own] = later[own]
    return count


def weights(document_ids_T: np.ndarray) -> np.ndarray:
    """Return the paper's n: one over the queries that see each column, [1/T, ..., 1] under `full`; 0 for padding.

    Float64 [T].
    """
    count_T = queries_of_columns(document_ids_T)
    return np.where(count_T > 0, 1 / np.maximum(count_T, 1), 0.0)


def sample(sums: Sums, document_ids_T: np.ndarray) -> Sample:
    """Return every measure of one sequence. A quotient whose denominator is 0 (nothing differs) is 0."""
    n_T, count_T = weights(document_ids_T), queries_of_columns(document_ids_T)
    weighted_T, weighted_logit_T = n_T * sums.column_T, n_T * sums.logit_T
    return Sample(
        d=weighted_T.sum(),
        first_share=_quotient(weighted_T[0], weighted_T.sum()),
        first_mass_unweighted=_quotient(sums.mass_T[0], sums.mass_T.sum()),
        d_logit_first=weighted_logit_T[0],
        d_logit_rest=_quotient(weighted_logit_T[1:].sum(), int(np.count_nonzero(count_T[1:]))),
        row=sums.row_T.sum() / (np.count_nonzero(count_T) * sums.heads),
        columns={"d": weighted_T.tolist(), "d_logit": weighted_logit_T.tolist()},
    )


def stat(values: Sequence[float]) -> Stat:
    """Return the mean of a number over the sequences, with its values."""
    array = np.asarray(values, np.float64)
    return Stat(mean=float(array.mean()), values=array.tolist())


def difference(samples: Sequence[Sample]) -> Difference[Stat]:
    """Return the difference over all sequences."""
    return Difference[Stat](**{name: stat([getattr(one, name) for one in samples]) for name in Difference.model_fields})


def columns(samples: Sequence[Sample]) -> Columns:
    """Return the difference token by token, the mean over all sequences."""
    together = {name: np.array([one.columns[name] for one in samples]) for name in samples[0].columns}
    return Columns(**{name: x.mean(0).tolist() for name, x in together.items()})


def divergence(samples: Sequence[OutputDivergence[float]]) -> OutputDivergence[Stat]:
    """Return the divergence over all sequences."""
    values = {
        name: [getattr(one, name) for one in samples]
        for name in OutputDivergence.model_fields
        if all(getattr(one, name) is not None for one in samples)
    }
    return OutputDivergence[Stat](**{name: stat(each) for name, each in values.items()})


def _quotient(x: float, y: float) -> float:
    return float(x / y) if y else 0.0

"""The oracle's emulated roundings beside transformers' own attention.

Legend: L layers · H query heads · K key/value heads · G = H / K · T tokens of a row · D head_dim.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from jaxref.model import Decoder
from jaxref.rounding import Rounding, preset
from parity_tests.oracle import oracle_taps, preset_name
from parity_tests.study.beside import Attended, side_by_side
from parity_tests.study.kept import OfRow
from parity_tests.tolerance import Verdict, judge
from ropestudy import schema
from ropestudy.measures import stat, weights
from ropestudy.pieces import probabilities
from ropestudy.text import RowArrays


class Emulated(OfRow):
    """The check. Lists are root mean squares by layer; ratios are of `parity_tests.tolerance`: up to 1 passes."""

    error: list[float]
    reference: list[float]
    ratio: list[float]
    between: list[float]
    identical: list[float]
    shift_error: list[float]  # of the difference between the two shifts
    shift_reference: list[float]
    shift_size: list[float]  # of the truth
    d_ratio: float  # of the paper's D, column by column of each layer
    d_oracle: float
    d_torch: float


def check_row(model: Any, decoder: Decoder, one: RowArrays, d1: int = 0, d2: int = 16) -> Emulated:
    """Transformers' eager attention of one row beside the oracle's, by the one rule, in two questions.

    Is the attention at d1 as near to float64 on the same weights as the emulation's own? And is the *difference*
    between the shifts, which is what the study is made of, the emulation's: the truth is then the same roundings in a
    float64 carrier, and the allowance what the oracle's own float32 carrier moves of it (`shift_verdict`). A model that
    rounds elsewhere may be as near to float64; it fails the second.

    decoder: the oracle on the model's own weights (`oracle_of`).
    """
    started = time.perf_counter()
    dtype = str(model.dtype).removeprefix("torch.")
    ours = preset(preset_name("eager", model.dtype))
    same, exact = ours.replace(carrier="float64"), preset("exact")
    asked = [(exact, d1), *((rounding, d) for rounding in (same, ours) for d in (d1, d2))]
    rotated = [oracle_qk(decoder, one.ids, one.positions + d, rounding) for rounding, d in asked]
    T = len(one.ids)
    seen, n_T = np.tril(np.ones((T, T), bool)), weights(one.documents)
    lists = [name for name, field in Emulated.model_fields.items() if field.annotation is not float]
    own: dict[str, list[float]] = {name: [] for name in lists}
    columns_L3T: list[Any] = []  # of torch, the truth and the oracle: n_j sum_i |dATTN_ij|

    def at_layer(layer: int, runs: list[Attended]) -> None:
        torchs = [run.block(0, T)[0].cpu().numpy() for run in runs]
        truth, same1, same2, ours1, ours2 = (
            oracle_probabilities(qk[layer], rounding) for qk, (rounding, _) in zip(rotated, asked, strict=True)
        )
        verdict = judge(torchs[0][:, seen], truth[:, seen], ours1[:, seen], dtype)
        differences = (torchs[0] - torchs[1], same1 - same2, ours1 - ours2)
        moved, moved_truth, moved_ours = (x[:, seen] for x in differences)
        columns_L3T.append([n_T * np.abs(x).sum((0, 1)) for x in differences])
        own["error"].append(verdict.error)
        own["ratio"].append(verdict.ratio)
        own["shift_error"].append(_rms(moved - moved_truth))
        own["shift_reference"].append(_rms(moved_ours - moved_truth))
        own["shift_size"].append(_rms(moved_truth))
        own["reference"].append(_rms((ours1 - truth)[:, seen]))
        own["between"].append(_rms((torchs[0] - ours1)[:, seen]))
        own["identical"].append(float(np.mean((torchs[0] == ours1)[:, seen])))

    side_by_side(model, one.ids, one.positions + np.array([[d1], [d2]]), at_layer)
    d_torch, d_truth, d_oracle = np.array(columns_L3T).swapaxes(0, 1)
    return Emulated(
        **own,  # type: ignore[arg-type]
        d_ratio=judge(d_torch, d_truth, d_oracle, dtype).ratio,
        d_torch=d_torch.sum(),
        d_oracle=d_oracle.sum(),
        seconds=time.perf_counter() - started,
    )


def shift_verdict(rows: Sequence[Emulated], dtype: str, layers: int | None = None) -> Verdict:
    """The second question of `check_row` over all rows, of one size, and the first layers; `worst` is (row, layer).

    Of arrays of one size, the root mean square over all is that of their own: the rule over them is the rule over
    these. In few layers and a small model the answer hangs on luck: few sums of float32 lie so near the middle between
    two numbers of bf16 that another order turns them. In many layers every two bf16 runs have parted.
    """
    size, error, reference = (
        np.array([getattr(one, f"shift_{name}")[:layers] for one in rows]) for name in ("size", "error", "reference")
    )
    return judge(size + error, size, size + reference, dtype)


def emulation_record(
    rows: Sequence[Emulated], tokens: int, attention_from: str, condition: str, dtype: str, d1: int, d2: int
) -> schema.EmulationCheck:
    """The sequences together: root mean squares over all, and the largest ratio of each layer."""

    def of(name: str, together: Callable[[Any], Any]) -> list[float]:
        return [float(together(values)) for values in zip(*(getattr(one, name) for one in rows), strict=True)]

    return schema.EmulationCheck(
        model="pretrained",
        condition=condition,
        attention_from=attention_from,
        tokens=tokens,
        sequences=len(rows),
        dtype=dtype,
        layers=list(range(len(rows[0].ratio))),
        error=of("error", _rms),
        reference=of("reference", _rms),
        ratio=of("ratio", max),
        between=of("between", _rms),
        identical=of("identical", np.mean),
        shift_ratio=shift_verdict(rows, dtype).ratio,
        shift_ratio_first=shift_verdict(rows, dtype, 1).ratio,
        d_ratio=max(one.d_ratio for one in rows),
        d_oracle=stat([one.d_oracle for one in rows]),
        d_torch=stat([one.d_torch for one in rows]),
        d1=d1,
        d2=d2,
    )


def oracle_qk(
    decoder: Decoder, ids_T: np.ndarray, positions_T: np.ndarray, rounding: Rounding
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rotated q [T, H, D] and k [T, K, D] of every layer of the oracle's own forward pass, in the carrier."""
    batch = {
        "input_ids": torch.from_numpy(ids_T)[None],
        "position_ids": torch.from_numpy(positions_T)[None],
        "document_ids": torch.ones(1, len(ids_T), dtype=torch.int64),
    }
    taps = oracle_taps(decoder, batch, rounding)
    layers = range(decoder.config.num_hidden_layers)
    q, k = ([taps[f"layers.{i}.{name}"][0].astype(rounding.dtype) for i in layers] for name in ("q_rope", "k_rope"))
    return list(zip(q, k, strict=True))


def oracle_probabilities(qk: tuple[np.ndarray, np.ndarray], rounding: Rounding) -> np.ndarray:
    """The oracle's softmax under `full` on q [T, H, D] and k [T, K, D], float64 [H, T, T]."""
    q_THD, k_TKD = qk
    T, H, D = q_THD.shape
    K = k_TKD.shape[1]
    k_1TKGD = np.broadcast_to(k_TKD[None, :, :, None], (1, T, K, H // K, D))
    q_1TKGD = jnp.asarray(q_THD.reshape(1, T, K, H // K, D))
    mask = jnp.asarray(np.tril(np.ones((T, T), bool)))
    found, _ = probabilities(q_1TKGD, jnp.asarray(k_1TKGD), mask, rounding, D**-0.5)
    return np.asarray(found, np.float64).reshape(H, T, T)


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))

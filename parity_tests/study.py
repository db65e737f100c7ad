"""The precision study with attention taken from a torch model, so that real kernels are studied and not their emulation.

    python -m parity_tests.study configs/study/demo.yaml --implementation eager --out runs/study-torch
    python -m jaxref.study.report runs/study --beside runs/study-torch      # both on one page

Only `propagated` can be had from a whole model, so of a study's sections `shift_pairs` is run, for its pretrained model. With
`eager` the attention is what transformers returns. Any other implementation does not return it: there it is made in float64
from the rotated q and k that the model's own kernels computed, so the roundings of its softmax are left out, and every record
says so.

The shifts of a sequence are forward passes that go through the model side by side and meet at every layer (`side_by_side`).
There they are compared in blocks of queries, so nothing of size T x T is kept but what `eager` itself returns, and of that
one layer at a time. Each pass is a batch of one, as in any use of the model: a batch of all shifts multiplies matrices of
another height, for which a library may sum in another order, and would measure that too.

With `eager` the run also checks the emulation (`check_row`): transformers' attention beside the oracle's.

Every sequence is kept under --out as it is finished; the same command goes on behind the last.

Legend: S shifts, side by side · P pairs of them · L layers · H query heads · K key/value heads · G = H / K · T tokens of a row ·
Q queries of a block · D head_dim.
"""

import hashlib
import importlib.metadata
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax.numpy as jnp
import numpy as np
import torch
import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from jaxref.model import Decoder
from jaxref.rope import inverse_frequencies
from jaxref.rounding import Rounding, preset
from jaxref.study import schema
from jaxref.study.cells import fingerprint
from jaxref.study.measures import Sample, Sums, columns, difference, sample, stat, weights
from jaxref.study.models import Pretrained, load_pretrained
from jaxref.study.pieces import probabilities
from jaxref.study.report import write_report
from jaxref.study.run import CELLS, RESULTS, Progress, claim, describe, environment, write_config
from jaxref.study.spec import SHORTEST, ShiftPairsConfig, StudyConfig, load_study
from jaxref.study.text import RowArrays, read_pool, row
from parity_tests.layers import oracle_of, oracle_taps, preset_name
from parity_tests.tolerance import Verdict, judge

DTYPES = ("bfloat16", "float16", "float32")
CHECKED = 256  # tokens of a sequence whose emulation is checked: whole matrices of one layer are held there


@dataclass(frozen=True)
class Attended:
    """One run at one layer, in the model's dtype and on its device: rotated q [H, T, D], k [K, T, D]; weights [H, T, T] where
    the implementation returns them."""

    q: Tensor
    k: Tensor
    weights: Tensor | None
    scale: float

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Probabilities and scaled logits of queries start..stop over keys 0..stop, float64 [H, Q, stop]; 0 where unseen."""
        H, _, D = self.q.shape
        q_KGQD = self.q[:, start:stop].double().reshape(len(self.k), -1, stop - start, D)
        k_K1TD = self.k[:, None, :stop].double()
        logits = (q_KGQD @ k_K1TD.transpose(-1, -2) * self.scale).reshape(H, stop - start, stop)
        index = torch.arange(stop, device=logits.device)
        unseen = index[start:, None] < index
        if self.weights is not None:
            return self.weights[:, start:stop, :stop].double(), logits.masked_fill(unseen, 0)
        return logits.masked_fill(unseen, -torch.inf).softmax(-1), logits.masked_fill(unseen, 0)


def side_by_side(
    model: Any, ids_T: np.ndarray, positions_ST: np.ndarray, at_layer: Callable[[int, list[Attended]], None]
) -> None:
    """A forward pass for each row of positions; `at_layer(layer, runs)` is called when all have attended in that layer.

    Each pass is a thread and a batch of its own. They take turns, so what a pass needs while it computes is there once; what
    stays of each is its hidden states and one layer's `Attended`. An error of a pass or of `at_layer` is raised here.
    """
    device = model.device
    ids = torch.from_numpy(ids_T)[None].to(device)
    turn, own, failed, layers = threading.Lock(), threading.local(), [], count()
    runs: list[Any] = [None] * len(positions_ST)

    def all_are_here() -> None:
        with torch.no_grad():
            at_layer(next(layers), runs)
        runs[:] = [None] * len(runs)

    meeting = threading.Barrier(len(runs), all_are_here)

    def attended(found: Attended) -> None:
        runs[own.place] = found
        turn.release()
        try:
            meeting.wait()
        finally:
            turn.acquire()

    def forward(place: int) -> None:
        own.place = place
        positions = torch.from_numpy(positions_ST[place])[None].to(device)
        try:
            with turn, torch.no_grad():
                model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        except threading.BrokenBarrierError:
            pass  # another pass failed, and says why
        except BaseException as error:  # whatever it is, the others must not wait for this one
            failed.append(error)
            meeting.abort()

    with _probe(model, attended):
        threads = [threading.Thread(target=forward, args=(place,)) for place in range(len(runs))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # an interrupt: every pass stops at its next layer
            if any(thread.is_alive() for thread in threads):
                meeting.abort()
                for thread in threads:
                    thread.join()
    if failed:
        raise failed[0]


@contextmanager
def _probe(model: Any, attended: Callable[[Attended], None]) -> Iterator[None]:
    """Show what goes into the model's attention function, and the weights it returns; the model itself gets none back."""
    chosen = model.config._attn_implementation

    def probe(module: Any, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        if chosen == "eager":  # transformers keeps it in each model's own file
            attend = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attend = ALL_ATTENTION_FUNCTIONS[chosen]
        out, returned = attend(module, query, key, *rest, **named)
        scale = named.get("scaling", query.shape[-1] ** -0.5)
        attended(Attended(query[0], key[0], None if returned is None else returned[0], scale))
        return out, None

    AttentionInterface.register("study_probe", probe)
    AttentionMaskInterface.register("study_probe", AttentionMaskInterface()[chosen])
    model.set_attn_implementation("study_probe")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


class PairSums:
    """`Sums` of pairs of runs of a row under `full`, layer by layer in blocks of queries: what `engine.compare` sums."""

    def __init__(self, tokens: int, pairs: Sequence[tuple[int, int]], block: int, device: Any = "cpu"):
        """pairs: places of two runs each. Memory is S H block T, in float64."""
        self.pairs, self.block = pairs, block
        self._n_T = torch.from_numpy(weights(np.ones(tokens, np.int64))).to(device)
        parts = ("column", "logit", "row", "mass")
        self._of = {name: torch.zeros(len(pairs), tokens, dtype=torch.float64, device=device) for name in parts}
        self._square_P = torch.zeros(len(pairs), dtype=torch.float64, device=device)
        self._head_LPH: list[Tensor] = []

    def add(self, layer: int, runs: list[Attended]) -> None:
        """Add one layer."""
        assert layer == len(self._head_LPH)
        T, H = len(self._n_T), len(runs[0].q)
        head_PH = self._n_T.new_zeros(len(self.pairs), H)
        for start in range(0, T, self.block):
            stop = min(start + self.block, T)
            blocks = [run.block(start, stop) for run in runs]
            mass_ST = [probs.sum((0, 1)) for probs, _ in blocks]
            for place, (a, b) in enumerate(self.pairs):
                d_HQT, d_logit_HQT = ((blocks[a][i] - blocks[b][i]).abs_() for i in range(2))
                by_column_HT = d_HQT.sum(1)
                self._of["column"][place, :stop] += by_column_HT.sum(0)
                self._of["logit"][place, :stop] += d_logit_HQT.sum((0, 1))
                self._of["row"][place, start:stop] += d_HQT.sum((0, 2))
                self._of["mass"][place, :stop] += mass_ST[a]
                self._square_P[place] += d_logit_HQT.square_().sum()
                head_PH[place] += by_column_HT @ self._n_T[:stop]
        self._head_LPH.append(head_PH)

    def sums(self) -> list[Sums]:
        """Of each pair, over the layers that were added."""
        head_PLH = torch.stack(self._head_LPH, 1).cpu().numpy()
        parts = {name: x.cpu().numpy() for name, x in self._of.items()}
        return [
            Sums(
                *(parts[name][place] for name in ("column", "logit", "row", "mass")),
                head_LH=head_PLH[place],
                square=float(self._square_P[place]),
            )
            for place in range(len(self.pairs))
        ]


class _OfRow(BaseModel):
    """What is kept of one sequence."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seconds: float


Kept = TypeVar("Kept", bound=_OfRow)


class Shifts(_OfRow):
    """A sample for each of `ShiftPairsConfig.pairs`."""

    samples: list[Sample]


def shift_samples(model: Any, one: RowArrays, section: ShiftPairsConfig, block: int) -> Shifts:
    """Every pair of shifts of one row under `full`."""
    started = time.perf_counter()
    shifts = section.all_shifts("propagated")
    pairs = [(shifts.index(a), shifts.index(b)) for a, b in section.pairs("propagated")]
    found = PairSums(len(one.ids), pairs, block, model.device)
    side_by_side(model, one.ids, one.positions + np.array(shifts)[:, None], found.add)
    samples = [sample(sums, one.documents) for sums in found.sums()]
    return Shifts(samples=samples, seconds=time.perf_counter() - started)


def shift_records(rows: Sequence[Shifts], section: ShiftPairsConfig, attention_from: str, condition: str) -> list[Any]:
    """`ShiftPairs` and `PerToken` of a torch model, propagated, from every sequence's own."""
    pairs = section.pairs("propagated")
    about: dict[str, Any] = {
        "model": "pretrained",
        "condition": condition,
        "attention_from": attention_from,
        "tokens": len(rows[0].samples[0].columns["d"]),
        "sequences": len(rows),
        "mode": "propagated",
    }
    made = [
        schema.PairDifference(d1=d1, d2=d2, difference=difference([one.samples[i] for one in rows]))
        for i, (d1, d2) in enumerate(pairs)
    ]
    found: list[Any] = [schema.ShiftPairs(**about, pairs=made)]
    if (0, section.d2) in pairs:
        own = [one.samples[pairs.index((0, section.d2))] for one in rows]
        found.append(schema.PerToken(**about, d1=0, d2=section.d2, difference=difference(own), columns=columns(own)))
    return found


class Emulated(_OfRow):
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

    Is the attention at d1 as near to float64 on the same weights as the emulation's own? And is the *difference* between the
    shifts, which is what the study is made of, the emulation's: the truth is then the same roundings in a float64 carrier,
    and the allowance what the oracle's own float32 carrier moves of it (`shift_verdict`). A model that rounds elsewhere may
    be as near to float64; it fails the second.

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
    """The second question of `check_row` over all rows, which are of one size, and the first layers; `worst` is (row, layer).

    Of arrays of one size, the root mean square over all is that of their own: the rule over them is the rule over these.
    In few layers and a small model the answer hangs on luck: few sums of float32 lie so near the middle between two numbers
    of bf16 that another order turns them. In many layers every two bf16 runs have parted, and it says less and less.
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


def load_torch(config: StudyConfig, pretrained: Pretrained, implementation: str, dtype: str) -> tuple[Any, bool]:
    """The torch model, tried on a few tokens, and whether its implementation returns attention.

    Its parameters are those that the oracle has under `model.weights`. Raises ValueError, one line: they are not of this dtype,
    or the implementation does not exist or does not run here.
    """
    from transformers import AutoModelForCausalLM

    from parity_tests.gate.material import source
    from torchtrain.modeling.smollm2 import smollm2_folder

    held = str(pretrained.decoder.embed_tokens.weight[...].dtype)
    if dtype not in ("float32", held):
        raise ValueError(
            f"--dtype: {dtype} does not hold the parameters of model.weights={config.model.weights}, which are {held}; "
            f"give model.weights={dtype}"
        )
    smollm2 = config.model.source == "smollm2"
    folder = smollm2_folder(config.model.cache) if smollm2 else source(config.model.source)
    returns: list[bool] = []
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=implementation
        )
        with torch.no_grad():
            for parameter in model.parameters():  # in place: `.to` would round RoPE's frequencies as well
                parameter.copy_(parameter.to(getattr(torch, held)))
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        few = np.arange(SHORTEST)
        side_by_side(model, few, few[None], lambda _, runs: returns.append(runs[0].weights is not None))
    except (ImportError, ValueError, KeyError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"--implementation: {implementation!r} does not run here: {reason}; give another") from None
    return model, all(returns)


def run_torch_study(
    config: StudyConfig,
    out: Path,
    implementation: str = "eager",
    dtype: str = "bfloat16",
    progress: Progress | None = None,
    command: str = "",
) -> schema.Results:
    """Run `shift_pairs` of a study on a transformers model and write `results.json`, of the oracle's own schema.

    Every sequence is kept in `out/cells`, named by a hash of what its numbers depend on, as in `jaxref.study.run`.

    Raises ValueError, one line: no such section, model, implementation or text; an output folder of another study.
    """
    started = datetime.now(UTC)
    section = config.shift_pairs
    if section is None:
        raise ValueError("shift_pairs: the configuration has no such section, and no other is run on a torch model")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype!r}; give {', '.join(DTYPES)}")
    marked = config.model_copy(update={"title": f"{config.title} (torch {implementation} {dtype})"})
    claim(marked, out)
    pretrained = load_pretrained(config.model)
    pool = read_pool(config.text, pretrained.tokenizer, section.sequences, section.tokens, config.seed)
    taken = min(section.sequences, section.propagated_sequences or section.sequences)
    rows = [row(pool, i, section.tokens, pretrained.bos, config.text.bos) for i in range(taken)]
    model, returned = load_torch(config, pretrained, implementation, dtype)
    write_config(marked, out)

    condition = preset_name(implementation, model.dtype)
    attention_from = f"torch {implementation} {dtype} on {model.device.type}"
    attention_from += "" if returned else ", softmax in float64"
    depends = f"{pretrained.sha256} {attention_from} {config.model.weights} {config.block} {_fingerprint()}"
    checked = [_first(one, CHECKED) for one in rows[:2]] if implementation == "eager" else []

    def kept(found: type[Kept], one: RowArrays, make: Callable[[], Kept], *more: Any) -> Kept:
        key = hashlib.sha256(f"{depends} {more}".encode() + one.ids.tobytes() + one.positions.tobytes()).hexdigest()
        made = _kept_or_made(out / CELLS / f"{found.__name__.lower()}-{key}.json", found, make)
        done.append(made.seconds)
        if progress:
            what = f"{found.__name__.lower()}, {len(one.ids)} tokens: {attention_from} ({made.seconds:.1f} s)"
            progress(what, len(done), len(rows) + len(checked))
        return made

    done: list[float] = []
    ends = section.pairs("propagated")
    shifts = [kept(Shifts, one, partial(shift_samples, model, one, section, config.block), ends) for one in rows]
    records = shift_records(shifts, section, attention_from, condition)
    if checked:
        decoder, d2 = oracle_of(model), section.d2
        emulated = [kept(Emulated, one, partial(check_row, model, decoder, one, 0, d2), d2) for one in checked]
        records.append(emulation_record(emulated, len(checked[0].ids), attention_from, condition, dtype, 0, d2))
        if progress:
            whole, first = (shift_verdict(emulated, dtype, layers).ratio for layers in (None, 1))
            columns = max(one.d_ratio for one in emulated)
            what = "the difference between shifts beside the oracle's, error over allowance, up to 1 passes"
            progress(
                f"{what}: {whole:.2f}, in the first layer {first:.2f}, D's columns {columns:.2f}", len(done), len(done)
            )
    wavelengths = (2 * np.pi / inverse_frequencies(pretrained.config.rope)[0]).tolist()
    results = schema.Results(
        title=marked.title,
        created=started.isoformat(timespec="seconds"),
        seconds=sum(done),
        command=command,
        environment=environment(),
        config=marked.model_dump(mode="json"),
        model=describe(config, pretrained, wavelengths, {"pretrained"}),
        text=schema.TextDescription(source=config.text.source, bos=pretrained.bos, documents=pool.names),
        records=records,
    )
    schema.write_results(results, out / RESULTS)
    return results


def _first(one: RowArrays, tokens: int) -> RowArrays:
    """The row's first tokens, which attend as they do in the whole."""
    tokens = min(tokens, len(one.ids))
    return RowArrays(one.ids[:tokens], one.documents[:tokens], one.positions[:tokens], (tokens,))


def _kept_or_made(path: Path, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
    """From its file, or computed and written there, beside and renamed."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError, UnicodeDecodeError):
        found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(found.model_dump_json(), encoding="utf-8")
    beside.replace(path)
    return found


def _fingerprint() -> str:
    """Of the oracle's sources, this file, torch, transformers and the device."""
    digest = hashlib.sha256(fingerprint().encode() + Path(__file__).read_bytes())
    digest.update(" ".join(importlib.metadata.version(name) for name in ("torch", "transformers")).encode())
    digest.update((torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu").encode())
    return digest.hexdigest()


def main(
    config: Annotated[Path, typer.Argument(help="a study; its section shift_pairs is run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes to it: shift_pairs.tokens=128")] = None,
    implementation: Annotated[str, typer.Option(help="eager, sdpa, flash_attention_2, ...")] = "eager",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bfloat16",
    out: Annotated[Path, typer.Option(help="folder of results.json")] = Path("runs/study-torch"),
) -> None:
    """The precision study with attention from a torch model."""
    disable_progress_bar()

    def advance(line: str, done: int, total: int) -> None:
        print(f"[{done}/{total}] {line}", file=sys.stderr)

    try:
        loaded = load_study(config, overrides or [])
        found = run_torch_study(loaded, out, implementation, dtype, advance, " ".join(sys.argv))
    except (ValueError, OSError) as error:
        print(f"study: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("study: interrupted; finished sequences are kept, and the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{len(found.records)} records in {out / RESULTS}")
    print(f"report: {write_report(found, out)}")


if __name__ == "__main__":
    typer.run(main)

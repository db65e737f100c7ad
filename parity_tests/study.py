"""The precision study with attention taken from a torch model, so that real kernels are studied and not their emulation.

    python -m parity_tests.study configs/study/demo.yaml --implementation eager --out runs/study-torch
    python -m jaxref.study.report runs/study --beside runs/study-torch      # both on one page

Only `propagated` can be had from a whole model, so of a study's sections `shift_pairs` is run, for its pretrained model. With
`eager` the attention is what transformers returns. Any other implementation does not return it: there it is made in float64
from the rotated q and k that the model's own kernels computed, so the roundings of its softmax are left out.

With `eager` the run also checks the emulation: transformers' attention and the oracle's under the same roundings, layer by
layer, by the one rule of `parity_tests.tolerance`.

Legend: L layers · H query heads · K key/value heads · T tokens of a row · D head_dim.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import torch
import typer
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jaxref.model import Decoder
from jaxref.rope import inverse_frequencies
from jaxref.rounding import Rounding, preset
from jaxref.study import schema
from jaxref.study.measures import Sums, columns, difference, sample, stat, weights
from jaxref.study.models import load_pretrained
from jaxref.study.pieces import probabilities
from jaxref.study.report import write_report
from jaxref.study.run import claim, describe, environment, write_config
from jaxref.study.spec import ShiftPairsConfig, StudyConfig, load_study
from jaxref.study.text import RowArrays, read_pool, row
from parity_tests.layers import oracle_of, oracle_taps, preset_name
from parity_tests.tolerance import judge


@dataclass(frozen=True)
class Attention:
    """Of one run: probabilities and logits, float64 [L, H, T, T]; logits are 0 where a query does not see a key."""

    probs: np.ndarray
    logits: np.ndarray


@torch.no_grad()
def torch_attention(model: nn.Module, ids_T: np.ndarray, positions_T: np.ndarray) -> Attention:
    """The attention of a transformers model whose implementation is already set; see the top for what it is made of.

    Logits are q k^T in float64 of the rotated q and k that the model computed.
    """
    device = next(model.parameters()).device
    with _probe(model) as layers:
        model(
            input_ids=torch.from_numpy(ids_T)[None].to(device),
            position_ids=torch.from_numpy(positions_T)[None].to(device),
            use_cache=False,
        )
    made = _softmax([(q, k) for q, k, _ in layers], preset("exact"))
    returned = [weights for _, _, weights in layers if weights is not None]
    return Attention(np.concatenate(returned), made.logits) if len(returned) == len(layers) else made


@contextmanager
def _probe(model: Any) -> Iterator[list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]]:
    """Collect, layer by layer, what goes into the model's attention function and the weights it returns: float64
    q [1, T, H, D], k [1, T, K, D], and [1, H, T, T] or None."""
    chosen = model.config._attn_implementation
    layers: list[Any] = []

    def probe(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if chosen == "eager":  # transformers keeps it in each model's own file
            attend = sys.modules[type(module).__module__].eager_attention_forward
        else:
            attend = ALL_ATTENTION_FUNCTIONS[chosen]
        out, weights = attend(module, query, key, *rest, **named)
        q, k = (x.transpose(1, 2).double().cpu().numpy() for x in (query, key))
        layers.append((q, k, None if weights is None else weights.double().cpu().numpy()))
        return out, weights

    AttentionInterface.register("study_probe", probe)
    AttentionMaskInterface.register("study_probe", AttentionMaskInterface()[chosen])
    model.set_attn_implementation("study_probe")
    try:
        yield layers
    finally:
        model.set_attn_implementation(chosen)


def oracle_attention(decoder: Decoder, ids_T: np.ndarray, positions_T: np.ndarray, rounding: Rounding) -> Attention:
    """The same from the oracle: its forward pass, then its softmax on its rotated q and k."""
    batch = {
        "input_ids": torch.from_numpy(ids_T)[None],
        "position_ids": torch.from_numpy(positions_T)[None],
        "document_ids": torch.ones(1, len(ids_T), dtype=torch.int64),
    }
    taps = oracle_taps(decoder, batch, rounding)
    layers = range(decoder.config.num_hidden_layers)
    return _softmax([(taps[f"layers.{i}.q_rope"], taps[f"layers.{i}.k_rope"]) for i in layers], rounding)


def _softmax(layers: list[tuple[np.ndarray, np.ndarray]], rounding: Rounding) -> Attention:
    """The oracle's softmax on rotated q [1, T, H, D] and k [1, T, K, D] of every layer."""
    probs, logits = [], []
    for q_BTHD, k_BTKD in layers:
        q_BTHD, k_BTKD = q_BTHD.astype(rounding.dtype), k_BTKD.astype(rounding.dtype)
        B, T, H, D = q_BTHD.shape
        K = k_BTKD.shape[2]
        mask = np.tril(np.ones((T, T), bool))
        k_BTKGD = np.broadcast_to(k_BTKD[:, :, :, None], (B, T, K, H // K, D))
        q_BTKGD = jnp.asarray(q_BTHD.reshape(B, T, K, H // K, D))
        found = probabilities(q_BTKGD, jnp.asarray(k_BTKGD), jnp.asarray(mask), rounding, D**-0.5)
        p, logit = (np.asarray(x, np.float64).reshape(H, T, T) for x in found)
        probs.append(p)
        logits.append(np.where(mask, logit, 0.0))
    return Attention(np.array(probs), np.array(logits))


def sums(a: Attention, b: Attention) -> Sums:
    """What `engine.compare` sums block by block, from whole matrices under the mask `full`."""
    d_LHTT, d_logit_LHTT = np.abs(a.probs - b.probs), np.abs(a.logits - b.logits)
    n_T = weights(np.ones(d_LHTT.shape[-1], np.int64))
    return Sums(
        column_T=d_LHTT.sum((0, 1, 2)),
        logit_T=d_logit_LHTT.sum((0, 1, 2)),
        row_T=d_LHTT.sum((0, 1, 3)),
        mass_T=a.probs.sum((0, 1, 2)),
        head_LH=d_LHTT.sum(2) @ n_T,
        square=float((d_logit_LHTT**2).sum()),
    )


def shift_records(
    model: nn.Module, rows: Sequence[RowArrays], section: ShiftPairsConfig, attention_from: str, condition: str
) -> list[Any]:
    """`ShiftPairs` and `PerToken` of a torch model, propagated; rows under `full`."""
    shifts, pairs = section.all_shifts("propagated"), section.pairs("propagated")
    samples: list[list[Any]] = [[] for _ in pairs]
    for one in rows:
        runs = {shift: torch_attention(model, one.ids, one.positions + shift) for shift in shifts}
        for i, (d1, d2) in enumerate(pairs):
            samples[i].append(sample(sums(runs[d1], runs[d2]), one.documents))
    about: dict[str, Any] = {
        "model": "pretrained",
        "condition": condition,
        "attention_from": attention_from,
        "tokens": len(rows[0].ids),
        "sequences": len(rows),
        "mode": "propagated",
    }
    found: list[Any] = [
        schema.ShiftPairs(
            **about,
            pairs=[
                schema.PairDifference(d1=d1, d2=d2, difference=difference(own))
                for (d1, d2), own in zip(pairs, samples, strict=True)
            ],
        )
    ]
    if (0, section.d2) in pairs:
        own = samples[pairs.index((0, section.d2))]
        found.append(schema.PerToken(**about, d1=0, d2=section.d2, difference=difference(own), columns=columns(own)))
    return found


def check_emulation(model: nn.Module, rows: Sequence[RowArrays], d1: int = 0, d2: int = 16) -> schema.EmulationCheck:
    """Transformers' eager attention beside the oracle's under the same roundings, both against float64 on the same weights.

    Layers are judged on the first row; D between shifts d1 and d2 is taken from both on every row.
    """
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    name = preset_name("eager", next(model.parameters()).dtype)
    decoder, first = oracle_of(model), rows[0]
    truth = oracle_attention(decoder, first.ids, first.positions + d1, preset("exact"))
    own: dict[str, Any] = {"error": [], "reference": [], "ratio": [], "between": [], "identical": []}
    d_oracle, d_torch = [], []
    for number, one in enumerate(rows):
        theirs = [torch_attention(model, one.ids, one.positions + d) for d in (d1, d2)]
        ours = [oracle_attention(decoder, one.ids, one.positions + d, preset(name)) for d in (d1, d2)]
        d_torch.append(sample(sums(*theirs), one.documents).d)
        d_oracle.append(sample(sums(*ours), one.documents).d)
        if number:
            continue
        seen = np.tril(np.ones(truth.probs.shape[-2:], bool))
        for layer in range(len(truth.probs)):
            candidate, exact, emulated = (x.probs[layer][:, seen] for x in (theirs[0], truth, ours[0]))
            verdict = judge(candidate, exact, emulated, dtype)
            own["error"].append(verdict.error)
            own["ratio"].append(verdict.ratio)
            own["reference"].append(float(np.sqrt(np.mean((emulated - exact) ** 2))))
            own["between"].append(float(np.sqrt(np.mean((candidate - emulated) ** 2))))
            own["identical"].append(float(np.mean(candidate == emulated)))
    return schema.EmulationCheck(
        model="pretrained",
        condition=name,
        attention_from=f"torch eager {dtype}",
        tokens=len(first.ids),
        sequences=len(rows),
        dtype=dtype,
        layers=list(range(len(truth.probs))),
        **own,
        d_oracle=stat(d_oracle),
        d_torch=stat(d_torch),
        d1=d1,
        d2=d2,
    )


def run_torch_study(
    config: StudyConfig, out: Path, implementation: str = "eager", dtype: str = "bfloat16", command: str = ""
) -> schema.Results:
    """Run `shift_pairs` of a study on a transformers model and write `results.json`, of the oracle's own schema.

    Raises ValueError, one line: no such section, model, implementation or text; an output folder of another study.
    """
    from transformers import AutoModelForCausalLM

    from parity_tests.gate.material import source

    started = datetime.now(UTC)
    section = config.shift_pairs
    if section is None:
        raise ValueError("shift_pairs: the configuration has no such section, and no other is run on a torch model")
    marked = config.model_copy(update={"title": f"{config.title} (torch {implementation} {dtype})"})
    claim(marked, out)
    pretrained = load_pretrained(config.model)
    pool = read_pool(config.text, pretrained.tokenizer, section.sequences, section.tokens, config.seed)
    rows = [row(pool, i, section.tokens, pretrained.bos, config.text.bos) for i in range(section.sequences)]
    if section.propagated_sequences is not None:
        rows = rows[: section.propagated_sequences]
    write_config(marked, out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        source(config.model.source), dtype=getattr(torch, dtype), attn_implementation=implementation
    )
    model = model.to(device).eval()
    condition = preset_name(implementation, getattr(torch, dtype))
    records = shift_records(model, rows, section, f"torch {implementation} {dtype} on {device}", condition)
    if implementation == "eager":
        records.append(check_emulation(model, rows[: min(2, len(rows))], 0, section.d2))
    wavelengths = (2 * np.pi / inverse_frequencies(pretrained.config.rope)[0]).tolist()
    results = schema.Results(
        title=marked.title,
        created=started.isoformat(timespec="seconds"),
        seconds=(datetime.now(UTC) - started).total_seconds(),
        command=command,
        environment=environment(),
        config=marked.model_dump(mode="json"),
        model=describe(config, pretrained, wavelengths, {"pretrained"}),
        text=schema.TextDescription(source=config.text.source, bos=pretrained.bos, documents=pool.names),
        records=records,
    )
    schema.write_results(results, out / "results.json")
    return results


def main(
    config: Annotated[Path, typer.Argument(help="a study; its section shift_pairs is run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="changes to it: shift_pairs.tokens=128")] = None,
    implementation: Annotated[str, typer.Option(help="eager, sdpa, flash_attention_2, ...")] = "eager",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32")] = "bfloat16",
    out: Annotated[Path, typer.Option(help="folder of results.json")] = Path("runs/study-torch"),
) -> None:
    """The precision study with attention from a torch model."""
    try:
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"--dtype: {dtype!r}; give bfloat16, float16 or float32")
        found = run_torch_study(load_study(config, overrides or []), out, implementation, dtype, " ".join(sys.argv))
    except (ValueError, OSError) as error:
        print(f"study: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("study: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{len(found.records)} records in {out / 'results.json'}")
    print(f"report: {write_report(found, out)}")


if __name__ == "__main__":
    typer.run(main)

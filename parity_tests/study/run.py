"""`shift_pairs` of a study on a torch model, from its configuration to `results.json`."""

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anchorline.environment import version
from anchorline.errors import UserError
from jaxref.rope import inverse_frequencies
from parity_tests.oracle import oracle_of, preset_name
from parity_tests.study.beside import PairSums, side_by_side
from parity_tests.study.emulation import Emulated, check_row, emulation_record
from parity_tests.study.kept import Kept, OfRow, kept_or_made
from ropestudy import schema
from ropestudy.cells import fingerprint
from ropestudy.measures import Sample, columns, difference, sample
from ropestudy.models import Pretrained, load_pretrained
from ropestudy.run import CELLS, RESULTS, TellCell, claim, describe, environment, write_config
from ropestudy.spec import SHORTEST, ShiftPairsConfig, StudyConfig, longest
from ropestudy.text import RowArrays, read_pool, row

DTYPES = ("bfloat16", "float16", "float32")
CHECKED = 256  # tokens of a sequence whose emulation is checked: whole matrices of one layer are held there


class Shifts(OfRow):
    """A sample for each of `ShiftPairsConfig.pairs`."""

    samples: list[Sample]


def shift_samples(model: Any, one: RowArrays, section: ShiftPairsConfig, query_block: int) -> Shifts:
    """Every pair of shifts of one row under `full`."""
    started = time.perf_counter()
    shifts = section.all_shifts("propagated")
    pairs = [(shifts.index(a), shifts.index(b)) for a, b in section.pairs("propagated")]
    found = PairSums(len(one.ids), pairs, query_block, model.device)
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


def load_torch(config: StudyConfig, pretrained: Pretrained, implementation: str, dtype: str) -> tuple[Any, bool]:
    """The torch model, tried on a few tokens, and whether its implementation returns attention.

    Its parameters are those that the oracle has under `model.weights`. Raises UserError, one line: they are not of this
    dtype, or the implementation does not exist or does not run here.
    """
    from transformers import AutoModelForCausalLM

    from parity_tests.gate.material import source
    from torchtrain.modeling.smollm2 import smollm2_folder

    held = str(pretrained.decoder.embed_tokens.weight[...].dtype)
    if dtype not in ("float32", held):
        raise UserError(
            f"--dtype: {dtype} does not hold the parameters of model.weights={config.model.weights}, which are {held}; "
            f"give model.weights={dtype}"
        )
    smollm2 = config.model.source == "smollm2"
    folder = smollm2_folder(config.model.cache) if smollm2 else source(config.model.source)
    returns: list[bool] = []
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=implementation,
            trust_remote_code=False,
            local_files_only=True,
        )
        with torch.no_grad():
            for parameter in model.parameters():  # in place: `.to` would round RoPE's frequencies as well
                parameter.copy_(parameter.to(getattr(torch, held)))
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        few = np.arange(SHORTEST)
        side_by_side(model, few, few[None], lambda _, runs: returns.append(runs[0].weights is not None))
    except (ImportError, ValueError, KeyError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise UserError(f"--implementation: {implementation!r} does not run here: {reason}; give another") from None
    return model, all(returns)


def run_torch_study(
    config: StudyConfig,
    out: Path,
    implementation: str = "eager",
    dtype: str = "bfloat16",
    progress: TellCell | None = None,
    command: str = "",
) -> schema.Results:
    """Run `shift_pairs` of a study on a transformers model and write `results.json`, of the oracle's own schema.

    Every sequence is kept in `out/cells`, named by a hash of what its numbers depend on, as in `ropestudy.run`.

    Raises UserError, one line: no such section, model, implementation or text; an output folder of another study.
    """
    started = datetime.now(UTC)
    section = config.shift_pairs
    if section is None:
        raise UserError("shift_pairs: the configuration has no such section, and no other is run on a torch model")
    if dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype!r}; give {', '.join(DTYPES)}")
    marked = config.model_copy(update={"title": f"{config.title} (torch {implementation} {dtype})"})
    claim(marked, out)
    pretrained = load_pretrained(config.model)
    tokens = config.text.tokens or max(map(longest, config.experiments.values()))  # as `ropestudy.run`: the same texts
    pool = read_pool(config.text, pretrained.tokenizer, section.sequences, tokens, config.seed)
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
        made = kept_or_made(out / CELLS / f"{found.__name__.lower()}-{key}.json", found, make)
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


def _fingerprint() -> str:
    """Of the oracle's sources, this folder's, torch, transformers and the device."""
    digest = hashlib.sha256(fingerprint().encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    digest.update(f"{version('torch')} {version('transformers')}".encode())
    digest.update((torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu").encode())
    return digest.hexdigest()

"""Names of one engine's arrays in the words of another: a map says how each array is made of what the ranks hold.

    about: Megatron-Core, GPT layers
    names:
      layers.{i}.q:                                        # the name that both sides are compared under
        from: decoder.layers.{i}.self_attention.linear_qkv # in this dump; of a list the arrays are added
        steps: [{groups: q}, heads, {join: 2}]
      layers.{i}.mlp: decoder.layers.{i}.mlp               # nothing to be done

Steps are done for each rank, until `join` or `sum` makes one array of them:

| step                     | what it does                                                                   |
| ------------------------ | ------------------------------------------------------------------------------ |
| `part: [N, [SIZE, ...]]` | the Nth part of the last axis, cut in proportion to the sizes (qkv, gate-up)   |
| `groups: q` (`k`, `v`)   | one of q, k and v, where the last axis has them for each key/value group in turn |
| `heads`                  | split the last axis into heads                                                 |
| `half_split`             | neighbours that RoPE rotates, in the order of the two halves of a head         |
| `unscale`                | times the root of head_dim, where the weights of q hold the softmax scale        |
| `move: [AXIS, ...]`      | axes in another order                                                          |
| `rows` (`rows: N`)       | [T, ...] of one packed row as [1, T, ...], or of N rows as [N, T / N, ...]     |
| `join: AXIS`             | the ranks' slices of an axis together                                          |
| `sum`, `mean`            | of the ranks' partial results                                                  |
| `join_kv: AXIS`          | `join` of key/value heads, of which more ranks than heads hold replicas: all are judged |

Sizes are numbers, or `heads`, `kv_heads`, `head_dim` and `intermediate` of the model's config, or `kv_held`: kv_heads
as all ranks hold them, one each at least. Under `stages: N` (pipeline parallel; true: every rank is one) a layer's
number counts on from the stage before, whose ranks come first.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field, PositiveInt, PrivateAttr, StrictBool, field_validator, model_validator

from anchorline import settings
from anchorline.errors import UserError, did_you_mean, quoted, some
from parity_tests.comparing.dumps import Array, Dump, fits, in_order
from parity_tests.report.names import bare

MAPS = Path(__file__).parent / "maps"
_LAYER = "{i}"


class Source(BaseModel, extra="forbid", populate_by_name=True):
    """Where an array comes from."""

    names: list[str] = Field(alias="from", min_length=1, description="name in the dump; several are added")
    steps: list[str | dict[str, Any]] = Field(default=[], description="what is done to it")

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, value: Any) -> Any:
        value = value if isinstance(value, dict) else {"from": value}
        return value | {"from": [value["from"]]} if isinstance(value.get("from"), str) else value

    @field_validator("steps")
    @classmethod
    def _known(cls, steps: list[Any]) -> list[Any]:
        return [_step(step) and step for step in steps]


class Names(BaseModel, extra="forbid"):
    """A map of names."""

    about: str = Field(default="", description="whose names they are")
    stages: StrictBool | PositiveInt = Field(default=False, description="stages, each with layers counted from 0")
    ignore: list[str] = Field(default=[], description="patterns of names that not every version writes")
    names: dict[str, Source] = Field(description="name to compare under -> where it comes from")

    @field_validator("names")
    @classmethod
    def _numbered(cls, names: dict[str, Source]) -> dict[str, Source]:
        for target, source in names.items():
            counts = [name.count(_LAYER) for name in (target, *source.names)]
            if counts[0] != counts[1] or max(counts) > counts[0] or counts[0] > 1:
                raise ValueError(f"{target} and {source.names[0]}: write {_LAYER} once in both, or in neither")
        return names

    _called: str = PrivateAttr("--names")
    _own: bool = PrivateAttr(False)  # the user's: what fits nothing is a mistake; the shipped know several versions


def load_names(name: str, option: str = "--names") -> Names:
    """Read a map: a file, or the name of one that is shipped. Raises UserError."""
    shipped = name in shipped_names()
    if not shipped and not Path(name).is_file():
        raise UserError(f"{option} {name}: no such file, and none of the maps {', '.join(shipped_names())}")
    names = settings.load(Names, MAPS / f"{name}.yaml" if shipped else name, example="about=mine")
    names._called, names._own = f"{option} {name}", not shipped
    return names


def shipped_names() -> list[str]:
    """The maps that come with this package."""
    return sorted(path.stem for path in MAPS.glob("*.yaml"))


def recognise(dump: Dump) -> list[str]:
    """The shipped maps that fit most names of a dump, if they fit one in four; that of most models first."""
    fits = {name: len(_used(dump, load_names(name))) for name in shipped_names()}
    most = max(fits.values())
    return sorted((n for n in fits if fits[n] == most and most * 4 >= len(dump.arrays)), key=lambda n: n != "hf")


def _used(dump: Dump, names: Names) -> set[str]:
    return {own for _, sources, *_ in _find(dump, names) for own in sources}


def rename(dump: Dump, names: Names) -> Dump:
    """The dump under the names of a map; what the map does not use stays as it is."""
    found: Mapping[str, Sequence[Array]] = {n: x for n, x in dump.arrays.items() if not fits(n, names.ignore)}
    if names.stages:
        found = _count_on(found, names, dump.source)
    dump = replace(dump, arrays=found, places={} if names.stages else dump.places)  # each stage has its own order
    made: dict[str, Sequence[Array]] = {}
    places = dict(dump.places)
    entries = _find(dump, names)
    if unused := [e for e in names.names if names._own and e not in {entry for *_, entry in entries}]:
        known = [re.sub(r"\d+", _LAYER, bare(name), count=1) if _LAYER in unused[0] else name for name in dump.arrays]
        lacks = next((one for one in names.names[unused[0]].names if one not in known), "these together")
        near = did_you_mean(lacks, known)
        raise UserError(f"{names._called}: {unused[0]}: {dump.source} has no {lacks}{near}; or take out {some(unused)}")
    used = {source for _, sources, *_ in entries for source in sources}
    rest = {name: arrays for name, arrays in found.items() if name not in used}
    for target, sources, steps, entry in entries:
        ranks, kinds = [dump.arrays[source] for source in sources], {_step(step)[0] for step in steps}
        opening, config = f"{names._called}: {entry}", {**dump.config, "ranks": len(ranks[0])}
        groups = 1 if kinds & {*_JOINS} else len(ranks[0])
        if "join_kv" in kinds and len(ranks[0]) > 1:  # ranks that hold the same heads
            groups = max(1, len(ranks[0]) // _size("kv_heads", config))
        made[target] = [_made(opening, [own[first::groups] for own in ranks], steps, config) for first in range(groups)]
        places.pop(target, None)
        if all(source in dump.places for source in sources):
            places[target] = max(dump.places[source] for source in sources)
    targets = tuple(target.replace(_LAYER, "*") for target in names.names)
    return replace(
        dump,
        arrays=in_order(rest | made, places),
        notes=tuple(
            f"{dump.source}: its own {target} is not compared: the map makes that name of {some(own)}"
            for target, own, *_ in entries
            if target in rest
        ),
        targets=targets,
        called=names._called if names._own else "",
        places=places,
    )


def _find(dump: Dump, names: Names) -> list[tuple[str, list[str], Sequence[Any], str]]:
    """Name, sources, steps and entry of every array that the map can make of the dump, the first that fits a name."""
    found: dict[str, tuple[str, list[str], Sequence[Any], str]] = {}
    for target, source in names.names.items():
        first = re.compile(re.escape(source.names[0]).replace(re.escape(_LAYER), r"(\d+)") + "$")
        for name in dump.arrays:
            start, prefix = (name.find(": ") + 2, name[: name.find(": ") + 2]) if ": " in name else (0, "")
            if match := first.match(name, start):
                layer = match[1] if match.groups() else ""
                own = [prefix + one.replace(_LAYER, layer) for one in source.names]
                to = prefix + target.replace(_LAYER, layer)
                if all(one in dump.arrays for one in own):
                    found.setdefault(to, (to, own, source.steps, target))
    return list(found.values())


def _count_on(arrays: Mapping[str, Sequence[Array]], names: Names, source: str) -> dict[str, Sequence[Array]]:
    """Layers of the stages, one stage after another, under numbers that go on. Raises UserError."""
    begins = [entry.names[0].split(_LAYER)[0] for entry in names.names.values() if _LAYER in entry.names[0]]
    patterns = [re.compile(re.escape(begin) + r"(\d+)") for begin in dict.fromkeys(begins)]
    patterns.append(re.compile(r".*?(?:(?<=layers\.)|(?<=blocks\.)|(?<=\.)(?=\d+\.))(\d+)(?=\.|$)"))
    spans = {n: m.span(1) for n in arrays if (m := next(filter(None, (p.match(n) for p in patterns)), None))}
    ranks = 1 + max((array.rank for held in arrays.values() for array in held), default=0)
    stages = ranks if names.stages is True else names.stages
    opening = f"{names._called}: stages: {str(names.stages).lower()}"
    if ranks % stages:
        raise UserError(f"{opening}: {source} has {ranks} ranks; give a number that divides them")
    stage_of = [rank * stages // ranks for rank in range(ranks)]
    layers: list[set[int]] = [set() for _ in range(stages)]
    for name, (at, end) in spans.items():
        for array in arrays[name]:
            layers[stage_of[array.rank]].add(int(name[at:end]))
    if late := [f"{min(own)} in stage {stage}" for stage, own in enumerate(layers) if own and 0 not in own]:
        raise UserError(f"{opening}: {source} counts layers from {late[0]}, not from 0; record all, or take out stages")
    starts = [*accumulate((1 + max(own, default=-1) for own in layers), initial=0)]
    found: dict[str, list[Array]] = {}
    for name, held in arrays.items():
        at, end = spans.get(name, (0, 0))
        for array in held:
            number = str(int(name[at:end]) + starts[stage_of[array.rank]]) if end else ""
            found.setdefault(name[:at] + number + name[end:], []).append(array)
    return dict(found)


def _made(opening: str, sources: Sequence[Sequence[Array]], steps: Sequence[Any], config: Mapping[str, Any]) -> Array:
    def load() -> np.ndarray:
        try:
            ranks = [_add([arrays[r].load() for arrays in sources]) for r in range(len(sources[0]))]
            for step in steps:
                kind, value = _step(step)
                if kind in _JOINS:
                    ranks = [ranks[0] if len(ranks) == 1 else _JOINS[kind](ranks, value)]
                else:
                    ranks = [_STEPS[kind](x, value, config) for x in ranks]
        except UserError as error:
            raise UserError(f"{opening}: {error}") from None
        except (ArithmeticError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{opening}: its steps do not fit its arrays: {error}") from None
        return ranks[0]

    return Array(sources[0][0].dtype, load)


def _add(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if len({x.shape for x in arrays}) > 1:
        raise ValueError(f"shapes {[list(x.shape) for x in arrays]} cannot be added")
    return arrays[0] if len(arrays) == 1 else sum(x.astype(np.float64) for x in arrays)  # type: ignore[return-value]


_SIZE = r'("(heads|kv_heads|kv_held|head_dim|intermediate)"|[1-9]\d*)'
_FORMS = {  # of a step's value as JSON, and an example; others have none
    "part": (rf"\[\d+, \[{_SIZE}(, {_SIZE})*\]\]", "[0, [heads, kv_heads, kv_heads]]"),
    "groups": ('"[qkv]"', "q, k or v"),
    "rows": (r"null|[1-9]\d*", "their number"),
    "move": (r"\[\d+(, \d+)*\]", "[1, 0, 2]"),
    **dict.fromkeys(("join", "join_kv"), (r"-?\d+", "2")),
}


def _step(step: Any) -> tuple[str, Any]:
    kind, value = (step, None) if isinstance(step, str) else next(iter(step.items()), ("", None))
    if kind not in (*_STEPS, *_JOINS) or (isinstance(step, dict) and len(step) > 1):
        raise UserError(f"step {quoted(step)} is unknown; choose from {', '.join((*_STEPS, *_JOINS))}")
    form, example = _FORMS.get(kind, ("null", "no value"))
    if not re.fullmatch(form, json.dumps(value)):
        raise UserError(f"step {kind} cannot have {quoted(value)}; give {example}")
    return kind, value


def _size(size: int | str, config: Mapping[str, Any]) -> int:
    """A size by its name, from a config.json."""
    if isinstance(size, int):
        return size
    config = {key: value for key, value in config.items() if type(value) is int and value > 0}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    kv_heads = config.get("num_key_value_heads", heads)
    known = {
        "heads": heads,
        "kv_heads": kv_heads,
        "kv_held": kv_heads and max(kv_heads, config.get("ranks", 1)),
        "head_dim": config.get("head_dim") or (hidden // heads if hidden and heads else None),
        "intermediate": config.get("intermediate_size"),
    }
    if (found := known[size]) is None:
        raise UserError(f"{size} is not known; give a config.json with num_attention_heads, head_dim, ... by --config")
    return found


def _part(x: np.ndarray, value: Any, config: Mapping[str, Any]) -> np.ndarray:
    number, cut = value
    shares = [_size(size, config) for size in cut]
    ends = [x.shape[-1] * end / sum(shares) for end in accumulate(shares, initial=0)]
    if any(end % 1 for end in ends):
        raise ValueError(f"the last axis, of {x.shape[-1]}, cannot be cut into {shares}")
    return x[..., int(ends[number]) : int(ends[number + 1])]


def _group(x: np.ndarray, which: Any, config: Mapping[str, Any]) -> np.ndarray:
    heads, kv_heads, D = (_size(name, config) for name in ("heads", "kv_heads", "head_dim"))
    queries = heads // kv_heads
    groups = x.reshape(*x.shape[:-1], -1, queries + 2, D)
    at = {"q": slice(queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, None)}[which]
    return groups[..., at, :].reshape(*x.shape[:-1], -1)


_STEPS: dict[str, Any] = {
    "part": _part,
    "groups": _group,
    "heads": lambda x, _, config: x.reshape(*x.shape[:-1], -1, _size("head_dim", config)),
    "half_split": lambda x, *_: x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape),
    "unscale": lambda x, *_: x.astype(np.float64) * x.shape[-1] ** 0.5,
    "move": lambda x, axes, _: x.transpose(axes),
    "rows": lambda x, rows, _: x.reshape(rows or 1, -1, *x.shape[1:]),
}
_JOINS: dict[str, Any] = {"sum": lambda ranks, _: _add(ranks), "mean": lambda ranks, _: _add(ranks) / len(ranks)}
_JOINS |= dict.fromkeys(("join", "join_kv"), np.concatenate)

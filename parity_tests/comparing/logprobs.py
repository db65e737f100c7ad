"""Log-probabilities of the same tokens by two engines: a trainer's and a sampler's. Is the gap more than rounding?

A file is JSONL, a document a line, `{"token_ids": [...], "logprobs": [...]}`, or safetensors with arrays of these names
and perhaps `document_ids`, all of one shape.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import parse_json
from parity_tests.comparing.dumps import Array, Dump, open_dump

_NAMES = ("token_ids", "logprobs", "document_ids")
_QUANTILES = (0.01, 0.5, 0.99)
_PARTS = 4  # of a document, along which the difference is shown


def open_logprobs(*paths: Path | None) -> list[Any]:
    """Read files as dumps of `inputs.token_ids`, `inputs.document_ids`, `inputs.position_ids` and `logprobs`, flat.

    Tokens whose log-probability is null, as samplers write it for the first of a prompt, are left out.
    Raises UserError: a file is neither, has not one log-probability for each token, or has null where another has none.
    """
    read = [None if path is None else _read(path) for path in paths]
    (one, nulls), *others = filter(None, read)
    for other, own in others:
        if differ := nulls ^ own:
            document, token = min(differ)
            null, number = (one, other) if (document, token) in nulls else (other, one)
            place = f"document {document} has null for token {token}, {number.source} a log-probability"
            raise UserError(f"--logprobs {null.source}: {place}; give null in both, or leave the token out of both")
    return [found and found[0] for found in read]


def _read(path: Path) -> tuple[Dump, set[tuple[int, int]]]:
    """A file, and document and position of its tokens that have no log-probability."""
    opening = f"--logprobs {quoted(str(path))}"
    try:
        with path.open("rb") as file:
            is_text = int.from_bytes(file.read(8).ljust(8, b" "), "little") > path.stat().st_size
        arrays = _read_lines(path) if is_text else {n: x[0].load() for n, x in open_dump(path).arrays.items()}
        ids, values = (np.asarray(arrays[name]) for name in _NAMES[:2])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        why = f"lacks {error}" if isinstance(error, KeyError) else quoted_reason(error)
        raise UserError(f"{opening}: {why}; give token_ids and logprobs, one number a token") from None
    rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape) if ids.ndim == 2 else np.zeros(ids.shape, int)
    documents = np.asarray(arrays.get("document_ids", rows))
    if not ids.shape == values.shape == documents.shape or not ids.size:
        raise UserError(f"{opening}: {ids.shape} token_ids and {values.shape} logprobs; give one each")
    width = ids.shape[-1] if ids.ndim == 2 else ids.size
    ids, values, documents = (x.reshape(-1) for x in (ids, values, documents))
    given = np.not_equal(values, None) if values.dtype == object else np.ones(len(values), bool)
    values = values.astype(np.float64) if values.dtype == object else values
    if (
        ids.dtype.kind not in "iu"
        or documents.dtype.kind not in "iu"
        or values.dtype.kind in "iubSU"
        or not given.any()
    ):
        raise UserError(f"{opening}: {ids.dtype} token_ids and {values.dtype} logprobs; give integers and floats")
    index = np.arange(len(documents))
    starts = np.concatenate([[True], documents[1:] != documents[:-1]]) | (index % width == 0)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0))
    padding, documents = documents < 0, np.cumsum(starts) - 1  # whatever they are called
    kept = given & ~padding
    own = {"token_ids": ids, "document_ids": documents, "position_ids": positions}
    inputs = {f"inputs.{name}": [Array(None, lambda x=x: x[kept])] for name, x in own.items()}
    held = inputs | {"logprobs": [Array(str(values.dtype), lambda: values[kept])]}
    return Dump(str(path), held, {}), {(int(documents[i]), int(positions[i])) for i in np.flatnonzero(~given)}


def _read_lines(path: Path) -> dict[str, np.ndarray]:
    columns: dict[str, list[Any]] = {name: [] for name in _NAMES}
    lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold what else ends a line
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            x = parse_json(line.encode())
            ids, values = x["token_ids"], x["logprobs"]
            if not {*map(type, ids)} <= {int} or not {*map(type, values)} <= {int, float, type(None)}:
                raise ValueError("not lists of integers, and of numbers or null")
            if len(ids) != len(values):
                raise ValueError(f"{len(ids)} token_ids and {len(values)} logprobs")
            values = [None if value is None else float(value) for value in values]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"line {number + 1}: {why}") from None
        for name, column in zip(_NAMES, (ids, values, [number] * len(ids)), strict=True):
            columns[name] += column
    return {
        name: np.asarray(column, None if name != "logprobs" or None in column else float)
        for name, column in columns.items()
    }


def describe(candidate: Dump, right: Dump) -> list[str]:
    """The difference in numbers: mean, quantiles, ratio of probabilities, divergence, and where along a document."""
    (ids, documents, positions, mine), (theirs, *_, true) = (
        [ranks[0].load() for ranks in dump.arrays.values()] for dump in (candidate, right)
    )
    if not np.array_equal(ids, theirs):
        return ["the tokens are not the same: nothing else is compared"]
    mine, true = mine.astype(np.float64), true.astype(np.float64)
    finite, lines = [np.isfinite(x) for x in (mine, true)], list[str]()
    both = finite[0] & finite[1]
    if not both.all():
        first = int(both.argmin())
        lines += [
            f"no finite log-probability: {(~finite[0]).sum()} tokens of {candidate.source}, {(~finite[1]).sum()} of "
            f"{right.source}, {(~finite[0] & ~finite[1]).sum()} of both; the first: document {documents[first]}, token "
            f"{positions[first]}, {mine[first]:.4g} and {true[first]:.4g}; all below is of the others"
        ]
    d, positions, documents = (mine[both] - true[both]), positions[both], documents[both]
    if not d.size:
        return lines
    low, half, high = np.quantile(d, _QUANTILES)
    lines += [
        f"difference of {len(d)} tokens, {Path(candidate.source).name} less {Path(right.source).name}: "
        f"mean {d.mean():.3g}, 1% {low:.3g}, median {half:.3g}, 99% {high:.3g}",
        f"ratio of probabilities: mean {np.exp(d).mean():.6g}, largest {np.exp(np.abs(d)).max():.4g}",
        # k3 of Schulman, "Approximating KL divergence" (2020), for tokens that the second engine drew.
        f"KL divergence, estimated: {np.mean(np.expm1(d) - d):.3g} nats a token",
    ]
    edges = np.linspace(0, positions.max() + 1, _PARTS + 1).astype(int)
    parts = [d[(positions >= a) & (positions < b)] for a, b in pairwise(edges)]
    shown = [f"{a}: {np.sqrt(np.mean(x * x)):.3g}" for a, x in zip(edges, parts, strict=False) if x.size]
    lines.append(f"root mean square from position {', '.join(shown)}")
    worst, at = max(np.unique(documents), key=lambda n: float(np.mean(np.square(d[documents == n])))), abs(d).argmax()
    lines.append(f"the document that differs most is {worst}: {np.sqrt(np.mean(d[documents == worst] ** 2)):.3g}")
    return [*lines, f"the token that differs most is {positions[at]} of document {documents[at]}: {d[at]:.3g}"]

"""Log-probabilities of the same tokens by two engines: a trainer's and a sampler's. Is the gap more than rounding?

A file is JSONL, a document a line, `{"token_ids": [...], "logprobs": [...]}`, or safetensors with arrays of these names
and perhaps `document_ids`, all of one shape.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from anchorline.errors import UserError, quoted
from parity_tests.comparing.dumps import Array, Dump, open_dump

_NAMES = ("token_ids", "logprobs", "document_ids")
_QUANTILES = (0.01, 0.5, 0.99)
_PARTS = 4  # of a document, along which the difference is shown


def open_logprobs(path: Path) -> Dump:
    """Read a file as a dump of `inputs.token_ids`, `inputs.document_ids`, `inputs.position_ids` and `logprobs`, flat.

    Raises UserError: it is neither, or a line has not one log-probability for each token.
    """
    try:
        with path.open("rb") as file:
            text = file.read(1) == b"{"
        found = (
            _read_lines(path) if text else {n: x[0].load() for n, x in open_dump(path).arrays.items() if n in _NAMES}
        )
        ids, values = (np.asarray(found[name]) for name in _NAMES[:2])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--logprobs {quoted(str(path))}: no token_ids and logprobs in it ({error})") from None
    rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape) if ids.ndim == 2 else np.zeros(ids.shape, int)
    documents = np.asarray(found.get("document_ids", rows))
    if not ids.shape == values.shape == documents.shape or not ids.size:
        raise UserError(
            f"--logprobs {quoted(str(path))}: {ids.shape} token_ids and {values.shape} logprobs; give one each"
        )
    documents = documents.reshape(-1)
    starts = np.concatenate([[True], documents[1:] != documents[:-1]])
    index = np.arange(len(documents))
    positions = index - np.maximum.accumulate(np.where(starts, index, 0))
    own = {"token_ids": ids.reshape(-1), "document_ids": documents, "position_ids": positions}
    arrays = {f"inputs.{name}": [Array(None, lambda x=x: x)] for name, x in own.items()}
    dtype = str(values.dtype) if "float" in str(values.dtype) else "float64"
    return Dump(str(path), arrays | {"logprobs": [Array(dtype, lambda: values.reshape(-1))]}, {})


def _read_lines(path: Path) -> dict[str, np.ndarray]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, x in enumerate(lines, 1):
        if len(x["token_ids"]) != len(x["logprobs"]):
            counts = f"{len(x['token_ids'])} token_ids and {len(x['logprobs'])} logprobs"
            raise UserError(f"--logprobs {quoted(str(path))}: line {number} has {counts}; give one for each token")
    columns = zip(
        *((i, v, n) for n, x in enumerate(lines) for i, v in zip(x["token_ids"], x["logprobs"], strict=True)),
        strict=True,
    )
    return {name: np.asarray(column) for name, column in zip(_NAMES, columns, strict=True)}


def describe(candidate: Dump, right: Dump) -> list[str]:
    """The difference in numbers: mean, quantiles, ratio of probabilities, divergence, and where along a document."""
    (ids, documents, positions, mine), (theirs, *_, true) = (
        [ranks[0].load() for ranks in dump.arrays.values()] for dump in (candidate, right)
    )
    if not np.array_equal(ids, theirs):
        return ["the tokens are not the same: nothing else is compared"]
    d = mine.astype(np.float64) - true.astype(np.float64)
    low, half, high = np.quantile(d, _QUANTILES)
    lines = [
        f"difference of {len(d)} tokens: mean {d.mean():.3g}, 1% {low:.3g}, half {half:.3g}, 99% {high:.3g}",
        f"ratio of probabilities: mean {np.exp(d).mean():.6g}, largest {np.exp(np.abs(d)).max():.4g}",
        # k3 of Schulman, "Approximating KL divergence" (2020), for tokens that the second engine drew.
        f"KL divergence, estimated: {np.mean(np.expm1(d) - d):.3g} nats a token",
    ]
    edges = np.linspace(0, positions.max() + 1, _PARTS + 1).astype(int)
    parts = [d[(positions >= a) & (positions < b)] for a, b in pairwise(edges)]
    shown = [f"{a}: {np.sqrt(np.mean(x * x)):.3g}" for a, x in zip(edges, parts, strict=False) if x.size]
    lines.append(f"root mean square from position {', '.join(shown)}")
    worst = max(np.unique(documents), key=lambda n: float(np.mean(np.square(d[documents == n]))))
    lines.append(f"the document that differs most is {worst}: {np.sqrt(np.mean(d[documents == worst] ** 2)):.3g}")
    return lines

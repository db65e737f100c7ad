"""The text of a study: documents of installed packages or the user's own files, and the rows that are made of them.

Legend: T tokens of a row.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from tokenizers import Tokenizer

from anchorline.corpora import Document, Name, documents
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import expand
from jaxref.layout import lay_out
from ropestudy.spec import TextConfig

DEMO: tuple[Name, ...] = ("speeches", "factbook_fields", "library_modules")

NO_TARGET = -100
CHARACTERS = 12  # that the tokenizer gets for each token that is wanted: more than any language needs


@dataclass(frozen=True)
class Pool:
    """Tokenised documents, each as long as the longest row needs."""

    names: list[str]
    ids: list[np.ndarray]  # int64, without BOS


def read_pool(text: TextConfig, tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> Pool:
    """Return the first `count` documents of `tokens` tokens and more, in an order drawn from the seed.

    Raises UserError, one line: a source that cannot be read, or too few documents that are long enough.
    """
    pool, longest, seen = Pool([], []), 0, 0
    for name, content in _documents(text, seed):
        encoded = tokenizer.encode(content[: tokens * CHARACTERS], add_special_tokens=False).ids
        longest, seen = max(longest, len(encoded)), seen + 1
        if len(encoded) >= tokens:
            pool.names.append(name)
            pool.ids.append(np.array(encoded[:tokens], np.int64))
        if len(pool.ids) == count:
            return pool
    raise UserError(
        f"text.source: {quoted(text.source)} has {len(pool.ids)} documents of {tokens} tokens or more, and {count} "
        f"are needed (the longest of {seen} has {longest}); give longer text, fewer sequences or shorter ones"
    )


@dataclass(frozen=True)
class RowArrays:
    """One row: int64 [T] each. `lengths` has the tokens of each packed document, or of the whole row."""

    ids: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    lengths: tuple[int, ...]

    @property
    def targets(self) -> np.ndarray:
        """The next token within each document, `NO_TARGET` at its end and at the anchor of a packed row."""
        following = np.append(self.ids[1:], NO_TARGET)
        start = len(self.ids) - sum(self.lengths)
        following[:start] = NO_TARGET
        following[start + np.cumsum(self.lengths) - 1] = NO_TARGET
        return following


def row(pool: Pool, number: int, tokens: int, bos_id: int | None) -> RowArrays:
    """Return one document as one row under `full`, after the BOS if there is one."""
    ids = np.array([*([] if bos_id is None else [bos_id]), *pool.ids[number]], np.int64)[:tokens]
    return RowArrays(ids, np.ones(tokens, np.int64), np.arange(tokens), (tokens,))


def open_gap(positions_T: np.ndarray, gap: int, first: int) -> np.ndarray:
    """Return positions with those from index `first` on moved `gap` farther: queries there see keys far away."""
    return positions_T + gap * (np.arange(len(positions_T)) >= first)


def copy_row(pool: Pool, number: int, tokens: int, bos_id: int | None, seed: int) -> tuple[RowArrays, np.ndarray]:
    """Return a row whose second half repeats the key of its first half, and the targets: the tokens to be copied.

    The key is tokens of the text in a random order, so that only a copy predicts them: `BOS key BOS key`
    (or the document's first token where there is no BOS). The targets are the second key's tokens but the first, which
    nothing announces.
    """
    half = tokens // 2
    random = np.random.default_rng((seed, 11, number))
    key = random.permutation(np.unique(np.concatenate(pool.ids)))[: half - 1]
    if len(key) < half - 1:
        raise UserError(
            f"text.source: its documents have {len(key)} different tokens, and a key to copy needs {half - 1}; give "
            "longer text or shorter rows"
        )
    opening = pool.ids[number][0] if bos_id is None else bos_id
    ids = np.array([opening, *key, opening, *key, *[opening] * (tokens - 2 * half)], np.int64)
    targets = np.full(tokens, NO_TARGET)
    targets[half + 1 : 2 * half - 1] = key[1:]
    return RowArrays(ids, np.ones(tokens, np.int64), np.arange(tokens), (tokens,)), targets


def packed_row(pool: Pool, number: int, tokens: int, bos_id: int, documents: int, mask: str) -> RowArrays:
    """Return several documents of unequal lengths after one BOS, the anchor, under a mask such as `anchor`."""
    shares = np.arange(1, documents + 1)
    lengths = [int(n) for n in (tokens - 1) * shares // shares.sum()]
    lengths[-1] += tokens - 1 - sum(lengths)
    pieces = [pool.ids[(number + k) % len(pool.ids)][:n] for k, n in enumerate(lengths)]
    made = lay_out(lengths, mask, anchor=1)
    return RowArrays(np.concatenate([[bos_id], *pieces]), made.document_ids, made.position_ids, tuple(lengths))


def _documents(text: TextConfig, seed: int) -> Iterator[Document]:
    """Yield all documents: one domain after the other in turn, each in an order drawn from the seed."""
    if text.source == "demo":
        sources = [documents(name, "text.source: 'demo'") for name in DEMO]
    else:
        sources = [_files(text)]
    random, shuffled = np.random.default_rng((seed, 3)), []
    for source in map(list, sources):
        shuffled.append([source[i] for i in random.permutation(len(source))])
    for together in zip_longest(*shuffled):
        yield from (document for document in together if document is not None)


def _files(text: TextConfig) -> Iterator[Document]:
    """Yield every record of .jsonl files and every .txt file, of a folder or alone."""
    source = expand(text.source)
    files = source.rglob("*") if source.is_dir() else [source]
    known = sorted(path for path in files if path.suffix in (".jsonl", ".txt") and path.is_file())
    if not known:
        raise UserError(
            f"text.source: {quoted(text.source)} is neither demo nor a .jsonl or .txt file or a folder of them"
        )
    for path in known:
        try:
            content = path.read_text(encoding="utf-8")
            lines = [line for line in content.splitlines() if line.strip()]
            items = [{text.field: content}] if path.suffix == ".txt" else [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise UserError(f"text.source: {quoted(path)} cannot be read: {quoted_reason(error)}") from None
        for number, item in enumerate(items, start=1):
            own = item.get(text.field) if isinstance(item, dict) else None
            if not isinstance(own, str):
                raise UserError(
                    f"text.field: {quoted(path)}:{number} has no string {quoted(text.field)}; name the field that "
                    "holds the text"
                )
            yield f"{path.name}:{number}", own

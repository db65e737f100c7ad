"""Which documents train and which are held out: no text stands on both sides."""

from typing import NamedTuple

import numpy as np

from torchtrain.data.packing import HELD_OUT, random_stream
from torchtrain.data.store import Documents, TokenStore


class Split(NamedTuple):
    """Documents of both sides, int64 and sorted, and how many changed sides because of their copies.

    Under a mixture, each to train on stands there as often as it is taken, and those left out on neither side.
    """

    train: np.ndarray
    held_out: np.ndarray
    moved: int


def split_documents(store: Documents, held_out_share: float, seed: int) -> Split:
    """Draw the held-out documents by seed from each domain apart.

    A share above 0 holds out at least one document of every domain that has two different ones. Where the draw would
    leave one text on both sides, it is done again by whole texts; otherwise it stands, bit for bit. Where a store knows
    near duplicates, they count as one text.
    """
    orders, counts = [], []
    for domain in range(len(store.domains)):
        own = np.flatnonzero(store.document_domains == domain)
        count = round(held_out_share * len(own))
        if held_out_share > 0 and len(own) > 1:
            count = max(count, 1)
        orders.append(random_stream(seed, HELD_OUT, domain).permutation(own))
        counts.append(count)
    drawn = np.zeros(len(store), dtype=bool)
    for order, count in zip(orders, counts, strict=True):
        drawn[order[:count]] = True
    held = drawn
    if store.copies + store.near_copies and np.intersect1d(store.groups[drawn], store.groups[~drawn]).size:
        held = _by_text(store.groups, orders, counts)
    moved = int((held != drawn).sum())
    if store.repeats is None:
        return Split(np.flatnonzero(~held), np.flatnonzero(held), moved)
    if isinstance(store, TokenStore):
        held = held & store.kept
    train = np.repeat(np.arange(len(store)), np.where(held, 0, store.repeats))
    # Of all documents, taken by the mixture or not: what is held out is the same under every mixture.
    return Split(train, np.flatnonzero(held), moved)


def _by_text(groups: np.ndarray, orders: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """Walk each domain's documents in their order and hold out whole texts, with their copies in all domains, as far as
    they fit its count. One that fits none holds out its smallest text, if another is left to train on.

    Returns:
        Which documents are held out, bool [documents].
    """
    held = np.zeros(int(groups.max()) + 1, dtype=bool)  # by text
    passed = np.zeros_like(held)
    for order, count in zip(orders, counts, strict=True):
        texts, copies = np.unique(groups[order], return_counts=True)
        size = dict(zip(texts.tolist(), copies.tolist(), strict=True))
        room = count - sum(size[text] for text in texts[held[texts]].tolist())
        for text in groups[order].tolist():
            if room <= 0:
                break
            if not held[text] and not passed[text] and size[text] <= room:
                held[text] = True
                room -= size[text]
        if count and not held[texts].any():
            free = [text for text in texts.tolist() if not passed[text]]
            if len(texts) > 1 and free:
                held[min(free, key=lambda text: size[text])] = True
        passed[texts] |= ~held[texts]
    return held[groups]

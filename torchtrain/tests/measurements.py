"""Measurements of an experiment's runs, drawn at random."""

import numpy as np

from torchtrain.experiment.measuring import Measurement

DRAWN = np.random.default_rng(0)


def measurement(shift: float, documents: int = 5) -> Measurement:
    """Of documents whose losses are random about `shift`."""
    losses = (shift + DRAWN.normal(size=(documents, 3))).tolist()
    copies = (shift + DRAWN.normal(size=(documents, 2))).tolist()
    return Measurement(
        date="2026-01-01",
        environment="a machine",
        bands=[(1, 8), (8, 16), (16, 40)],
        distances=[8, 24],
        domains=["a"] * documents,
        documents="",
        losses=losses,
        copies=copies,
        passages=[0.0] * documents,
        rounded=None,
    )

"""Masks as a picture: one panel per layout, one colour per document, the anchor in a colour of its own.

Legend: T tokens of a row.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxref.mask import ANCHOR, PADDING, Layout, live_pairs, visible

ANCHOR_COLOUR, PADDING_COLOUR, UNSEEN_COLOUR, INK = "#c8102e", "#c3c8cf", "#f1f3f5", "#343a40"
DOCUMENT_COLOURS = ("#3b7dc4", "#e8a33d", "#3f9e78", "#8b6bb8", "#5fb8c9", "#b0764a")
PANEL_INCHES, DOTS_PER_INCH = 3.0, 200
MOST_TICKS = 24  # beyond, only a document's first token gets its position written

_SUBTITLES = {
    "full": "all tokens before",
    "intra": "own document",
    "intra_reset": "own document, positions restart",
    "anchor": "own document and the anchor",
}


def save_masks(layouts: Mapping[str, Layout], documents: np.ndarray, file: Path) -> None:
    """Draw what each query sees, a panel for each variant side by side, into a PNG, PDF or SVG file.

    A cell takes the colour of its key's document; grey is padding. Ticks are `position_ids`.

    Args:
        layouts: by variant, all of one length.
        documents: int [T], the document that each token was before the variant chose its ids, in the order of
            `Layout.source`: `full` has one id for all, and its picture shows whose keys are seen nevertheless.
        file: overwritten.

    Raises OSError: the folder of `file` does not exist, or is not writable. ValueError: an unknown suffix.
    """
    handles, columns = _legend(list(layouts.values()), documents), 2 * len(layouts)
    height = PANEL_INCHES + 0.8 + 0.25 * -(-len(handles) // columns)
    figure = Figure(figsize=(PANEL_INCHES * len(layouts), height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(1, len(layouts), squeeze=False)[0]
    for panel, (variant, layout) in zip(axes, layouts.items(), strict=True):
        _draw_panel(panel, variant, layout, documents)
    axes[0].set_ylabel("queries, by position", color=INK, fontsize=9)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.6,
    )
    figure.savefig(file, facecolor="white")


def _draw_panel(panel: Axes, variant: str, layout: Layout, documents: np.ndarray) -> None:
    T = len(documents)
    ids, owners = layout.document_ids, documents[layout.source]
    colour_T3 = np.array([to_rgb(_colour(int(i), int(owner))) for i, owner in zip(ids, owners, strict=True)])
    mask_TT = visible(ids[None])[0]
    is_padding = ids == PADDING
    cells_TT3 = np.where(mask_TT[..., None], colour_T3[None], np.array(to_rgb(UNSEEN_COLOUR)))
    cells_TT3[is_padding[:, None] | is_padding[None, :]] = to_rgb(PADDING_COLOUR)

    gap = min(1.2, 24 / T)  # points; cells stay wider than their gaps
    panel.pcolormesh(np.arange(T + 1), np.arange(T + 1), cells_TT3, edgecolors="white", linewidth=gap)
    panel.set(xlim=(0, T), ylim=(T, 0), aspect="equal")
    panel.set_title(variant, color=INK, fontsize=12, fontweight="bold", pad=20)
    base, _, extra = variant.partition("+")
    subtitle = f"{_SUBTITLES[base]}{', ' + extra + 'd' if extra else ''}"
    panel.text(0.5, 1.025, subtitle, transform=panel.transAxes, ha="center", va="bottom", color=INK, fontsize=8.5)
    starts = np.flatnonzero(np.diff(owners, prepend=owners[0] - 1))
    ticks = np.arange(T) if T <= MOST_TICKS else starts
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(ticks + 0.5, [str(layout.position_ids[t]) for t in ticks])
        for label, t in zip(axis.get_ticklabels(), ticks, strict=True):
            label.set(color=_ink(colour_T3[t]), fontsize=7.5)
    panel.set_xlabel(f"keys, by position · {live_pairs(ids[None]):,} pairs seen", color=INK, fontsize=9)
    panel.tick_params(length=0, pad=2)
    panel.spines[:].set_visible(False)


def _colour(document_id: int, owner: int) -> str:
    if document_id in (ANCHOR, PADDING):
        return {ANCHOR: ANCHOR_COLOUR, PADDING: PADDING_COLOUR}[document_id]
    return DOCUMENT_COLOURS[(owner - 1) % len(DOCUMENT_COLOURS)]


def _ink(colour_3: np.ndarray) -> tuple[float, ...]:
    """The colour, dark enough to be read on white."""
    return tuple(0.7 * colour_3)


def _legend(layouts: list[Layout], documents: np.ndarray) -> list[Patch]:
    ids = np.concatenate([layout.document_ids for layout in layouts])
    handles = [Patch(color=ANCHOR_COLOUR, label="anchor")] if (ids == ANCHOR).any() else []
    handles += [
        Patch(color=_colour(1, document), label=f"document {document}") for document in range(1, documents.max() + 1)
    ]
    if (ids == PADDING).any():
        handles.append(Patch(color=PADDING_COLOUR, label="padding"))
    return [*handles, Patch(color=UNSEEN_COLOUR, label="not seen")]

"""The four mask variants side by side, as a picture.

Legend: T tokens of a row.
"""

import io
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np

from anchorline.files import save
from jaxref.layout import RowLayout
from jaxref.mask import ANCHOR, PADDING, visible_BQJ

TITLES = {
    "full": ("full", "sees everything before"),
    "intra": ("intra-document", "sees its own document"),
    "intra_reset": ("intra-document + reset", "the same, positions restart"),
    "anchor": ("anchor", "sees its document and the anchor"),
}
ANCHOR_COLOUR, PADDING_COLOUR, MASKED_COLOUR = "#f2b01e", "#b9bec6", "#f1f2f5"
DOCUMENT_COLOURS = ("#3f6fb5", "#2f9e8f", "#d1495b", "#8a5fbf", "#e07b39", "#5a8f3c", "#b0508f", "#4aa3c7")


def save_figure(rows: Mapping[str, tuple[RowLayout, np.ndarray]], path: Path) -> None:
    """Draw one square of T x T cells for each variant; written as the suffix of `path` says (.png, .svg, .pdf).

    rows: by base variant, a row's layout and the document each stored token came from, int [T], whatever the variant
        calls it.

    A cell is coloured by the document of its key where the query sees the key. The ticks are the tokens' positions.
    """
    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(1, len(rows), figsize=(12, 3.9), squeeze=False, layout="constrained")
    for axis, (variant, (row, origin)) in zip(axes[0], rows.items(), strict=True):
        T = len(origin)
        ids = row.document_ids
        colour_of_key = np.array([to_rgb(_colour(document)) for document in origin])
        cells = np.where(visible_BQJ(ids[None])[0][:, :, None], colour_of_key, to_rgb(MASKED_COLOUR))
        cells[ids == PADDING] = cells[:, ids == PADDING] = to_rgb(PADDING_COLOUR)
        axis.imshow(cells, interpolation="nearest")

        title, subtitle = TITLES[variant]
        axis.set_title(title, fontsize=13, fontweight="bold", pad=22)
        axis.text(0.5, 1.03, subtitle, transform=axis.transAxes, ha="center", va="bottom", fontsize=9)
        axis.set_xlabel("key", fontsize=11)
        axis.set_ylabel("query", fontsize=11)
        step = -(-T // 16)
        axis.set_xticks(range(0, T, step), row.position_ids[::step].tolist(), fontsize=7)
        axis.set_yticks(range(0, T, step), row.position_ids[::step].tolist(), fontsize=7)
        axis.set_xticks(np.arange(T + 1) - 0.5, minor=True)
        axis.set_yticks(np.arange(T + 1) - 0.5, minor=True)
        axis.grid(which="minor", color="white", linewidth=1.2 if T <= 24 else 0.4)
        axis.tick_params(which="both", length=0)
        axis.spines[:].set_visible(False)

    shown = np.unique(np.concatenate([origin for _, origin in rows.values()])).tolist()
    names = {ANCHOR: "anchor", PADDING: "padding"}
    shown.sort(key=lambda document: (document == PADDING, document))
    key = [Patch(color=_colour(document), label=names.get(document, f"document {document}")) for document in shown]
    key.append(Patch(facecolor=MASKED_COLOUR, edgecolor="#d4d7dd", label="masked"))
    figure.legend(handles=key, loc="outside lower center", ncols=len(key), frameon=False, fontsize=10, handlelength=1.2)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=200, format=path.suffix.removeprefix(".") or "png")
    plt.close(figure)
    save(path, drawn.getvalue())


def _colour(document: int) -> str:
    special = {ANCHOR: ANCHOR_COLOUR, PADDING: PADDING_COLOUR}
    return special.get(document, DOCUMENT_COLOURS[(document - 1) % len(DOCUMENT_COLOURS)])

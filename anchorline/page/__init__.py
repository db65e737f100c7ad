"""One self-contained HTML page for every report: skeleton, style sheet, script and the way a drawing comes in.

`html` renders a template, `text` says what may stand there, `svg` takes a drawing into the page, `colours` is the
palette that the style sheet and the drawings share. Nothing here draws or computes: who draws hands over SVG text.
"""

from anchorline.page.html import render
from anchorline.page.svg import figure_style, inline
from anchorline.page.text import count, printable

__all__ = ["count", "figure_style", "inline", "printable", "render"]

"""One self-contained HTML page: the skeleton, the style sheet, the script and the way a drawing comes in, for every report.

`html` renders a template, `text` says what may stand there, `svg` takes a drawing into the page, `colours` is the palette that the style sheet and the drawings
share. Nothing here draws or computes: who draws hands over SVG text.
"""

from anchorline.page.html import render
from anchorline.page.svg import inline
from anchorline.page.text import count, printable

__all__ = ["count", "inline", "printable", "render"]

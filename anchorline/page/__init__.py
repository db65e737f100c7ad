"""One self-contained HTML page for every report: `html` renders a template, `figures` shows what matplotlib drew."""

from anchorline.page.figures import figure_style, inline
from anchorline.page.html import count, printable, render

__all__ = ["count", "figure_style", "inline", "printable", "render"]

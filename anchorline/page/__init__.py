"""The HTML pages of reports, each in one file: `html` renders a template, `figures` puts a drawing into a page."""

from anchorline.page.figures import figure_style, inline
from anchorline.page.html import count, printable, render

__all__ = ["count", "figure_style", "inline", "printable", "render"]

"""A drawing taken into a page: SVG text, as matplotlib writes it, becomes an element that follows the page's colours.

The page's policy allows no style attributes, so each declaration becomes the presentation attribute of the same name; a
colour of the light palette becomes the custom property that has it, which the style sheet knows in both schemes; the
font is the page's. Text stays text: it can be searched, selected and copied.
"""

from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from anchorline.page.colours import DRAWN, LIGHT
from anchorline.page.text import printable

_DROPPED = {"style", "metadata"}  # elements that speak of a document of its own


def figure_style(name: str) -> dict[Any, Any]:
    """Return matplotlib's settings for a drawing that `inline` takes. name: the ids in it are made from that."""
    ink, soft = LIGHT["ink"], LIGHT["soft"]
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "DejaVu Sans",
        "font.size": 8.5,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": soft,
        "xtick.color": soft,
        "ytick.color": soft,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.parse_math": False,
    }


def inline(drawn: str, label: str) -> Markup:
    """Return a drawing as an `<svg>` element of a page.

    Args:
        drawn: a whole SVG document. Ids that something refers to are kept: they must differ between drawings of one
            page (`svg.hashsalt` of matplotlib sees to it). Every colour is one of `colours.DRAWN`.
        label: what a screen reader says of it.
    """
    root = ElementTree.fromstring(drawn)
    referred = {reference for element in root.iter() for reference in _references(element)}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": printable(label)}
    for parent in [*root.iter()]:
        for child in [*parent]:
            if _local(child.tag) in _DROPPED:
                parent.remove(child)
        parent.text, parent.tail = _without_indentation(parent.text), _without_indentation(parent.tail)
        if parent is not root:
            parent.attrib = _attributes(parent, referred)
        parent.tag = _local(parent.tag)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _attributes(element: ElementTree.Element, referred: set[str]) -> dict[str, str]:
    keep = {name: value for name, value in element.attrib.items() if name not in ("style", "id")}
    if element.get("id") in referred:
        keep["id"] = element.attrib["id"]
    for declaration in filter(str.strip, element.get("style", "").split(";")):
        name, value = (part.strip() for part in declaration.split(":", 1))
        if name != "font-family":
            assert not value.startswith("#") or value in DRAWN, f"{value} is not a colour of the palette"
            keep[name] = f"var(--{DRAWN[value]})" if value in DRAWN else value
    return {_local(name): " ".join(value.split()) for name, value in keep.items()}


def _references(element: ElementTree.Element) -> list[str]:
    """The ids that an element uses: `#marker`, `url(#clip)`."""
    return [
        value.removeprefix("url(").removesuffix(")").removeprefix("#")
        for name, value in element.attrib.items()
        if _local(name) == "href" or value.startswith("url(#")
    ]


def _without_indentation(text: str | None) -> str | None:
    return None if text is not None and text.isspace() and "\n" in text else text


def _local(name: str) -> str:
    """A name without its namespace: HTML knows what stands inside `<svg>`."""
    return name.rpartition("}")[2]

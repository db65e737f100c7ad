"""The page that every report stands on: text is text, colours can be read, drawings follow the scheme."""

import base64
import hashlib
import re
from html import unescape

import pytest

from anchorline.page import inline, printable, render
from anchorline.page.colours import DARK, DRAWN, LIGHT
from anchorline.page.text import breakable, day

HOSTILE = "</style></script><script>alert(1)</script><img src=x>\" onfocus='alert(2)' &amp; \0 \ud800 é"


def page(**fields: object) -> str:
    """A page without a report in it."""
    plain = {"title": "T", "created": "2026-11-20T12:34:56+00:00", "command": "make", "facts": {}, "versions": {}}
    return render("anchorline.page", "base.html.j2", **plain | fields)


def test_whatever_is_said_is_text():
    text = page(title=HOSTILE, created=HOSTILE, command=HOSTILE, facts={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE})
    assert (text.count("<script"), text.count("</style"), text.count("<img")) == (1, 1, 0)
    assert unescape(text).count(HOSTILE.replace("\0", "\ufffd").replace("\ud800", "\ufffd")) == 9
    text.encode("utf-8")


def test_its_policy_allows_nothing_but_its_own_style_and_script():
    text = page()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    directives = dict(directive.split(" ", 1) for directive in unescape(policy).split("; "))
    for kind in ("style", "script"):
        content = text.partition(f"<{kind}>")[2].partition(f"</{kind}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert directives.pop(f"{kind}-src") == f"'sha256-{digest}'"
    none = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert directives == none | {"img-src": "data:"}
    assert not re.findall(r"url\(|@import", text)


def test_a_custom_property_that_the_style_sheet_uses_exists():
    used = set(re.findall(r"var\(--([\w-]+)\)", page()))
    assert used <= set(LIGHT)
    assert set(LIGHT) == set(DARK)


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_the_contrast_that_wcag_asks_for(scheme):
    text = [(name, "paper") for name in ("ink", "soft", "link", "good", "bad", "mixed")] + [("ink", "shade")]
    text += [("scale-ink", f"scale-{i}") for i in range(4)] + [("scale-ink-deep", f"scale-{i}") for i in (4, 5)]
    text += [(f"over-{i}-ink", f"over-{i}") for i in range(4)]
    marks = [(f"series-{i}", "paper") for i in range(8)]
    for pairs, least in ((text, 4.5), (marks, 3.0)):
        for front, ground in pairs:
            dark, bright = sorted(luminance(scheme[name]) for name in (front, ground))
            assert (bright + 0.05) / (dark + 0.05) >= least, (front, ground)


# -- drawings ----------------------------------------------------------------------------------------------------------

DRAWING = """<?xml version="1.0"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"
 width="9pt" height="9pt" viewBox="0 0 9 9">
 <metadata>by whom</metadata>
 <defs><style>* {{ fill: red }}</style><path id="marker" d="M 0 0
L 1 1"/><clipPath id="clip"><rect x="0" y="0" width="9" height="9"/></clipPath></defs>
 <g id="axes_1"><use xlink:href="#marker" clip-path="url(#clip)" style="fill: none; stroke: {ink}; stroke-width: 0.5"/>
 <text style="font-size: 8px; font-family: 'DejaVu Sans'; fill: {series}">a &lt;b&gt; <tspan>c</tspan> d
  <tspan>e</tspan>
  <tspan>f</tspan></text></g>
</svg>"""


def test_a_drawing_follows_the_page():
    drawn = inline(DRAWING.format(ink=LIGHT["ink"], series=LIGHT["series-1"]), 'said "so" \0')
    assert drawn == (
        '<svg viewBox="0 0 9 9" role="img" aria-label="said &quot;so&quot; \ufffd">'
        '<defs><path d="M 0 0 L 1 1" id="marker" />'
        '<clipPath id="clip"><rect x="0" y="0" width="9" height="9" /></clipPath></defs>'
        '<g><use href="#marker" clip-path="url(#clip)" fill="none" stroke="var(--ink)" stroke-width="0.5" />'
        '<text font-size="8px" fill="var(--series-1)">a &lt;b&gt; <tspan>c</tspan> d\n  '
        "<tspan>e</tspan><tspan>f</tspan></text></g></svg>"
    )


def test_a_colour_that_has_no_name_is_refused():
    with pytest.raises(AssertionError, match="#123456"):
        inline(DRAWING.format(ink="#123456", series=LIGHT["ink"]), "a drawing")
    assert len(DRAWN) == len(set(DRAWN.values())) == 4 + 8 + 8


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_name_breaks_after_its_separators_and_holds_no_markup():
    assert breakable("qwen2-full+tag/<b>.x\0") == "qwen2-<wbr>full+<wbr>tag/<wbr>&lt;b&gt;.<wbr>x\ufffd"
    assert printable("a\tb\n\x7f\ufffe") == "a\tb\n\ufffd\ufffd"


@pytest.mark.parametrize(
    ("created", "shown"),
    [
        ("2026-11-20T12:34:56+00:00", "20 November 2026, 12:34 UTC"),
        ("2026-11-20T23:30:00-05:00", "21 November 2026, 04:30 UTC"),
        ("yesterday", "yesterday"),
        ("9999-12-31T23:59:59-12:00", "9999-12-31T23:59:59-12:00"),
    ],
)
def test_a_date_is_told_in_utc(created, shown):
    assert day(created) == shown

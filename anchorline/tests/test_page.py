"""The frame of every report: text is text, drawings are images."""

from html import unescape

from anchorline.page import inline, printable, render
from anchorline.page.html import breakable

HOSTILE = "</style></script><script>alert(1)</script><img src=x>\" onfocus='alert(2)' &amp; \0 \ud800 é"


def page(**fields: object) -> str:
    """A page without a report in it."""
    plain = {"title": "T", "created": "2026-11-20T12:34:56+00:00", "command": "make", "facts": {}, "versions": {}}
    return render("anchorline.page", "base.html.j2", **plain | fields)


def test_text_in_a_report_is_no_markup():
    text = page(title=HOSTILE, created=HOSTILE, command=HOSTILE, facts={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE})
    assert (text.count("<script"), text.count("</style"), text.count("<img")) == (1, 1, 0)
    assert unescape(text).count(HOSTILE.replace("\0", "\ufffd").replace("\ud800", "\ufffd")) == 9
    text.encode("utf-8")


def test_a_drawing_is_an_image_with_a_label():
    image = inline("<svg/>", 'said "so"')
    assert image == '<img src="data:image/svg+xml;base64,PHN2Zy8+" alt="said &#34;so&#34;">'


def test_a_name_breaks_after_its_separators_and_holds_no_markup():
    assert breakable("qwen2-full+tag/<b>.x\0") == "qwen2-<wbr>full+<wbr>tag/<wbr>&lt;b&gt;.<wbr>x\ufffd"
    assert printable("a\tb\n\x7f\ufffe") == "a\tb\n\ufffd\ufffd"

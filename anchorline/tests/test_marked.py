"""Places between two lines of a Markdown file."""

import pytest

from anchorline.errors import UserError
from anchorline.marked import MarkedPlace, read_marked

PLACE = MarkedPlace("<!-- made -->", "<!-- end -->")


def test_only_the_text_between_the_lines_is_replaced():
    text = "# Mine\n\n<!-- made -->\nold\n<!-- end -->\n\nmine too, \\1\n"
    made = PLACE.put(text, "\nnew \\1\n")
    assert made == "# Mine\n\n<!-- made -->\n\nnew \\1\n\n<!-- end -->\n\nmine too, \\1\n"
    assert PLACE.put(made, "new \\1") == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<!-- end -->\n<!-- made -->",
        "<!-- made -->\n<!-- made -->\n<!-- end -->",
    ],
)
def test_a_document_without_the_place_once_is_refused(tmp_path, text):
    document = tmp_path / "a.md"
    document.write_text(text)
    with pytest.raises(UserError, match=r"has not one line <!-- made --> and behind it one line <!-- end -->; add"):
        read_marked(document, [PLACE])


def test_a_document_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--document: no such file or directory .*none.md"):
        read_marked(tmp_path / "none.md", [PLACE])
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe<!-- made -->")
    with pytest.raises(UserError, match="give a Markdown file in UTF-8"):
        read_marked(tmp_path / "binary.md", [PLACE])

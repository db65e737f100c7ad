"""Strict YAML: a file or an override is read, or refused in one short line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from anchorline import settings
from anchorline.errors import UserError

LONGEST = 1_000  # characters of a message


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str = "x"
    count: int = 1
    share: float = 0.5
    numbers: list[int] = []


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    part: Part = Part()
    parts: list[Part] = []
    pair: tuple[float, float] | None = Field(default=None, strict=False)


@pytest.fixture(scope="session")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("settings") / "file.yaml"


@pytest.fixture(scope="session")
def load(file):
    """Return a function that writes a text and reads it; a refusal is one short line."""

    def load(text: str | bytes = "{}", *overrides: str) -> Whole:
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        try:
            return settings.load(Whole, file, overrides, example="part.count=2")
        except UserError as error:
            message = str(error)
        assert message.isprintable()
        assert len(message) < LONGEST
        raise UserError(message)

    return load


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1E3", 1e3),
        ("1.5e3", 1.5e3),
        (".5", 0.5),
        ("-.5e-1", -0.05),
        ("1_000.5", 1000.5),
    ],
)
def test_numbers_as_people_write_them(load, text, value):
    assert load(f"part: {{share: {text}}}").part.share == value
    assert load("{}", f"part.share={text}").part.share == value


@pytest.mark.parametrize("text", ["12:30", "2026-11-30", "1:1", "~x", ".", "-", "1e", "0x", "e5", "<<", "1_000:30.5"])
def test_what_only_looks_like_a_number_or_a_date_is_text(load, text):
    assert load(f"part: {{name: {text}}}").part.name == text


@pytest.mark.parametrize(("text", "value"), [("0x1f", 31), ("0b11", 3), ("1_000", 1000), ("+5", 5), ("0", 0)])
def test_whole_numbers(load, text, value):
    assert load(f"part: {{count: {text}}}").part.count == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- " * 30_000, "nested too deep"),
        ("x" * 70_000, "longer than 65,536 bytes"),
        ("part: {count: !!int ''}", "not valid YAML"),
        ("part: {count: !!python/object/apply:os.system [ls]}", "could not determine a constructor for the tag"),
        ("part: !!map [1]", "expected a mapping node"),
        ("{[1]: 2}", "is not a name"),
        ("on: 1", "key 'on' is not a name; quote it"),
        ("part: {count: 1}\npart: {count: 2}", "line 2: key 'part' appears twice"),
        ("<<: {part: {count: 1}}", "<<: unknown key"),
        ("part: {count: 010}", "count: '010': give an integer"),
        ("part: {count: 9999999999999999999999999}", "does not fit into 64 bits"),
        ("part: {share: 1e400}", "finite number"),
        ("part: {share: .nan}", "finite number"),
        ('part: {name: "\\0"}', "holds NUL or half a surrogate pair"),
        (b"part: {name: \xff}", "byte 13 is not UTF-8; save the file as UTF-8"),
        ("a: 1\n---\nb: 2", "line 2, column 1: not valid YAML: but found another document; keep one document$"),
        ("a:\n  b: c: d", r"line 2, column 7: not valid YAML: mapping values are not allowed here; quote text"),
        ("a:\n\tb: 1", "line 2, column 1: .*; indent with spaces, not with tabs$"),
        ("a:\n  b: 1\n c: 2", "line 3, column 2: .*; indent the line like those that it belongs to$"),
        ("a: [1,\nb: 2", "line 1, column 4: .*; close the bracket that is open$"),
        ("a: 'x", "line 1, column 4: .*; close the quote that is open$"),
        ("a: *.jsonl", "line 1, column 5: .*; write key: value, and quote text that begins with a sign"),
        ("a: 1\nb: \x01", r"line 2: not valid YAML: holds '\\x01'; remove it$"),
        ("".join(f"k{i}: 1\n" for i in range(5_000)), "and 4992 more"),
        (f"part: {{count: {'x' * 50_000}}}", "give an integer"),
    ],
)
def test_files_that_are_refused(load, text, message):
    with pytest.raises(UserError, match=message):
        load(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("", "write section.key=value"),
        ("=1", "write section.key=value"),
        ("parts.0.count=1", "'0' is not an index of a list of 0"),
        ("parts.\u0663=1", "is not an index"),
        ("part.name=[", "not valid YAML.*; quote it if it is text$"),
        ("part.count=" + "9" * 25, "'9{25}' does not fit into 64 bits; give a smaller number"),
        ("part.count=1.5", r"part\.count: 1\.5: give an integer$"),
        ("part.name=no", r"part\.name: false: give a text \(quoted, where YAML reads something else\)$"),
        ("part.name=", r"part\.name: nothing: give a text"),
        ("part=true", r"part: true: give a section such as \{key: value\}$"),
        ("part.count={a: 1, a: 2}", "appears twice"),
        ("part.name.x=1", "'name' holds a value, not a section"),
    ],
)
def test_overrides_that_are_refused(load, override, message):
    with pytest.raises(UserError, match=message):
        load("parts: []\npart: {name: x}", override)


@given(text=st.text())
def test_any_text_that_is_written_is_read_back(file, text):
    file.write_text(settings.dump({"part": {"name": text}}), encoding="utf-8")
    if "\0" in text:
        with pytest.raises(UserError, match="NUL"):
            settings.load(Whole, file, example="")
    else:
        assert settings.load(Whole, file, example="").part.name == text


@given(
    text=st.text(alphabet="[]{}:,-?&*!|>%@'\"# \n\tab01.e_~<=\0\ud800"),
    override=st.text(alphabet="part.name=[]{}&*!: 01~"),
)
def test_anything_else_is_read_or_refused(load, text, override):
    for arguments in ((text,), ("{}", override)):
        try:
            load(*arguments)
        except UserError:
            continue


def test_a_file_that_cannot_be_read(tmp_path):
    for path, message in (
        (tmp_path / "none", "no such file or directory; give a YAML file"),
        (tmp_path, "is a directory; give a YAML file"),
        (tmp_path / "a\0b", "no file can have this name"),
    ):
        with pytest.raises(UserError, match=message):
            settings.load(Whole, path, example="")


@pytest.mark.parametrize("of", ["[{0}, {0}]", "{{x: {0}, y: {0}}}", "[[{0}], {0}]", "{{x: [{0}, {0}]}}"])
def test_aliases_that_multiply_are_refused_at_once(load, of):
    levels = [f"&a{n} {of.format(f'*a{n - 1}' if n else '[1, 2]')}" for n in range(60)]
    with pytest.raises(UserError, match=r"line \d+: aliases make more than 65,536 values; remove them"):
        load("\n".join(f"a{n}: {level}" for n, level in enumerate(levels)))
    with pytest.raises(UserError, match=r"override .*: aliases make more than"):
        load("{}", f"parts=[{', '.join(levels)}]")


def test_a_few_aliases_are_the_values_that_they_name(load):
    assert load("part: &a {name: b}\nparts: [*a, *a]").parts == [Part(name="b")] * 2
    with pytest.raises(UserError):
        load("parts: &a [*a]")

"""What README.md, CONTRIBUTING.md and docs/ print: links lead somewhere, named files exist, commands parse."""

import importlib.util
import pkgutil
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer

import torchtrain
from benchmarks import bench_page
from parity_tests.commands import load_apps
from torchtrain.config.load import load_config
from torchtrain.config.reference import list_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
TOP = "anchorline|benchmarks|configs|docs|examples|jaxref|parity_tests|ropestudy|torchtrain"
WITH_THE_SITE = runpy.run_path(str(ROOT / ".ci" / "site.py"))["MADE"]
# The log names files as they were when an experiment was made.
NAMED = [page for page in PAGES if page.name != "LOG.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return page.name


def commands(page: Path) -> list[list[str]]:
    """Return the words of each printed command line; a line that ends in a backslash goes on."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "bash", "sh")]
    indented = re.findall(r"^ {4}(\S.*)$", FENCE.sub("", text).replace("\\\n", " "), re.MULTILINE)
    lines = [*indented, *(line for block in blocks for line in block.replace("\\\n", " ").splitlines())]
    start = r"torchtrain|jaxref|parity|torchrun|make|python -m"
    found = [line for line in lines if re.match(rf"(?:{start})\b ", line.strip())]
    return [shlex.split(line.strip(), comments=True) for line in found]


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path) if path else page
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(slug, headings):
                broken.append(target)
    assert broken == []


def test_the_site_lists_every_page():
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(["index.md", *WITH_THE_SITE, *(page.name for page in (ROOT / "docs").glob("*.md"))])


def test_the_site_makes_the_pages_of_settings_and_functions():
    settings, functions = (importlib.import_module(module).format_page() for module in WITH_THE_SITE.values())
    for setting in list_settings():
        assert f"- `{setting.key.partition('.')[2]}` ({setting.values}; `{setting.default}`): " in settings
    for name in ("pack", "attach", "collate", "extend"):
        assert f"## {name}\n\n    torchtrain.{name}(" in functions
        assert (getattr(torchtrain, name).__doc__ or "?").partition("\n")[0] in functions


@pytest.mark.parametrize("page", NAMED, ids=page_id)
def test_named_files_exist(page):
    named = re.findall(rf"`((?:{TOP})/[\w./-]+\.(?:py|sh|yaml|json|md|xz|csv))`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", NAMED, ids=page_id)
def test_printed_commands_parse(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in commands(page):
        wrong = " ".join(words)
        if words[0] == "make":
            assert words[1] in targets, wrong
            continue
        if words[0] == "torchrun":
            words = words[words.index("-m") + 1 :]
        elif words[0] == "python":
            assert importlib.util.find_spec(words[2]), wrong
            continue
        parse(words, wrong)
        for word in words:
            if word.startswith("configs/"):
                assert (ROOT / word).exists(), wrong


def parse(words: list[str], wrong: str) -> None:
    """Parse the arguments of a verb as the command would, and run nothing."""
    command, arguments = typer.main.get_command(load_apps()[words[0]]), words[1:]
    while arguments and isinstance(command, typer.core.TyperGroup):
        name = arguments.pop(0)
        if name.startswith("-"):
            return
        assert name in command.commands, wrong
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    for word in arguments:
        if re.match(r"--?[a-zA-Z]", word):
            assert word.partition("=")[0] in known, f"{wrong}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_printed_configurations_are_read(page, tmp_path):
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "yaml" and body.startswith("run:"):
            (tmp_path / "mine.yaml").write_text(body)
            load_config(tmp_path / "mine.yaml", [])


def test_what_the_glossary_names_exists():
    packages = "anchorline|jaxref|ropestudy|torchtrain|parity_tests"
    names = re.findall(rf"`((?:{packages})\.[\w.]+)`", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert [pkgutil.resolve_name(name) for name in names]


def test_the_page_of_benchmarks_shows_what_was_measured(tmp_path):
    """Written again from the kept results, it is the same."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks" / "results").glob("*.json")
    shown = [path for path in results if f"bench_page of {path.name}" in text]
    assert 0 < len(shown) == text.count("<!-- made by benchmarks/bench_page of ")
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    bench_page.write(tmp_path / "page.md", shown)
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == text


def test_readme_prints_a_part_of_the_example():
    blocks = dict(FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert blocks["python"] in (ROOT / "examples" / "train_from_strings.py").read_text(encoding="utf-8")


# Programs write them; a glossary has a line for a word.
NOT_WRAPPED = ("glossary.md", "matrix.md", "results.md")
MADE = re.compile(r"^<!-- (?:made|answers|results) .*?^<!-- end", re.MULTILINE | re.DOTALL)  # by a program
WIDE = re.compile(r"\||    |  +-|!\[|<!--")  # tables, code, pictures, marks


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in NOT_WRAPPED], ids=page_id)
def test_prose_wraps_at_100(page):
    own = MADE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    assert [
        line for line in own.splitlines() if len(line) > 100 and " " in line.strip()[:100] and not WIDE.match(line)
    ] == []


def test_readme_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110

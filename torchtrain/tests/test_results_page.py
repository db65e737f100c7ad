"""docs/results.md is what `torchtrain compare` makes of the measurements that come with the repository."""

import shlex
import shutil
from pathlib import Path

from typer.testing import CliRunner

from torchtrain.cli import app

ROOT = Path(__file__).parents[2]
PAGE, DATA = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "results" / "needles"


def test_the_page_is_made_of_its_data(tmp_path, monkeypatch):
    """By the command that the page names, run where it says."""
    text = PAGE.read_text()
    command = text[text.index("    cd ") :].split("\n\n")[0].replace("\\\n", " ")
    place, compare = command.split("&&")
    assert shlex.split(place) == ["cd", str(DATA.relative_to(ROOT))]
    copy = tmp_path / "docs" / PAGE.name
    copy.parent.mkdir()
    shutil.copy(PAGE, copy)
    arguments = shlex.split(compare)[1:]
    arguments[arguments.index("--document") + 1] = str(copy)
    monkeypatch.chdir(DATA)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert copy.read_text() == text
    drawn = [path.name for path in (copy.parent / "figures").iterdir()]
    assert drawn == ["results-score-by-length.svg"]
    assert (PAGE.parent / "figures" / drawn[0]).is_file()

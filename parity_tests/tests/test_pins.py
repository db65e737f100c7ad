"""What is installed: every version stands once in constraints.txt, and requirements.txt has the hashes of the same."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lock_holds_what_the_constraints_name():
    installed, _, optional = (ROOT / "constraints.txt").read_text(encoding="utf-8").partition("# Not installed")
    pins = set(re.findall(r"^[\w.-]+==\S+$", installed, re.M))
    assert len(pins) > 50
    assert not pins & set(re.findall(r"^[\w.-]+==\S+$", optional, re.M))
    locked = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    entries = re.split(r"^(?=[\w.-]+==)", locked, flags=re.M)[1:]
    names = {_normalise(entry.split()[0]) for entry in entries}
    assert names == {_normalise(pin) for pin in pins if not pin.startswith("torch==")}, "run `make lock`"
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


def _normalise(pin: str) -> str:
    """Return a pin as registries write it."""
    name, _, version = pin.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"

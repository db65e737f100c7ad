"""`parity compare`: a mistake of the user's is one line and exit code 2, whatever is misspelt."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from parity_tests import cli
from parity_tests.comparing.dumps import open_dump
from parity_tests.comparing.names import load_names, rename

RANDOM = np.random.default_rng(0)
MADE = ("emb", "blk0/qkv", "blk0/ctx", "blk1/qkv", "blk1/ctx", "head")
TRUTH = {name: RANDOM.standard_normal((2, 8, 6)) for name in MADE} | {"tok": np.arange(16)}
MAP = {"inputs.input_ids": "tok", "embed": "emb", "layers.{i}.q": "blk{i}/qkv", "layers.{i}.attn": "blk{i}/ctx"}
MAP |= {"logits": "head"}
ALL = "c --truth t --reference r"
FLOATS = {n: x if n == "tok" else x.astype(np.float32) for n, x in TRUTH.items()}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, arrays in {"t": TRUTH, "r": FLOATS, "c": FLOATS}.items():
        save_file(arrays, name)
    Path("map.yaml").write_text(json.dumps({"names": MAP}))


def compare(given: str):
    return CliRunner().invoke(cli.app, ["compare", *given.split()])


def refuses(given: str, says: str) -> None:
    done = compare(given)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert says in line, line


@pytest.mark.parametrize(
    ("entry", "other", "says"),
    [
        ({"logits": None, "logit": "head"}, {}, "--names m.yaml: logit: t has no such name (did you mean logits?"),
        ({}, {"embed": None, "embd": "emb"}, "--names m.yaml: embed: t has no such name (did you mean embd?"),
        ({"layers.{i}.attn": "blk{i}/cxt"}, {}, "layers.{i}.attn: c has no blk{i}/cxt (did you mean blk{i}/ctx?"),
        ({}, {"logits": "haed"}, "--truth-names o.yaml: logits: t has no haed (did you mean head?"),
        ({"sum": ["head", "haed"]}, {}, "sum: c has no haed"),
        ({"logits": {"form": "head"}}, {}, "names.logits.form: unknown key; did you mean names.logits.from?"),
    ],
)  # fmt: skip
def test_a_name_that_a_map_of_the_users_own_misspells(here, entry, other, says):
    for name, changes in {"m": entry, "o": other}.items():
        kept = {k: v if isinstance(v, str | dict) else {"from": v} for k, v in (MAP | changes).items() if v is not None}
        Path(f"{name}.yaml").write_text(json.dumps({"names": kept}))
    refuses(f"{ALL} --names m.yaml --truth-names o.yaml", says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--only emb --only zz", "--only zz: fits no name"),
        ("--only nothing*", "--only nothing*: fits no name"),
        ("--axes haed=BTM", "--axes haed: fits no name (did you mean head?"),
        ("--axes head=btm", "--axes head=btm: write"),
        ("--order order", "--order haed: fits no name (did you mean head?"),
    ],
)
def test_a_pattern_that_fits_nothing(here, given, says):
    Path("order").write_text("emb\n\nhaed\n")
    refuses(f"{ALL} {given}", says)
    Path("order").write_text("head\nemb\n")
    assert compare(f"{ALL} --only emb --only blk* --axes blk*=BTM --order order").exit_code == 0


def test_names_keep_the_places_of_their_sources(here):
    order = ["head", "tok", "blk1/ctx", "blk0/qkv", "emb", "blk0/ctx"]
    many = {"layers.{i}.k": {"from": "blk{i}/qkv"}, "both": {"from": ["head", "emb"]}}
    Path("m.yaml").write_text(json.dumps({"names": MAP | many}))
    wanted = ["logits", "inputs.input_ids", "layers.1.attn", "layers.0.q", "layers.0.k", "embed", "both"]
    wanted += ["layers.0.attn", "layers.1.q", "layers.1.k"]  # what the order lacks comes last
    Path("order").write_text("\n".join(order))
    assert list(rename(open_dump(Path("c"), Path("order")), load_names("m.yaml")).arrays) == wanted
    Path("s").mkdir()
    for path in ("c", "s/step0.safetensors", "s/step1.safetensors"):
        save_file(FLOATS, path, {"order": json.dumps(order)})
    assert list(rename(open_dump(Path("c")), load_names("m.yaml")).arrays) == wanted
    of_steps = list(rename(open_dump(Path("s")), load_names("m.yaml")).arrays)
    assert of_steps == [f"step {n}: {name}" for n in range(2) for name in wanted]


@pytest.mark.parametrize(
    ("given", "verdict", "badge", "color"),
    [
        ("--truth t --reference r", "SAME", "1 case the same", "brightgreen"),
        ("--truth t", "WITHIN THE NOISE FLOOR", "within the noise floor", "blue"),
        ("--against t", "A DIFFERENCE, not judged", "a difference, not judged", "blue"),
        ("--against c", "IDENTICAL", "identical", "blue"),
        ("--truth far", "BEYOND THE NOISE FLOOR", "beyond the noise floor", "red"),
    ],
)
def test_every_form_of_the_report_says_the_verdict(here, given, verdict, badge, color):
    save_file(TRUTH | {"head": TRUTH["head"] * 2}, "far")
    save_file(FLOATS | {"mine": FLOATS["emb"]}, "c")
    Path("o.yaml").write_text(json.dumps({"names": dict(reversed(MAP.items()))}))
    assert f"{verdict}: " in compare(f"c {given} --out out --names map.yaml --truth-names o.yaml").stdout
    written, page = json.loads(Path("out/badge.json").read_text()), Path("out/report.html").read_text()
    assert (written["message"], written["color"]) == (badge, color)
    assert ("oracle" in page.partition("</style>")[2], f"<title>{verdict}" in page) == (False, True)
    assert ("∞" in page, "allowance is" in page) == (False, "against" not in given)
    case = ElementTree.parse("out/junit.xml").getroot()[0][0]
    message = "".join(failure.get("message", "") for failure in case.iter("failure"))
    assert message.startswith(f"{verdict}: ") == verdict.startswith(("A DIFF", "BEYOND"))
    said = str(case.findtext("system-out"))
    assert ("not compared: 1 names" in said, verdict in said) == (True, verdict != "SAME")

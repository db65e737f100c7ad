"""`parity compare`: a mistake of the user's is one line and exit code 2, whatever is misspelt, malformed or missing."""

import json
import struct
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from parity_tests import cli
from parity_tests.comparing.dumps import Dump, open_dump
from parity_tests.comparing.names import load_names, rename

RANDOM = np.random.default_rng(0)
TRUTH = {"tok": np.arange(16).reshape(2, 8), "emb": RANDOM.standard_normal((2, 8, 6))}
TRUTH |= {f"blk{i}/{name}": RANDOM.standard_normal((2, 8, 6)) for i in range(2) for name in ("qkv", "ctx")}
TRUTH |= {"head": RANDOM.standard_normal((2, 8, 6))}
MAP = {"inputs.input_ids": "tok", "embed": "emb", "layers.{i}.q": "blk{i}/qkv", "layers.{i}.attn": "blk{i}/ctx"}
MAP |= {"logits": "head"}
FLOATS = {n: x if n == "tok" else x.astype(np.float32) for n, x in TRUTH.items()}

SEEN, INT = np.tri(8, dtype=bool), np.arange(16).reshape(2, 8)
BIG = '{"token_ids": [1], "logprobs": [%s]}' % ("9" * 400)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, arrays in {"t": TRUTH, "r": FLOATS, "c": FLOATS}.items():
        save_file(arrays, name)
    for name, step in {"s3": 3, "s1": 1, "r4": 4}.items():
        Path(name).mkdir()
        for n in range(step):
            save_file(FLOATS, f"{name}/{'rank' if name == 'r4' else 'step'}{n}.safetensors")
    for name in ("step{n}_rank{r}", "rank{r}.step_{n}"):  # the same runs
        Path(folder := "both" if name[0] == "s" else "alike").mkdir()
        for n, r in product(range(2), repeat=2):
            arrays = {k: x + 2 * n + r for k, x in FLOATS.items()}
            save_file(arrays, f"{folder}/{name.format(n=n, r=r)}.safetensors")
    for name, changes in {"map": {}, "typo": {"logits": None, "logit": "head"}}.items():
        Path(f"{name}.yaml").write_text(json.dumps({"names": {k: v for k, v in (MAP | changes).items() if v}}))
    return tmp_path


def compare(given: str, *more: str):
    return CliRunner().invoke(cli.app, ["compare", *given.split(), *more])


def refuses(given: str, says: str) -> None:
    done = compare(given)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert says in line, line


ALL = "c --truth t --reference r"


@pytest.mark.parametrize(
    ("entry", "other", "says"),
    [
        ({"logits": None, "logit": "head"}, {}, "--names m.yaml: logit: t has no such name (did you mean logits?"),
        ({"layers.{i}.attn": None, "layers.{i}.atn": "blk{i}/ctx"}, {}, "atn: t has no such name (did you mean"),
        ({}, {"embed": None, "embd": "emb"}, "--names m.yaml: embed: t has no such name (did you mean embd?"),
        ({"zz": "head", "logits": None}, {}, "zz: t has no such name; mend"),
        ({"layers.{i}.attn": "blk{i}/cxt"}, {}, "layers.{i}.attn: c has no blk{i}/cxt (did you mean blk{i}/ctx?"),
        ({}, {"logits": "haed"}, "--truth-names o.yaml: logits: t has no haed (did you mean head?"),
        ({"sum": ["head", "haed"]}, {}, "sum: c has no haed"),
        ({"logits": {"form": "head"}}, {}, "names.logits.form: unknown key (did you mean names.logits.from?"),
        ({"logits": []}, {}, "names.logits"),
        ({"embed": {"from": "emb", "steps": ["heads"]}}, {}, "head_dim is not known; give a config.json with"),
    ],
)  # fmt: skip
def test_a_name_that_a_map_of_the_users_own_misspells(here, entry, other, says):
    for name, changes in {"m": entry, "o": other}.items():
        kept = {k: v if isinstance(v, str | dict) else {"from": v} for k, v in (MAP | changes).items() if v is not None}
        Path(f"{name}.yaml").write_text(json.dumps({"names": kept}))
    refuses(f"{ALL} --names m.yaml --truth-names o.yaml", says)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"layers.{i}.q": "blk/qkv"}, "layers.{i}.q and blk/qkv: write {i} once in both, or in neither"),
        ({"q": "blk{i}/qkv"}, "q and blk{i}/qkv: write {i} once"),
        ({"layers.{i}.q": "blk{i}/{i}"}, "write {i} once"),
        ({"q": {"from": ["emb", "blk{i}/qkv"]}}, "write {i} once"),
        *((MAP | {"stages": stages}, "stages: ") for stages in (0, -1)),
    ],
)
def test_layers_and_stages_of_a_map_that_cannot_be(here, names, says):
    stages = names.pop("stages", False)
    Path("m.yaml").write_text(json.dumps({"names": names, "stages": stages}))
    refuses(f"{ALL} --names m.yaml", says)


def test_an_array_that_a_map_hides_is_named(here):
    Path("m.yaml").write_text(json.dumps({"names": {"head": "emb"}}))
    done = compare(f"{ALL} --names m.yaml --truth-names none")
    assert "c: its own head is not compared: the map makes that name of emb" in done.stdout, done.output


def test_flat_tokens_are_rows_again(here):
    save_file(FLOATS | {"head": FLOATS["head"].reshape(16, 6)}, "c")
    Path("m.yaml").write_text(json.dumps({"names": MAP | {"logits": {"from": "head", "steps": [{"rows": 2}]}}}))
    assert compare(f"{ALL} --names m.yaml --truth-names map.yaml").exit_code == 0


STEPS = [{"prat": [0, [1, 1, 1]]}, {"part": 0}, {"part": [3, [1, 1, 1]]}, {"part": [0, [0, 1]]}, {"part": [0, []]}]
STEPS += [{"part": [0, [1, 3]]}, {"part": [0, ["depth"]]}, {"part": [-1, [1, 1]]}, {"groups": "p"}, {"move": [0, 0, 1]}]
STEPS += [{"move": [0, 1]}, {"move": "012"}, {"join": "2"}, {"heads": 4}, {"part": [0, [1]], "join": 2}, "heads", {}]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_of_a_map_that_does_not_fit(here, step):
    entry = {"layers.{i}.q": {"from": "blk{i}/qkv", "steps": [step]}}
    Path("m.yaml").write_text(json.dumps({"names": MAP | entry}))
    refuses(f"{ALL} --names m.yaml --truth-names map.yaml", "m.yaml")
    assert "layers.{i}.q" in compare(f"{ALL} --names m.yaml --truth-names map.yaml").stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--only emb --only zz", "--only zz: fits no name"),
        ("--only nothing*", "--only nothing*: fits no name"),
        ("--only embb", "--only embb: fits no name (did you mean emb?"),
        ("--axes haed=BTM", "--axes haed: fits no name (did you mean head?"),
        ("--axes head=btm", "--axes head=btm: write"),
        ("--axes head=BTT", "--axes head=BTT: write"),
        ("--order order", "--order haed: fits no name (did you mean head?"),
        ("--order patterns", "--order blk[*]/qkv: fits no name"),
    ],
)
def test_a_pattern_that_fits_nothing(here, given, says):
    Path("order").write_text("emb\n\nhaed\n")
    Path("patterns").write_text("blk*/qkv\n")
    refuses(f"{ALL} {given}", says)
    Path("order").write_text("head\nemb\n")
    assert compare(f"{ALL} --only emb --only blk* --axes blk*=BTM --order order").exit_code == 0


def written(path: Path, metadata: object = None, **entry: object) -> None:
    one = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | entry
    header = json.dumps(({} if metadata is None else {"__metadata__": metadata}) | {"emb": one}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        *(({"metadata": {"order": x}}, "order in its metadata") for x in ("5", "not json", "[1]", '{"a": 1}', 5)),
        *(({"metadata": {"config": x}}, "config in its metadata") for x in ("[1]", "", "null", "[" * 10**5)),
        *(({"metadata": x}, "damaged") for x in ("a", [1])),
        *(({"shape": x}, "emb has shape") for x in ([-2, -2], ["2", 2], [2.0, 2], [True, 4])),
        *(({"shape": x}, "damaged") for x in ([2**40, 2**40], 4, None)),
        *(({"data_offsets": x}, "damaged") for x in ([16, 0], [0], [0.0, 16.0], None)),
        *(({"dtype": x}, f"emb is of dtype {x}; write one of F64") for x in ("I4", "F4", "C64")),
    ],
)
def test_a_malformed_header(here, entry, says):
    written(here / "bad", **entry)
    refuses("bad --truth t --only emb", says)


@pytest.mark.parametrize(("content", "says"), [("[1, 2]", "a list"), ("{}", "holds no array"), ("nul", "not JSON")])
def test_a_header_without_arrays(here, content, says):
    (here / "bad").write_bytes(struct.pack("<Q", len(content)) + content.encode() + b" " * 8)
    refuses("bad --truth t", says)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ("rank1", "lacks rank 0"),
        ("rank0 rank1 rank3", "lacks rank 2"),
        ("rank0 rank5000000000", "lacks rank 1"),
        ("tp_rank_0_pp_rank_0 tp_rank_1_pp_rank_0 tp_rank_1_pp_rank_1", "lacks rank 0, 1"),
        ("rank0 rank1 extra", "hold the same names"),
        ("rank0_a rank0_b", "hold the same names"),
        ("fp32 eps32", "hold the same names"),
        ("fp32 fp64x", "hold the same names"),
        ("one two", "hold the same names"),
        ("tp2_a0 tp2_b1", "hold the same names"),
        ("step0_rank0 step0_rank1 step1_rank0", "every rank of every step"),
        ("step0_rank0 step0_rank1 step1", "every rank of every step"),
    ],
)
def test_files_that_are_neither_ranks_nor_steps(here, files, says):
    Path("d").mkdir()
    for name in files.split():
        save_file(FLOATS, f"d/{name}.safetensors")
    refuses("d --truth t --reference r", says)


@pytest.mark.parametrize("given", ["s1 --against s3", "s3 --against r4", "c --against s3", "c --against r4"])
def test_steps_and_ranks_are_as_many_on_both_sides(here, given):
    if given != "s1 --against s3":
        refuses(given, "give as many on both sides")
    Path("s1/step0.safetensors").rename("s1/rank0.safetensors")
    refuses("s3 --against s1", "give as many")
    refuses("s1 --against s3", "no steps and 1 ranks, s3 holds 3 steps and 1 ranks; give as many on both sides; ranks")


CHOSEN = [("s3", "emb", 3), ("s3", "step 1: *", 7), ("s3", "!blk*", 9), ("r4", "*", 7), ("r4", "emb [rank 1]", 1)]
CHOSEN += [("both", "*", 14), ("both", "step 1: emb [rank 1]", 1)]


@pytest.mark.parametrize(("given", "only", "count"), CHOSEN)
def test_arrays_of_steps_and_ranks_are_chosen_and_counted(here, given, only, count):
    done = compare(f"{given} --against {given.replace('both', 'alike')}", "--only", only)
    assert f"IDENTICAL: {count} arrays" in done.stdout, done.output


@pytest.mark.parametrize(
    ("name", "mine", "true", "given", "says"),
    [
        ("a", SEEN, SEEN, "", "reference and candidate hold the same numbers in all 6 arrays: the comparison shows"),
        ("a", SEEN, SEEN, "--dtype bfloat16", "in 6 arrays (blk0/qkv, ...) the candidate is finer than --dtype"),
        ("a", np.where(SEEN, 0, -1e9), SEEN, "", "one mask is additive"),
        ("a", ~SEEN, SEEN.astype(int), "", "True is False in the other"),
        ("tokens", 15 - INT, INT, "", "T: tokens (tokens): 16 of 16 entries differ, and none may; the same values"),
        ("layers.3.top", INT, INT + 1, "", "leave these out: --only '!layers.*.top'"),
        ("a", np.ones((2, 8, 9)), np.ones((2, 8, 6)), "", "by a map's step: {part: [0, [6, 3]]}"),
        ("a", np.ones((16, 6)), np.ones((2, 8, 6)), "", "`python -m pydoc parity_tests.comparing.names` lists"),
    ],
)
def test_what_a_reader_must_know_is_said(here, name, mine, true, given, says):
    for side, x in {"c": mine, "r": true, "t": true}.items():
        save_file((TRUTH if side == "t" else FLOATS) | {name: x}, side)
    assert says in compare(f"{ALL} {given}").stdout


def test_names_keep_the_places_of_their_sources(here):
    order = ["head", "tok", "blk1/ctx", "blk0/qkv", "emb", "blk0/ctx"]
    save_file(FLOATS, "c", {"order": json.dumps(order)})
    steps = [{"part": [0, [1, 2]]}]
    many = MAP | {"layers.{i}.q": {"from": "blk{i}/qkv", "steps": steps}, "layers.{i}.k": {"from": "blk{i}/qkv"}}
    Path("m.yaml").write_text(json.dumps({"names": many | {"both": {"from": ["head", "emb"]}}}))
    wanted = ["logits", "inputs.input_ids", "layers.1.attn", "layers.0.q", "layers.0.k", "embed", "both"]
    wanted = wanted[:-1] + ["both", "layers.0.attn", "layers.1.q", "layers.1.k"]  # what the order lacks comes last
    assert list(rename(open_dump(Path("c")), load_names("m.yaml")).arrays) == wanted
    save_file(FLOATS, "c")
    assert list(rename(open_dump(Path("c"), order), load_names("m.yaml")).arrays) == wanted
    for n in range(2):
        save_file(FLOATS, f"s3/step{n}.safetensors", {"order": json.dumps(order)})
    of_steps = list(rename(open_dump(Path("s3")), load_names("m.yaml")).arrays)
    assert of_steps[: 2 * len(wanted)] == [f"step {n}: {name}" for n in range(2) for name in wanted]
    by_name = list(rename(Dump("", open_dump(Path("c")).arrays, {}), load_names("m.yaml")).arrays)
    assert by_name.index("embed") < by_name.index("layers.0.q") < by_name.index("logits")


def write_lines(name: str, *rows: object) -> None:
    lines = (json.dumps({"token_ids": [*range(len(row))], "logprobs": row}) for row in rows)
    Path(name).write_text("\n".join(lines))


ROWS = [[None, -1.5, -2.0, -0.25], [None, -3.0, -1.0]]


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ([[-1.0, -1.5, -2.0, -0.25], ROWS[1]], "mine: line 1 has a log-probability"),
        ([ROWS[0], [None, None, -1.0]], "mine: document 1 has null for token 1, t a log-probability"),
        ([ROWS[0], ["a", -3.0, -1.0]], "line 2: not lists of integers, and of numbers or null"),
        ([ROWS[0], [True, -3.0, -1.0]], "line 2: not lists"),
        ([[None] * 4, [None] * 3], "give integers and floats"),
    ],
)
def test_null_is_no_log_probability(here, mine, says):
    write_lines("t", *ROWS)
    write_lines("same", *ROWS)
    same = compare("--logprobs same --against t")
    assert (same.exit_code, "difference of 5 tokens, same less t: mean 0" in same.stdout) == (0, True), same.output
    write_lines("mine", *mine)
    refuses("--logprobs mine --truth t", says if "line 1 has a" not in says else "t: document 0 has null for token 0")


@pytest.mark.parametrize(
    "content",
    ["", BIG, '{"token_ids": ["a"], "logprobs": [-1]}', '{"token_ids": 5, "logprobs": [-1]}', "{", '{"a": 1}'],
)
def test_log_probabilities_that_are_none(here, content):
    write_lines("t", *ROWS)
    Path("mine").write_text(content)
    refuses("--logprobs mine --truth t", "--logprobs 'mine': " + "line 1" * bool(content))
    refuses("--logprobs . --truth t", "--logprobs '.': ")


def test_log_probabilities_as_other_programs_write_them(here):
    write_lines("t", [-1.5, -2.0], [-3.0])
    text = Path("t").read_text().replace("{", '{"text": "\u2028", ')
    Path("mine").write_text(f"\n{text}\n\n", encoding="utf-8-sig")
    ids, rows = np.array([0, 1, 0, 9]), np.array([1, 1, 2, -1])
    save_file({"token_ids": ids, "document_ids": rows, "logprobs": np.float32([-1.5, -2, -3, 0])}, "s")
    for mine in ("mine", "s"):
        done = compare(f"--logprobs {mine} --against t")
        assert "IDENTICAL" in done.stdout, done.output


@pytest.mark.parametrize(
    ("given", "verdict", "badge", "junit"),
    [
        ("--truth t --reference r", "SAME", ("1 case the same", "brightgreen"), None),
        ("--truth t", "WITHIN THE NOISE FLOOR", ("within the noise floor", "blue"), None),
        ("--against c", "IDENTICAL", ("identical", "blue"), None),
        ("--against other", "A DIFFERENCE, not judged", ("a difference, not judged", "blue"), "A DIFFERENCE, "),
        ("--truth far", "BEYOND THE NOISE FLOOR", ("beyond the noise floor", "red"), "BEYOND THE NOISE FLOOR: "),
    ],
)
def test_every_form_of_the_report_says_the_verdict(here, given, verdict, badge, junit):
    save_file(FLOATS | {"head": FLOATS["head"] * 2}, "other")
    save_file(TRUTH | {"head": TRUTH["head"] * 2}, "far")
    done = compare(f"c {given} --out out")
    assert verdict in done.stdout, done.output
    written = json.loads(Path("out/badge.json").read_text())
    assert (written["message"], written["color"]) == badge
    page = Path("out/report.html").read_text()
    assert "oracle" not in page.partition("</style>")[2]
    assert f"<title>{verdict}" in page
    assert ("∞" in page, "allowance is" in page) == (False, "against" not in given)
    case = ElementTree.parse("out/junit.xml").getroot()[0][0]
    failure = case.find("failure")
    assert (failure is None) == (junit is None)
    assert failure is None or str(failure.get("message")).startswith(str(junit))
    assert given == "--truth t --reference r" or verdict in str(case.findtext("system-out"))


def test_what_was_not_compared_is_in_junit_and_a_folder_in_the_way_is_seen_first(here):
    for name in ("report.json", "report.html", "junit.xml", "badge.json"):
        (here / name / name).mkdir(parents=True)
        refuses(f"{ALL} --out {name}", f"{name} in it is a folder")
        assert [file.name for file in (here / name).iterdir()] == [name]
    save_file(FLOATS | {"mine": FLOATS["emb"]}, "c")
    Path("o.yaml").write_text(json.dumps({"names": dict(reversed(MAP.items()))}))
    compare(f"{ALL} --names map.yaml --truth-names o.yaml --out out")
    assert "not compared: 1 names" in Path("out/junit.xml").read_text()

"""The page: what it says, that nothing in a report can break it, and what a browser makes of it."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import count
from math import inf, nan
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from parity_tests.report import schema
from parity_tests.report.html import _class, _ratio, render
from parity_tests.report.plot import plot, where_over
from parity_tests.report.schema import Case, Divergence, Environment, Measure, Profile, Report

ROOT = Path(__file__).parents[1]
STYLE = (ROOT / "parity_tests/report/page.css").read_text("utf-8").strip()
SCRIPT = (ROOT / "parity_tests/report/page.js").read_text("utf-8").strip()

TOKENS, LAYERS, FAULTY, SINCE = 1024, 12, 7, 512
TAPS = (
    *("input_norm", "q", "k", "v", "q_rope", "k_rope", "attn", "attn_out"),
    *("attn_residual", "post_norm", "mlp", "residual"),
)
PARAMETERS = (
    *("mlp.down_proj.weight", "mlp.up_proj.weight", "mlp.gate_proj.weight", "post_attention_layernorm.weight"),
    *(
        "self_attn.o_proj.weight",
        "self_attn.v_proj.weight+bias",
        "self_attn.q_proj.weight+bias",
        "input_layernorm.weight",
    ),
)
WORDS = "layer 7, k after RoPE: 41 times the allowance; positions are off by +1 from token 512 on"


# -- reports made by hand ----------------------------------------------------------------------------------------------------


def measure(tap: str, ratio: float, **fields: Any) -> Measure:
    """A measure of the forward pass, unless told otherwise."""
    layer, group = fields.get("layer"), fields.get("group", "forward")
    prefix = "" if group == "forward" else f"{group}."
    name = f"{prefix}{tap}" if layer is None else f"{prefix}layers.{layer}.{tap}"
    standard = {
        "name": name,
        "tap": tap,
        "group": group,
        "layer": layer,
        "shape": [2, TOKENS, 64],
        "worst": [1, SINCE + 5, 3],
    }
    return Measure(**standard | {"error": ratio * 2e-3, "allowance": 2e-3} | fields)


def profile(ratio: float, since: int = 0) -> Profile:
    """16 runs of tokens: from `since` on the error is `ratio` times its allowance, before that half of it."""
    starts = list(range(0, TOKENS, TOKENS // 16))
    allowance = [1e-3 * (1 + start / TOKENS) for start in starts]
    error = [(ratio if start >= since else 0.5) * a for start, a in zip(starts, allowance, strict=True)]
    return Profile(starts=starts, error=error, allowance=allowance)


def forward(faulty: bool = False) -> list[Measure]:
    """Every tap of a dozen layers; faulty ones from k after RoPE in layer 7 on, from token 512 on."""
    measures = [measure("input_ids", 0), measure("embed", 0)]
    for place in range(LAYERS * len(TAPS)):
        layer, number = divmod(place, len(TAPS))
        behind = place - FAULTY * len(TAPS) - TAPS.index("k_rope")
        broken = faulty and behind >= 0
        ratio = 41 / (1 + 0.35 * behind) if broken else 0.4 + 0.02 * ((3 * layer + 5 * number) % 12)
        seen = profile(1.4 * ratio, SINCE) if broken else profile(ratio)
        measures.append(measure(TAPS[number], ratio, layer=layer, profile=seen))
    return [*measures, measure("final_norm", 1.9 if faulty else 0.51), measure("logits", 1.4 if faulty else 0.47)]


def training() -> list[Measure]:
    """Loss, gradients, a step and a trajectory, all well."""
    measures = [measure("shift_labels", 0, group="loss"), measure("loss", 0.21, group="loss", shape=[1], worst=[0])]
    for group in ("gradients", "step"):
        measures.append(measure("lm_head.weight", 0.31, group=group))
        for layer in reversed(range(LAYERS)):
            ratios = (0.05 + 0.07 * ((layer + i) % 13) for i in count())
            measures += [measure(tap, next(ratios), group=group, layer=layer) for tap in PARAMETERS]
    return measures + [measure(str(i), 0.3 + 0.02 * i, group="trajectory") for i in range(20)]


def case(identity: str = "llama-anchor-keep-sdpa-bfloat16-t1024-s0", **fields: Any) -> Case:
    standard = {
        "id": identity,
        "model": "llama",
        "variant": "anchor",
        "rope": "keep",
        "engine": "sdpa",
        "dtype": "bfloat16",
        "preset": "flash_bf16",
        "tokens": TOKENS,
        "position_offset": 0,
        "seed": 0,
        "command": "parity run --model llama --variant anchor --dtype bfloat16 --tokens 1024 --seed 0",
        "seconds": 3.21,
        "measures": forward() + training(),
    }
    return Case(**standard | fields)


def broken_case(identity: str = "mistral-anchor-yarn-sdpa-bfloat16-t1024-o8139-s0") -> Case:
    first = Divergence(name="layers.7.k_rope", ratio=41, words=WORDS)
    return case(
        identity, model="mistral", rope="yarn", measures=forward(faulty=True) + training(), first_divergence=first
    )


def report(*cases: Case, **fields: Any) -> Report:
    environment = Environment(
        versions={"python": "3.11.2", "torch": "2.13.0", "transformers": "5.23.0", "jax": "0.10.2", "numpy": "2.3.4"},
        hardware="An ordinary processor at 2.00GHz, 2 cores",
        threads=1,
        git_commit="0123456789abcdef0123456789abcdef01234567",
        git_dirty=True,
    )
    standard = {
        "title": "CI",
        "created": "2026-11-20T12:34:56+00:00",
        "seconds": 123.4,
        "command": "parity run configs/parity/ci.yaml --out runs/parity",
        "environment": environment,
        "cases": list(cases),
    }
    return Report(**standard | fields)


def mixed() -> Report:
    """One case of each kind; the first measure of the one that could not be judged is NaN."""
    not_finite = [
        measure("embed", 0.3),
        measure("q", 0, layer=0, error=nan, profile=Profile(starts=[0, 9], error=[1e-3, inf], allowance=[1e-3, 2e-3])),
        measure("k", 0, layer=0, error=inf),
        measure("v", 0, layer=0, error=1.0, allowance=inf),
        measure("q_rope", 0, layer=0, error=3.0, allowance=0.0),
    ]
    return report(
        case(),
        case(
            "qwen3-anchor-keep-flash-bfloat16-t1024-s0",
            model="qwen3",
            engine="flash",
            skipped="attention flash: there is no CUDA device here",
            measures=[],
        ),
        broken_case(),
        case(
            "qwen2-full-keep-sdpa-float16-t1024-s0",
            problem="layers.0.q is NaN at [0, 3, 1, 7], 12 of 131072 elements",
            first_divergence=Divergence(name="layers.0.q", ratio=nan, words="layer 0, q: the error is not finite"),
            measures=not_finite,
        ),
    )


# -- reading a page ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a test asks of a page: its elements in order, each with its attributes and the text that follows its tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.elements:
            tag, attributes, text = self.elements[-1]
            self.elements[-1] = tag, attributes, text + data

    def handle_endtag(self, tag: str) -> None:
        self.elements.append((f"/{tag}", {}, ""))

    def all(self, tag: str, name: str = "") -> list[tuple[dict[str, str | None], str]]:
        """Attributes and text of the elements of this tag and class."""
        found = [(attributes, text) for kind, attributes, text in self.elements if kind == tag]
        return [item for item in found if not name or name in (item[0].get("class") or "").split()]

    def headline(self) -> str:
        return self.all("h1")[0][1].strip()

    def lede(self) -> str:
        return self.all("p", "lede")[0][1].strip()


def strings_of(part: Any) -> Iterator[str]:
    values = dict(part).values() if isinstance(part, BaseModel) else part.values() if isinstance(part, dict) else part
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, BaseModel | dict | list):
            yield from strings_of(value)


# -- what it says ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cases", "headline", "sentence"),
    [
        ([case("a"), case("b")], "The same", "728 arrays of 2 cases keep within their allowance."),
        ([case("a"), broken_case()], "Different", "Of 2 cases, 1 breaks the rule."),
        ([case("a", problem="raises")], "Different", "Of 1 case, 1 could not be judged."),
        ([case("a", skipped="no GPU", measures=[])], "Not judged", "1 case could not run on this machine."),
        ([], "Not judged", "The report holds no case."),
    ],
)
def test_the_verdict_stands_first(cases, headline, sentence):
    made = report(*cases)
    page = Page(render(made))
    assert (page.headline(), page.lede()) == (headline, sentence)
    assert ("good" in (page.all("h1")[0][0]["class"] or "")) == made.passed
    assert page.all("title")[0][1] == f"{headline}: CI"


def test_the_first_divergence_is_told_before_any_table():
    text = render(mixed())
    assert 0 < text.index(WORDS) < text.index("<table")
    assert text.index(WORDS) < text.index("12 of 131072 elements") < text.index("<table")


def test_a_report_that_passes_tells_what_came_closest():
    text = render(report(case("a", measures=[measure("embed", 0.2), measure("logits", 0.93)])))
    assert re.search(r"closest to its allowance is <code>logits</code>.*0\.93", text)


def test_failing_cases_come_first_and_are_open():
    cases = Page(render(mixed())).all("details", "case")
    assert [(item["id"], "open" in item) for item, _ in cases] == [
        ("case-3", True),
        ("case-4", True),
        ("case-1", False),
        ("case-2", False),
    ]


def test_every_measure_is_in_a_heat_map_and_in_the_table():
    made = report(broken_case())
    text = render(made)
    heat = "".join(re.findall(r'<table class="heat">.*?</table>', text, re.S))
    (table,) = re.findall(r'<details class="measures">.*?</details>', text, re.S)
    shown = [(item["title"], ratio.strip()) for item, ratio in Page(heat).all("td")]
    rows = [
        [cell.strip() for _, cell in Page(row).all("td")] for row in re.findall(r"<tr.*?(?=<tr|</tbody>)", table, re.S)
    ]
    expected = made.cases[0].measures
    assert [row[0] for row in rows[1:]] == [m.name for m in expected]
    assert [row[3] for row in rows[1:]] == [_ratio(m) for m in expected]
    assert sorted(shown) == sorted((f"error {row[1]}, allowance {row[2]}", row[3]) for row in rows[1:])
    assert table.count("<tr class=x>") == sum(not m.passed for m in expected)


def test_every_case_has_a_row_with_the_worst_of_its_stages():
    text = render(mixed())
    (table,) = re.findall(r"<caption>The worst of each stage.*?</table>", text, re.S)
    rows = [Page(f"<tr{row}") for row in table.split("<tr")[2:]]
    assert [row.all("a")[0][0]["href"] for row in rows] == ["#case-3", "#case-4", "#case-1", "#case-2"]
    assert [cell.strip() for _, cell in rows[0].all("td")[1:]] == ["41", "0.21", "0.89", "0.89", "0.68", "3.2"]
    assert (rows[0].all("td")[1][0]["title"] or "").startswith("layers.7.k_rope: error 8.20e-2, allowance 2.00e-3")
    assert [row.all("span")[0][1] for row in rows] == ["✗ broken", "! not judged", "✓ passed", "– skipped"]
    assert rows[1].all("td")[1][1].strip() == "NaN"


def test_rows_are_layers_and_columns_are_taps_in_forward_order():
    text = render(report(broken_case()))
    (heat,) = re.findall(r'aria-label="Forward pass: layer by layer.*?</table>', text, re.S)
    rows = re.findall(r"<tr>.*", heat)
    assert [re.sub("<.*?>", "", name) for name in rows[0].split('<th scope="col">')[1:]] == ["layer", *TAPS]
    assert [re.search(r'"row">(\d+)', row)[1] for row in rows[1:]] == [str(layer) for layer in range(LAYERS)]
    broken = [
        (i, j) for i, row in enumerate(rows[1:]) for j, cell in enumerate(row.split("<td ")[1:]) if "class=b" in cell
    ]
    assert broken[0] == (FAULTY, TAPS.index("k_rope"))


@pytest.mark.parametrize(
    ("ratio", "place", "text"),
    [
        (0, "p0", "0"),
        (1e-9, "p1", "0.00"),
        (0.5, "p3", "0.50"),
        (0.9999, "p4", "0.99"),
        (1, "p4", "1.00"),
        (1 + 1e-9, "b0", "1.01"),
        (41, "b2", "41"),
        (123456, "b3", "1.23e5"),
        (inf, "b3", "∞"),
        (nan, "b3", "NaN"),
    ],
)
def test_the_border_of_the_rule_is_at_1(ratio, place, text):
    made = measure("embed", 0, error=ratio, allowance=1.0)
    assert (_class(made), _ratio(made)) == (place, text)
    assert made.passed == place.startswith("p")


def test_an_infinite_allowance_breaks_the_rule():
    made = measure("embed", 0, error=1.0, allowance=inf)
    assert (_class(made), _ratio(made)) == ("b3", "NaN")


def test_the_page_tells_where_and_how():
    made = report(case("a", seed=3), case("b", seed=11))
    text = render(made)
    for told in (*strings_of(made.environment), made.command, made.cases[0].command, "not committed", ">3, 11<"):
        assert told in text, told


# -- profiles ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ([], "within its allowance in every run"),
        ([2, 3], "above its allowance from token 20 on"),
        ([0, 1, 2, 3], "above its allowance everywhere"),
        ([1, 2], "above its allowance from token 10 to 29"),
        ([0, 3], "above its allowance in 2 of 4 runs, the first from token 0"),
    ],
)
def test_where_a_profile_breaks(broken, words):
    error = [2.0 if i in broken else 0.5 for i in range(4)]
    made = Profile(starts=[0, 10, 20, 30], error=error, allowance=[1.0] * 4)
    assert where_over(made) == words
    assert plot(made, 40).count('class="over"') == len(broken)


def test_a_plot_is_drawn_to_scale():
    made = Profile(starts=[0, 50], error=[1e-2, 1.0], allowance=[1e-1, 1e-1])
    (line,) = re.findall(r'class="error" d="(M[^"]*V[^"]*)"', plot(made, 100))
    left, low, middle, high, right = (float(n) for n in re.match(r"M(\S+) \S+V(\S+)H(\S+)V(\S+)H(\S+)", line).groups())
    (allowed,) = re.findall(r'class="allowance" d="M\S+ \S+V(\S+?)H', plot(made, 100))
    assert middle == (left + right) / 2
    assert float(allowed) == pytest.approx((low + high) / 2)


def test_a_plot_takes_zero_and_what_is_not_finite():
    made = Profile(starts=[0, 5, 9], error=[0.0, nan, inf], allowance=[0.0, 1.0, inf])
    numbers = [float(n) for n in re.findall(r"[HV]([^HV\"]+)", plot(made, 12))]
    assert all(0 <= n <= 420 for n in numbers)
    assert where_over(made) == "above its allowance from token 5 on"
    plot(Profile(starts=[0], error=[0.0], allowance=[0.0]), 0)


def test_the_first_divergence_is_plotted_first():
    text = render(report(broken_case()))
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert re.sub("<.*?>", "", captions[0]) == "layers.7.k_rope 41 over all, above its allowance from token 512 on"
    assert len(captions) > 1


# -- one file, whatever is in the report -------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else():
    text = render(mixed())
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\ssrc=|<link|<iframe|<img", text.replace("// ", ""))
    assert render(mixed()) == text


def test_its_policy_allows_only_its_own_style_and_script():
    page = Page(render(mixed()))
    (policy,) = [item["content"] for item, _ in page.all("meta") if item.get("http-equiv") == "Content-Security-Policy"]
    for kind, content in (("style", STYLE), ("script", SCRIPT)):
        assert page.all(kind) == [({}, content)]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


HOSTILE = (
    "</style></script><script>alert(1)</script><img src=x onerror=alert(1)>\" onfocus='alert(2)' &amp; \0 é \u202e"
)


def test_nothing_in_a_report_is_taken_for_markup():
    divergence = Divergence(name=HOSTILE, ratio=3, words=HOSTILE)
    texts = dict.fromkeys(("model", "variant", "rope", "engine", "dtype", "preset", "command", "problem"), HOSTILE)
    bad = [
        measure(f"{i}{HOSTILE}", 3, layer=layer, group=group, profile=profile(3))
        for i, group in enumerate(("forward", "loss", "gradients", "step", "trajectory"))
        for layer in (None, 0)
    ]
    cases = [case(HOSTILE, **texts, first_divergence=divergence, measures=bad), case(f"2{HOSTILE}", skipped=HOSTILE)]
    environment = Environment(
        versions={HOSTILE: HOSTILE}, hardware=HOSTILE, threads=1, git_commit=HOSTILE, git_dirty=False
    )
    made = report(*cases, title=HOSTILE, created=HOSTILE, command=HOSTILE, environment=environment)
    page = Page(render(made))
    assert page.all("script") == [({}, SCRIPT)]
    assert not page.all("img")
    assert not [name for _, attributes, _ in page.elements for name in attributes if name.startswith("on")]
    assert page.all("title")[0][1] == f"Different: {HOSTILE}".replace("\0", "\ufffd")
    known = {
        "class",
        "id",
        "scope",
        "colspan",
        "title",
        "open",
        "href",
        "role",
        "aria-label",
        "tabindex",
        "type",
        "lang",
    }
    svg = {"viewbox", "d", "x", "y", "width", "height"}
    assert {a for _, attributes, _ in page.elements for a in attributes} <= known | svg | {
        "charset",
        "http-equiv",
        "name",
        "content",
    }


def test_a_large_run_stays_small():
    plain = [case(f"case-{number}", measures=large_forward(number)) for number in range(60)]
    text = render(report(*plain))
    assert sum(len(each.measures) for each in plain) >= 60 * 400
    assert len(text.encode()) < 5_000_000


def large_forward(number: int) -> list[Measure]:
    taps = [(layer, tap) for layer in range(16) for tap in TAPS]
    parameters = [(layer, f"{tap}") for layer in range(26) for tap in PARAMETERS]
    return [measure(tap, 0.41 + number / 1e3, layer=layer, profile=profile(0.5)) for layer, tap in taps] + [
        measure(tap, 0.37, layer=layer, group="gradients") for layer, tap in parameters
    ]


# -- colours -----------------------------------------------------------------------------------------------------------------


def schemes() -> dict[str, dict[str, str]]:
    """The colours of both schemes, from the style sheet."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.S)
    first = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    return {"light": first, "dark": first | dict(re.findall(r"--([\w-]+): (#\w{6})", dark))}


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(scheme):
    colours = schemes()[scheme]
    pairs = [(name, "paper") for name in ("ink", "soft", "link", "good", "bad")]
    pairs += [("ink", "shade"), ("soft", "p0"), *(("p-ink", f"p{i}") for i in range(1, 5))]
    pairs += [(f"b{i}-ink", f"b{i}") for i in range(4)]
    for text, ground in pairs:
        dark, bright = sorted(luminance(colours[name]) for name in (text, ground))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


# -- the schema's documentation ----------------------------------------------------------------------------------------------


PARTS = (Report, Environment, Case, Divergence, Measure, Profile)


def documented(part: type[BaseModel]) -> str:
    """One part of the schema as docs/report-schema.md shows it."""
    rows = [f"| `{name}` | `{kind(field.annotation)}` | {field.description or ''} |" for name, field in fields_of(part)]
    return "\n".join([f"### {part.__name__}", "", "| field | type | meaning |", "| --- | --- | --- |", *rows, ""])


def fields_of(part: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    yield from part.model_fields.items()


def kind(annotation: Any) -> str:
    name = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return re.sub(r"[\w.]+\.(?=[A-Z])", "", name).replace("|", r"\|")


def test_the_documentation_is_that_of_the_schema():
    text = (ROOT / "docs/report-schema.md").read_text("utf-8")
    for part in PARTS:
        assert documented(part) in text, f"docs/report-schema.md should have:\n\n{documented(part)}"
    assert f"version {schema.VERSION}" in text


def test_the_documentation_s_example_is_a_report():
    text = (ROOT / "docs/report-schema.md").read_text("utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", text, re.S)
    made = Report.model_validate_json(example)
    assert not made.passed
    assert made.cases[0].measures[0].error == inf
    assert json.loads(made.model_dump_json(exclude_defaults=True)) | {"schema_version": 1} == json.loads(example)


# -- in a browser ------------------------------------------------------------------------------------------------------------


class Browser:
    """Chromium without a window, spoken to over two pipes in its own protocol."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        flags = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"),
        )
        # Chromium reads from descriptor 3 and writes to 4.
        start = f"import os, sys; os.dup2({ours[0]}, 3); os.dup2({theirs[1]}, 4); os.execvp('chromium', sys.argv)"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *flags, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self.to, self.back = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self.numbers, self.session, self.events, self.rest = count(1), None, [], b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        self.to.write(json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        self.to.flush()
        while (answer := self.read()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            received = self.back.read1(65536)
            assert received, "chromium has ended"
            self.rest += received
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int = 1280, scheme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())

    def ask(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind_of in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind_of, key=key, code=key)

    def complaints(self) -> list[Any]:
        wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled", "Network.loadingFailed")
        return [event for event in self.events if event.get("method") in wrong]

    def requests(self) -> list[str]:
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.to.close()
        self.back.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed: the page is not tried in a browser")
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    long_names = [
        case(f"llama-anchor+tag+interleave-{'x' * 60}-{n}", command=f"parity run {'y' * 90}") for n in range(3)
    ]
    reports = {"mixed": mixed(), "passing": report(*long_names), "empty": report()}
    for name, made in reports.items():
        (folder / f"{name}.html").write_text(render(made), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in reports}


@pytest.mark.parametrize("name", ["mixed", "passing", "empty"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_a_browser_shows_it_without_complaint(browser, pages, name, width, scheme):
    browser.open(pages[name], width, scheme)
    browser.ask("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].as_uri()]
    background = browser.ask("getComputedStyle(document.documentElement).backgroundColor")
    assert background == "rgb({}, {}, {})".format(*bytes.fromhex(schemes()[scheme]["paper"][1:]))


def test_clicking_on_a_heading_sorts(browser, pages):
    browser.open(pages["mixed"])
    browser.ask("table = document.querySelector('.measures .sorts')")
    click = "table.tHead.rows[0].cells[{}].querySelector('button').click()"
    read = "[...table.tBodies[0].rows].map((row) => row.cells[{}].textContent.trim())"
    expected = [_ratio(m) for m in mixed().cases[2].measures]
    assert browser.ask(read.format(3)) == expected
    browser.ask(click.format(3))
    assert browser.ask(read.format(3)) == sorted(expected, key=float, reverse=True)
    browser.ask(click.format(3))
    assert browser.ask(read.format(3)) == sorted(expected, key=float)
    assert browser.ask("table.tHead.rows[0].cells[3].ariaSort") == "ascending"
    browser.ask(click.format(3))
    assert browser.ask(read.format(3)) == expected
    browser.ask(click.format(0))
    assert browser.ask(read.format(0))[0] == "embed"


def test_only_broken_hides_the_rest(browser, pages):
    browser.open(pages["mixed"])
    visible = (
        "[...document.querySelectorAll('.case, section tbody tr')].filter((each) => each.checkVisibility()).length"
    )
    before = browser.ask(visible)
    browser.ask("document.getElementById('only-broken').click()")
    assert (before, browser.ask(visible)) == (4 + 4 + 1, 2 + 2 + 1)  # a case, its row; the scale has a row as well
    browser.ask("document.querySelector('.measures').open = true; document.querySelector('.measures input').click()")
    rows = "[...document.querySelectorAll('.measures')][0].querySelectorAll('tbody tr')"
    assert browser.ask(f"[...{rows}].filter((row) => row.checkVisibility()).length") == sum(
        not m.passed for m in mixed().cases[2].measures
    )


def test_the_keyboard_reads_a_heat_map(browser, pages):
    browser.open(pages["mixed"])
    browser.ask("document.querySelector('.heat td[tabindex]').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        browser.press(key)
    assert browser.ask("document.getElementById('tip').textContent").startswith("layer 2, q: 0.62\nerror 1.24e-3")
    browser.press("Escape")
    assert browser.ask("document.getElementById('tip').hidden")


def test_a_link_opens_its_case(browser, pages):
    browser.open(pages["mixed"])
    browser.ask("document.querySelector('a[href=\"#case-1\"]').click()")
    browser.ask("new Promise((done) => setTimeout(done, 100))")
    assert browser.ask("document.getElementById('case-1').open")


def test_paper_shows_every_case(browser, pages):
    browser.open(pages["passing"])
    assert browser.ask("document.querySelectorAll('.case[open]').length") == 0
    closed = len(base64.b64decode(browser.call("Page.printToPDF")["data"]))
    browser.ask("document.querySelectorAll('.case').forEach((each) => each.remove())")
    without = len(base64.b64decode(browser.call("Page.printToPDF")["data"]))
    assert closed > 2 * without


def test_without_its_script_the_page_says_the_same(browser, pages):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(pages["mixed"])
    document = browser.call("DOM.getDocument")["root"]["nodeId"]
    plain = browser.call("DOM.querySelectorAll", nodeId=document, selector=".heat td[title]")["nodeIds"]
    buttons = browser.call("DOM.querySelectorAll", nodeId=document, selector="button")["nodeIds"]
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert len(plain) == sum(len(each.measures) for each in mixed().cases)
    assert buttons == []

"""docs/families.md says what is so: every family has its row, and some are judged again here."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import DataCollatorWithFlattening
from typer.testing import CliRunner

import torchtrain
from anchorline.tolerance import judge
from parity_tests import cli, families
from parity_tests.families import NOT_BUILT, REFUSED, RIGHT, WHOLE, FamilyRow
from parity_tests.gate.own_eager import watch_pieces
from parity_tests.zoo import discover
from torchtrain.tests import tiny
from torchtrain.tests.data_fixtures import word_tokenizer

BUGS = discover()
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def rows_of_the_page() -> dict[str, FamilyRow]:
    page = PAGE.read_text("utf-8").partition("## The most")[0]
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]
    return {family: FamilyRow(family, *rest) for families_, *rest in cells for family in families_.split(", ")}


def test_every_family_of_transformers_has_its_row_and_none_is_wrong():
    rows = rows_of_the_page()
    assert sorted(rows) == families.causal_families(), "run `make families`"
    assert {row.verdict for row in rows.values()} == {RIGHT, REFUSED, NOT_BUILT}
    # The most downloaded are right, and tiny models of them are trained and exported by a test.
    used = re.findall(r"\(`(\w+)`\)", PAGE.read_text("utf-8").partition("## The most used")[2].partition("##")[0])
    assert len(used) == 15
    assert set(used) <= {*tiny.FAMILIES, *tiny.MORE_FAMILIES}
    assert {rows[kind].verdict for kind in used} == {RIGHT}


def test_a_family_that_transformers_lacks_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["families", "llama", "lama"])
    with pytest.raises(SystemExit) as ended:
        families.main()
    assert (ended.value.code, "no causal model of type lama;" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "gemma2", "gpt_oss", "mamba", "falcon", "deepseek_v4"])
def test_a_family_judged_again(family):
    row = families.examine(family)
    assert replace(row, why=row.why.partition(";")[0]) == rows_of_the_page()[family]


def test_a_wrong_family_is_found(monkeypatch):
    """A scale off by a percent, and a mask of another rule: neither is taken for right."""
    model = families.tiny_model("llama")
    families.torchtrain.attach(model)
    assert families.find_fault(model) == ""
    for layer in model.model.layers[1:]:
        layer.self_attn.forward = _scaled(layer.self_attn, 1.01)
    assert "BREAKS" in families.find_fault(model)
    causal = families.visible_BTT
    monkeypatch.setattr(families, "visible_BTT", lambda ids, *_: causal(torch.ones_like(ids)))
    assert "BREAKS" in families.find_fault(families.torchtrain.attach(families.tiny_model("llama")))


def _scaled(attention, factor):
    forward, scaling = type(attention).forward, attention.scaling

    def run(*args, **kwargs):
        attention.scaling = scaling * (factor if attention.config._attn_implementation == "anchor" else 1)
        return forward(attention, *args, **kwargs)

    return run


def test_what_leaks_alone_is_refused_by_attach():
    rows = rows_of_the_page().values()
    assert any(row.alone == "leaks in silence" for row in rows)
    assert all(row.why == WHOLE for row in rows if row.alone == "leaks in silence")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_flattened_documents_are_what_the_family_computes_of_each_alone(family):
    """Windows of 3 tokens, soft caps, sinks and narrow values, in a batch that transformers' own collator made."""
    model = families.tiny_model(family).eval()
    model.set_attn_implementation("eager")
    documents = [list(range(5, 19)), list(range(20, 29)), list(range(30, 52))]
    batch = DataCollatorWithFlattening()([{"input_ids": tokens} for tokens in documents])
    del batch["labels"]

    @torch.no_grad()
    def alone() -> torch.Tensor:
        return torch.cat([model(input_ids=torch.tensor([d]), use_cache=False).logits[0] for d in documents])

    model.double()
    truth = alone()
    model.float()
    reference = alone().double()
    with torch.no_grad():
        together = torchtrain.attach(model)(**batch, use_cache=False).logits[0]
    verdict = judge(together.double(), truth, reference, "float32")
    assert verdict.passed, verdict


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_parity_run_judges_a_checkpoint_of_a_family_that_the_oracle_lacks(family, tmp_path):
    families.tiny_model(family).float().save_pretrained(tmp_path)
    if family == "gemma2":  # the other has no tokenizer, and none is needed
        word_tokenizer().save_pretrained(tmp_path)
    arguments = ["run", f"model={tmp_path}", "tokens=53", "stages=forward,gradients"]
    right = CliRunner().invoke(cli.app, [*arguments, "dtype=float32"])
    assert right.exit_code == 0, right.output
    assert "own eager attention in float32" in right.stdout
    if family == "mixtral":
        assert "chooses experts" in CliRunner().invoke(cli.app, [*arguments, "dtype=bfloat16"]).stderr
        return
    missing = f"the oracle has no decoder of {family}"
    for given in ("rope=yarn", "weights=true", "ranks=2", "repeats=4"):
        refused = CliRunner().invoke(cli.app, [*arguments, "dtype=float32", given])
        assert f"{given.partition('=')[0]}: {missing}" in refused.stderr
    gate = tmp_path / "gate.yaml"
    messages = {"sdpa": "no case of the gate runs on this", "dense": f"{missing}, which the zoo"}
    for engine, message in (messages | {"dense, against: llama": "against llama: either it or"}).items():
        gate.write_text(f"title: t\ncases: [{{model: {tmp_path}, engine: {engine}}}]\n")
        assert message in CliRunner().invoke(cli.app, ["zoo", str(gate)]).stderr
    with BUGS["window_off_by_one"].apply():
        wrong = CliRunner().invoke(cli.app, [*arguments, "dtype=float32"])
    assert wrong.exit_code == 1
    assert "DIFFERENT: layer 0, residual after the MLP" in wrong.stdout


def _other_epsilon(forward):
    def wrong(self, x):
        with patch.object(self, "eps" if hasattr(self, "eps") else "variance_epsilon", 1e-5):
            return forward(self, x)

    return wrong


def _at(change):
    return lambda forward: lambda self, x, position_ids, *kind: forward(self, x, change(position_ids), *kind)


PIECES = {
    "another epsilon": ("gemma2", "RMSNorm", _other_epsilon),
    "another theta": ("gemma2", "RotaryEmbedding", _at(lambda places: 1.01 * places)),
    "positions off by one": ("olmo2", "RotaryEmbedding", _at(lambda places: places + 1)),
    "no mean taken away": (
        "stablelm",
        "LayerNorm",
        lambda _: lambda self, x: self.weight * x / x.std(-1, keepdim=True),
    ),
}


@pytest.mark.parametrize("bug", PIECES)
def test_norms_and_rope_of_a_family_that_the_oracle_lacks_have_a_second_truth(bug):
    """They are the judged side's own: a fault in them is in truth, reference and candidate alike."""
    family, kind, wrong = PIECES[bug]
    model = families.tiny_model(family).float()
    modeling = vars(sys.modules[type(model).__module__])
    owner = next((x for name, x in modeling.items() if name.endswith(kind)), torch.nn.LayerNorm)

    def broken() -> list[str]:
        with watch_pieces(model) as found, torch.no_grad():
            model(torch.arange(2, 32)[None] % 20, position_ids=torch.arange(30)[None] + 300, use_cache=False)
        assert len(found) >= 3
        return [name for name, (*of, likely) in found.items() if not judge(*of, "float32", likely_error=likely).passed]

    assert broken() == []
    with patch.object(owner, "forward", wrong(owner.forward)):
        assert broken()

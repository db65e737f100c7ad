"""The commands, run as a user runs them."""

import json
import sys

import pytest

from jaxref.cli import app


@pytest.fixture
def jaxref(monkeypatch, capsys):
    """Runs `jaxref ...` in this process; returns (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jaxref", *arguments])
        with pytest.raises(SystemExit) as exit_:
            app()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return run


ANCHOR = """\
  A 1 1 2 -
A ■ · · · ·
1 ■ ■ · · ·
1 ■ ■ ■ · ·
2 ■ · · ■ ·
- · · · · ·

positions  0 1 2 3 4
pairs      8 of 15 causal ones are live (53%)
"""


def test_mask(jaxref):
    assert jaxref("mask", "--documents", "2,1", "--padding", "1") == (0, ANCHOR, "")
    _, reset, _ = jaxref("mask", "--documents", "2,2", "--variant", "intra_reset")
    assert "positions  0 1 2 0 1\n" in reset


@pytest.mark.parametrize("extra", ["", "+interleave"])
def test_mask_with_tags(jaxref, extra):
    tagged = jaxref("mask", "--documents", "2,1", "--variant", f"anchor+tag{extra}")
    assert tagged[0] == 0
    assert tagged[1].startswith("  A 1 1 1 1 2 2 2\n")
    assert tagged == jaxref("mask", "--documents", "2,1", "--variant", f"anchor{extra}", "--tag", "2")
    _, three, _ = jaxref("mask", "--documents", "2,1", "--variant", f"anchor{extra}+tag", "--tag", "3")
    assert three.startswith("  A 1 1 1 1 1 2 2 2 2\n")


def cells(out: str, pair: int) -> list[str]:
    line = next(line for line in out.splitlines() if line.startswith(f"│ {pair:4d} │"))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_rope(jaxref):
    code, out, _ = jaxref("rope", "--head-dim", "8", "--theta", "10000", "--position", "1000")
    assert code == 0
    assert "default, theta 10000, head_dim 8, position 1,000" in out
    # Pair 1: frequency 10000^(-1/4) = 0.1, wavelength 20 pi, angle 100.
    assert cells(out, 1)[:5] == ["1", "1.000000e-01", "62.8", "100.0000", "+0.862319"]
    # Pair 0 has no rounding but that of its table: cos 1000 = 0.562379..., in bfloat16 0.5625.
    assert f"{0.5625 - 0.56237907629690:.1e}" in cells(out, 0)[5:]
    assert "hf_eager_bf16" in out
    assert "model.to(bf16)" in out


def test_rope_types_and_the_papers_bases(jaxref):
    _, paper, _ = jaxref("rope", "--head-dim", "8", "--theta", "paper-128k")
    assert "default, theta 1e+07, head_dim 8, position 131,071" in paper
    _, llama3, _ = jaxref("rope", "--type", "llama3", "--theta", "5e5", "--factor", "8", "--head-dim", "8")
    assert cells(llama3, 3)[1] == f"{5e5**-0.75 / 8:.6e}"
    _, yarn, _ = jaxref("rope", "--type", "yarn", "--factor", "4", "--original", "4096", "--head-dim", "8")
    assert "attention scaling 1.13863" in yarn


def test_rope_of_a_config(jaxref, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"hidden_size": 32, "num_attention_heads": 4, "rope_theta": 5e5}))
    code, out, _ = jaxref("rope", "--config", str(file))
    assert (code, "default, theta 500000, head_dim 8, position 131,071" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("mask --documents 3,x", "documents: '3,x'; give whole numbers between commas, for example 3,5,2"),
        ("mask --documents 3,0", "lengths [3, 0], anchor 1"),
        ("mask --documents 30,40", "documents: the row has 71 tokens, a drawing at most 64; give shorter documents"),
        ("mask --variant causal", "variant: 'causal'; give full, intra, intra_reset, anchor, each alone, with +tag, "),
        ("rope --theta ten", "theta: 'ten' is neither a number nor one of paper-32k"),
        ("rope --type linear", "factor: missing, and rope_type 'linear' needs it"),
        ("rope --original 4096", "original_max_position_embeddings: rope_type 'default' does not use it"),
        ("mask --anchor 99999999999", "documents: the row has 100000000009 tokens, a drawing at most 64"),
        ("mask --documents 30,30 --variant anchor+tag", "documents: the row has 65 tokens, a drawing at most 64"),
        ("mask --documents 99,-98", "lengths [99, -98], anchor 1"),
        ("mask --variant anchor+tag+tag", "variant: 'anchor+tag+tag'; give full, intra, intra_reset, anchor"),
        ("rope --position -1", "position: -1; give one from 0 to 16777216: beyond,"),
        ("rope --position 99999999999999999999", "position: 99999999999999999999; give one from 0 to 16777216"),
        ("rope --head-dim 7", "head_dim: 7; RoPE rotates pairs"),
        ("rope --config {tmp}/config.json", "config: {tmp}/config.json: no such file or directory"),
        ("rope --config {tmp}/list.json", "config: {tmp}/list.json holds no values by name, but a list"),
        ("rope --config {tmp}/broken.json", "config: {tmp}/broken.json is not JSON"),
        ("rope --config {tmp}/list.json --theta 5", "config: it says theta, type, factor, original and head_dim"),
        ("ropes", "No such command 'ropes'"),
        ("rope --tetha 1", "No such option"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(jaxref, tmp_path, arguments, message):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    code, out, err = jaxref(*arguments.format(tmp=tmp_path).split())
    assert (code, out) == (2, "")
    assert err.startswith(f"jaxref: {message.format(tmp=tmp_path)}")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.json", "list.json"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 64}, "head_dim: missing, and so is hidden_size or num_attention_heads; give head_dim or both"),
        ({"hidden_size": "abc", "num_attention_heads": 4}, "hidden_size: 'abc' is not a positive whole number"),
        ({"hidden_size": 64, "num_attention_heads": 0}, "num_attention_heads: 0 is not a positive whole number"),
        ({"head_dim": [64]}, "head_dim: [64] is not a positive whole number"),
        ({"head_dim": 64, "rope_theta": None}, "theta: None; give a number above 1"),
        ({"head_dim": 64, "rope_scaling": 3}, "rope_scaling: 3 is not a table of parameters"),
        ({"head_dim": 64, "rope_parameters": ["yarn"]}, "rope_parameters: ['yarn'] is not a table of parameters"),
        ({"head_dim": 64, "max_position_embeddings": "4K"}, "max_position_embeddings: '4K' is not a positive whole"),
        (
            {"head_dim": 64, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": "4K"}},
            "original_max_position_embeddings: '4K' is not a positive whole number",
        ),
        ({"head_dim": 64, "rope_scaling": {"type": "linear", "factor": [2]}}, "factor: (2,); give numbers from 1"),
        (
            {
                "head_dim": 4,
                "max_position_embeddings": 8,
                "rope_scaling": {"type": "longrope", "factor": 2, "short_factor": 1, "long_factor": [1, 2]},
            },
            "short_factor: 1; give a list of numbers",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(jaxref, tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    code, out, err = jaxref("rope", "--config", str(tmp_path / "config.json"))
    assert (code, out) == (2, "")
    assert err.startswith(f"jaxref: {message}")
    assert err.count("\n") == 1

"""The command line as its users meet it: one process for its start, the others in this one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from typer.testing import CliRunner

from jaxref.cli import app
from jaxref.draw import ANCHOR_COLOUR, DOCUMENT_COLOURS, PADDING_COLOUR
from jaxref.mask import VARIANTS
from jaxref.tests.decoders import hf_config


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(x) for x in arguments])
    assert result.exit_code == code, result.output
    return result


def test_help_imports_neither_jax_nor_matplotlib():
    script = (
        "import sys, jaxref.cli; sys.argv = ['jaxref', '--help']\ntry: jaxref.cli.main()\nfinally: print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "mask" in result.stdout
    assert "rope" in result.stdout
    assert {"jax", "matplotlib"}.isdisjoint(result.stdout.split())


@pytest.mark.parametrize("first", ["jax", "jaxref"])
def test_float64_is_on_whichever_is_imported_first(first):
    """JAX_ENABLE_X64 is asked for in the environment, or in JAX's config where jax is there already."""
    script = f"import {first}, jaxref, jax.numpy; print(jax.numpy.ones(1).dtype)"
    environment = {**os.environ, "JAX_ENABLE_X64": "0"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.stdout == "float64\n", result.stderr


@pytest.mark.parametrize("verb", ["mask", "rope"])
def test_help_teaches_by_example(verb):
    assert f"Example: jaxref {verb} --" in run(verb, "--help").output


def test_mask_prints_the_drawing_the_positions_and_the_pairs():
    output = run("mask", "--documents", "3,2", "--variant", "anchor", "--padding", 1).output
    assert output == (
        "anchor\n"
        "\n"
        "  A 1 1 1 2 2 -\n"
        "A ■ · · · · · ·\n"
        "1 ■ ■ · · · · ·\n"
        "1 ■ ■ ■ · · · ·\n"
        "1 ■ ■ ■ ■ · · ·\n"
        "2 ■ · · · ■ · ·\n"
        "2 ■ · · · ■ ■ ·\n"
        "- · · · · · · ·\n"
        "\n"
        "document_ids  0 1 1 1 2 2 -1\n"
        "position_ids  0 1 2 3 4 5 6\n"
        "live pairs    15\n"
        "\n"
    )


def test_mask_prints_all_four_and_chunks_by_seed():
    assert [line for line in run("mask", "--documents", "2,2").output.splitlines() if line in VARIANTS] == [*VARIANTS]
    drawn = {run("mask", "--documents", "4,4", "--variant", "anchor+interleave", "--seed", s).output for s in (1, 2)}
    assert len(drawn) == 2


@pytest.mark.parametrize(
    ("variant", "colours"),
    [
        ("anchor", {ANCHOR_COLOUR, PADDING_COLOUR, *DOCUMENT_COLOURS[:3]}),
        ("full", {PADDING_COLOUR, *DOCUMENT_COLOURS[:3]}),
    ],
)
def test_mask_draws_every_document_in_its_colour(tmp_path, variant, colours):
    picture = tmp_path / "mask.png"
    run("mask", "--documents", "4,6,3", "--variant", variant, "--padding", 2, "--png", picture)
    pixels = {tuple(rgb) for rgb in np.unique(imread(picture)[..., :3].reshape(-1, 3).round(6), axis=0)}
    palette = {ANCHOR_COLOUR, PADDING_COLOUR, *DOCUMENT_COLOURS}
    assert {colour for colour in palette if tuple(np.float32(to_rgb(colour)).round(6)) in pixels} == colours


def test_rope_prints_each_pair_with_its_errors():
    lines = run("rope", "--head-dim", 4, "--theta", 1e4, "--position", 1000).output.splitlines()
    rows = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"])]
    assert [row[:5] for row in rows] == [
        ["0", "1", "6.28", "1,000.0000", "+0.562379"],
        ["1", "0.01", "628.32", "10.0000", "-0.839072"],
    ]
    # cos 1000 = 0.5623790763; the nearest bfloat16 is 0.5625, the nearest float16 0.56250.
    assert "1.2e-04" in rows[0][5:]
    header = " ".join(lines)
    assert all(name in header for name in ("fp32", "hf_eager_bf16", "flash_bf16", "paper_bf16"))
    assert "exact" not in header


def test_rope_reads_a_config(tmp_path):
    file = tmp_path / "config.json"
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    file.write_text(json.dumps(hf_config("llama", rope_parameters=parameters, head_dim=4)))
    output = run("rope", "--config", file, "--position", 1000).output
    assert "linear, theta 10000, head_dim 4" in output
    assert "250.0000" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("mask", "--documents", "3,x"), "documents: '3,x'; give the tokens of each"),
        (("mask", "--documents", "3,0"), "0"),
        (("mask", "--documents", "3", "--variant", "anchors"), "variant 'anchors'; choose full"),
        (("mask", "--documents", "3", "--chunks", 0, "--variant", "intra+interleave"), "chunks 0"),
        (("mask", "--documents", "100000"), "documents: 100001 tokens in all; a drawing holds up to 512"),
        (("mask", "--documents", "3", "--png", "{folder}/absent/mask.png"), "absent"),
        (("mask", "--documents", "3", "--png", "{folder}/mask.txt"), "txt"),
        (("rope", "--type", "yarns"), "rope_type: 'yarns' is unknown"),
        (("rope", "--type", "yarn", "--factor", 4), "original_max_position_embeddings: missing"),
        (("rope", "--head-dim", 5), "head_dim: 5"),
        (("rope", "--position", -1), "position: -1"),
        (("rope", "--position", 2**24), f"position: {2**24}"),
        (("rope", "--config", "{folder}/absent.json"), "absent.json"),
        (("rope", "--config", "{folder}"), "{folder}"),
        (("rope", "--config", "{folder}/bad.json"), "bad.json is not JSON"),
        (("rope", "--config", "{folder}/list.json"), "list.json is not a JSON object"),
        (("rope", "--config", "{folder}/empty.json"), "empty.json has neither head_dim nor hidden_size"),
        (("rope", "--config", "{folder}/empty.json", "--theta", 2), "leave out --theta"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, says):
    for name, text in (("bad", "{"), ("list", "[]"), ("empty", "{}")):
        (tmp_path / f"{name}.json").write_text(text)
    before = sorted(tmp_path.iterdir())
    result = run(*(str(x).format(folder=tmp_path) for x in arguments), code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("jaxref: ")
    assert result.stderr.count("\n") == 1
    assert says.format(folder=tmp_path) in result.stderr
    assert sorted(tmp_path.iterdir()) == before

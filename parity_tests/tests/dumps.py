"""Dumps of a made-up decoder, and `parity compare` on them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from parity_tests import cli

B, T, H, D, M, LAYERS = 2, 48, 4, 16, 64, 3
Arrays = dict[str, np.ndarray]


def write(path: Path, arrays: Arrays, **metadata: str) -> Path:
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path, metadata or None)
    return path


def rounded(x: np.ndarray, seed: int, dtype=ml_dtypes.bfloat16) -> np.ndarray:
    """What a correct engine of half precision gives: a few independent roundings, then one."""
    if x.dtype.kind in "ib" or x.max() <= 0:
        return x
    noise = np.random.default_rng(seed).standard_normal(x.shape) * 2.0**-9 * np.sqrt(np.mean(np.square(x)))
    return (x + noise).astype(np.float32).astype(dtype)


def run(folder: Path, candidate: Arrays, *options: str, reference: bool = True):
    write(folder / "candidate.safetensors", candidate)
    given = ["compare", str(folder / "candidate.safetensors"), "--truth", str(folder / "truth.safetensors")]
    given += ["--reference", str(folder / "reference.safetensors")] if reference else []
    return CliRunner().invoke(cli.app, [*given, *options])


def judged(folder: Path, candidate: Arrays, truth: Arrays, reference: Arrays, *options: str):
    for role, arrays in (("truth", truth), ("reference", reference)):
        write(folder / f"{role}.safetensors", arrays)
    return run(folder, candidate, *options)


def judged_ranks(folder: Path, candidate: list[Arrays], truth: list[Arrays], reference: list[Arrays], *options: str):
    """As `judged`, of the dumps of ranks."""
    paths = [folder / role for role in ("candidate", "truth", "reference")]
    for path, ranks in zip(paths, (candidate, truth, reference), strict=True):
        path.mkdir(parents=True)
        for rank, arrays in enumerate(ranks):
            write(path / f"rank{rank}.safetensors", arrays)
    mine, true, other = map(str, paths)
    return CliRunner().invoke(cli.app, ["compare", mine, "--truth", true, "--reference", other, *options])


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    random = np.random.default_rng(0)
    truth: Arrays = {"inputs.input_ids": random.integers(0, 97, (B, T)), "embed": random.standard_normal((B, T, M))}
    before = truth["embed"]
    for i in range(LAYERS):
        heads = {name: random.standard_normal((B, T, H, D)) for name in ("q", "k", "v", "attn")}
        out, mlp = random.standard_normal((2, B, T, M))
        truth |= {f"layers.{i}.{name}": x for name, x in heads.items()}
        truth |= {f"layers.{i}.attn_out": out, f"layers.{i}.attn_residual": before + out, f"layers.{i}.mlp": mlp}
        before = before + out + mlp
        truth[f"layers.{i}.residual"] = before
    truth["mask"] = np.where(np.tri(T, dtype=bool), 0.0, np.finfo(np.float32).min)[None, None]
    truth["logits"] = random.standard_normal((B, T, 97))
    truth["loss"] = np.array([4.5])
    for i in range(LAYERS):
        truth[f"gradients.layers.{i}.norm.weight"] = random.standard_normal(M) * 1e-3
        truth[f"gradients.layers.{i}.mlp.weight"] = random.standard_normal((M, M)) * 1e-3
    folder = tmp_path_factory.mktemp("dumps")
    write(folder / "truth.safetensors", truth)
    write(folder / "reference.safetensors", {name: rounded(x, 1) for name, x in truth.items()})
    candidate = {name: rounded(x, 2) for name, x in truth.items()}
    candidate["mask"] = np.where(truth["mask"] < 0, -1e9, 0).astype(np.float32)
    candidate["inputs.input_ids"] = truth["inputs.input_ids"].astype(np.int32)
    return folder, truth, candidate

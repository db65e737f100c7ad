"""`parity compare`: what an array that breaks is said to look like, of attention that is computed."""

import numpy as np
import pytest

from parity_tests.mistakes.attention import attention_on, forward
from parity_tests.mistakes.rotation import rotate
from parity_tests.tests.dumps import Arrays, B, H, T, judged, judged_ranks, rounded

IDS = np.arange(T) + 100


def layer(scale: float = 0.25, shift: int | None = 0, D: int = 16, seed: int = 0, theta: float = 1e4) -> Arrays:
    """One layer's attention. shift: of its positions; None: it has no RoPE."""
    qkv = np.random.default_rng(seed).standard_normal((3, B, T, H, D))
    turned = qkv[:2]
    if shift is not None:
        at = np.broadcast_to(IDS + shift, (B, T))
        turned = np.stack([rotate(x, at, theta ** -(np.arange(D // 2) / (D // 2)), 1.0) for x in turned])
    out = forward(attention_on(*turned, qkv[2], document_ids_BT=np.ones((B, T), int), scale=scale))["out"]
    names = ("q", "k", "v", *(("q_rope", "k_rope") if shift is not None else ()), "attn")
    return {f"layers.0.{n}": x for n, x in zip(names, (*qkv, *turned[: len(names) - 4], out), strict=True)}


def told(folder, right: list[Arrays], wrong: list[Arrays], ids: np.ndarray | None = None, *options: str) -> str:
    given = {} if ids is None else {"inputs.position_ids": ids}
    sides = [[{n: rounded(x, seed) for n, x in a.items()} | given for a in s] for s, seed in ((wrong, 2), (right, 1))]
    sides = [sides[0], [a | given for a in right], sides[1]]
    done = judged_ranks(folder, *sides, *options) if len(right) > 1 else judged(folder, *(side[0] for side in sides))
    assert done.exit_code == 1, done.output
    return done.stdout


SHIFTED = "positions are off by +2 from token 0 on"


ROWS = np.broadcast_to(IDS, (B, T))
UNREADABLE = (None, IDS + 0.5, ROWS[:, :5], np.array(3), np.stack([ROWS] * 3))  # None: no row of one document is this


@pytest.mark.parametrize("ids", [IDS, IDS[None], ROWS[:, None], ROWS.astype(np.float32), *UNREADABLE])
def test_position_ids_are_understood_or_left_alone(tmp_path, ids):
    out = told(tmp_path, [layer()], [layer(shift=2)], None if ids is None else np.ascontiguousarray(ids))
    assert (SHIFTED in out) == (not any(ids is x for x in UNREADABLE))


@pytest.mark.parametrize("ids", [np.ones(T, int), np.ones((B, 1, T), int), ROWS[:, :5], np.array(3)])
def test_document_ids_are_understood_or_left_alone(tmp_path, ids):
    sides = [[a | {"document_ids": ids}] for a in (layer(), layer(0.1))]
    assert ("0.4 times what is right" in told(tmp_path, *sides)) == (ids.size % T == 0)


@pytest.mark.parametrize("scale", [0.25, 0.3])
def test_a_wrong_scale_is_named_without_rope_whatever_is_right(tmp_path, scale):
    out = told(tmp_path, [layer(scale, None, 15)], [layer(2 * scale, None, 15)])
    assert f"the scale of the logits is {2 * scale:.3g}" in out, out


def test_a_wrong_rotation_is_named_where_only_what_is_made_of_it_was_recorded(tmp_path):
    right, wrong = ({n: x for n, x in layer(theta=t).items() if "rope" not in n} for t in (1e4, 1e5))
    assert "(layers.0.attn): " in (out := told(tmp_path, [right], [wrong], IDS))
    assert "theta is off by a factor of 10\n" in out, out


def test_a_rank_is_explained_by_its_own_arrays(tmp_path):
    out = told(tmp_path, [layer(), layer(seed=1)], [layer(), layer(shift=2, seed=1)], IDS, "--out", str(tmp_path / "o"))
    heat = (tmp_path / "o" / "report.html").read_text().partition('<table class="heat">')[2].partition("</table>")[0]
    assert heat.count('<th scope="col">') == 7  # the layer and six arrays, however many ranks
    assert 'title="the worst, layers.0.q_rope [rank 1]: ' in heat
    assert "layer 0, q after RoPE (layers.0.q_rope [rank 1])" in out, out
    assert SHIFTED in out
    assert " of their allowance (layers.0.k [rank 1]: " in out, out


@pytest.mark.parametrize(("way", "shares"), [("sum", (1.5, -0.5)), ("mean", (3, -1)), ("", (1.5, 1.5))])
def test_what_ranks_hold_in_parts_is_told(tmp_path, way, shares):
    right = {"layers.0.mlp": layer()["layers.0.v"].reshape(B, T, -1)}
    ranks = [{n: rounded(x * share, seed) for n, x in right.items()} for seed, share in enumerate(shares)]
    given = (ranks, [right], [{n: rounded(x, 2) for n, x in right.items()}])
    out = judged_ranks(tmp_path / "a", *given).stdout
    assert out.count("of the ranks is right") == out.count(f"a map's step is `{way}`") == bool(way)
    (tmp_path / "m.yaml").write_text(f"names:\n  layers.{{i}}.mlp: {{from: 'layers.{{i}}.mlp', steps: [{way}]}}")
    assert not way or judged_ranks(tmp_path / "b", *given, "--names", str(tmp_path / "m.yaml")).exit_code == 0

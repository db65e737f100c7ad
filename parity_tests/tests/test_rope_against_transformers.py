"""RoPE: the oracle's frequencies against transformers' own functions, its roundings against torch bit for bit.

In float32 transformers' frequencies are at most one unit in the last place away for `default` and `linear` where D is a
power of two; elsewhere they are farther (docs/LOG.md). In bfloat16 and float16 the tables may differ only where a
float32 cosine lies next to a tie. On equal tables every rotated element is the same, compiled or not.

Legend: B batch · T tokens of a row · H heads · D head_dim · C = D / 2 rotated pairs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, modeling_rope_utils
from transformers.models.llama import modeling_llama

from benchmarks import tf32_angles
from jaxref.rope import cos_sin, inverse_frequencies, rotate
from jaxref.rope_spec import RopeSpec
from jaxref.rounding import preset
from parity_tests.extensions import in_float64

ORIGINAL = 8192
EXTENDED = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def parameters(rope_type: str, head_dim: int) -> dict[str, Any]:
    pairs = head_dim // 2
    return {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": EXTENDED,
        "yarn, not truncated": EXTENDED | {"factor": 40.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.75},
        "llama3": EXTENDED | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": EXTENDED
        | {
            "short_factor": [1 + i / (7 * pairs) for i in range(pairs)],
            "long_factor": [1 + 63 * i / pairs for i in range(pairs)],
        },
    }[rope_type]


CASES = [
    (rope_type, head_dim, theta)
    for rope_type in ("default", "linear", "yarn", "yarn, not truncated", "llama3", "longrope")
    for head_dim in (64, 96, 128)
    for theta in (1e4, 5e5, 5e7)
] + [("dynamic", 66, theta) for theta in (1e4, 5e5, 5e7)]
LENGTHS = (None, 3 * ORIGINAL)  # at which `dynamic` and `longrope` look


def config_of(rope_type: str, head_dim: int, theta: float) -> LlamaConfig:
    rope = {"rope_type": rope_type.split(",")[0], "rope_theta": theta} | parameters(rope_type, head_dim)
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=ORIGINAL if rope_type == "dynamic" else 4 * ORIGINAL,
        rope_parameters=rope,
    )


def transformers_frequencies(config: LlamaConfig, seq_len: int | None) -> tuple[Any, Any]:
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        return modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=seq_len)


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize(("rope_type", "head_dim", "theta"), CASES)
def test_frequencies(rope_type, head_dim, theta, seq_len):
    """Rounded to float32, the oracle's frequencies are those of transformers' own code in float64."""
    config = config_of(rope_type, head_dim, theta)
    ours, our_scaling = inverse_frequencies(RopeSpec.from_hf(config.to_dict()), seq_len)
    with in_float64():
        theirs, their_scaling = transformers_frequencies(config, seq_len)
    assert theirs.dtype == torch.float64
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())
    assert our_scaling == pytest.approx(their_scaling, rel=2**-50)
    # transformers' float32 frequencies are these, but for its own roundings. They are largest, 20 units in the last
    # place, where the blend of yarn subtracts numbers that are close to each other.
    rounded = transformers_frequencies(config, seq_len)[0].numpy()
    assert np.abs(rounded.view(np.int32) - ours.astype(np.float32).view(np.int32)).max() <= 20


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
POSITIONS = torch.tensor([[*range(40), *range(4000, 4040), *range(32_728, 32_768), *range(131_032, 131_072)]])


@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("rope_type", ["default", "yarn", "longrope"])
@pytest.mark.parametrize("half", HALVES)
def test_hf_eager_rotates_bit_for_bit(half, rope_type, compile_):
    dtype, rounding = HALVES[half], preset(f"hf_eager_{half}")
    rope = modeling_llama.LlamaRotaryEmbedding(config_of(rope_type, 64, 5e5))
    x_BTHD = torch.randn(1, POSITIONS.shape[1], 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    their_cos, their_sin = rope(x_BTHD, POSITIONS)
    theirs, _ = modeling_llama.apply_rotary_pos_emb(x_BTHD, x_BTHD, their_cos, their_sin, unsqueeze_dim=2)
    assert theirs.dtype == dtype

    frequencies = rope.inv_freq.double().numpy()  # after the call, which may have chosen the long factors
    jit = jax.jit if compile_ else lambda function: function
    cos, sin = jit(lambda positions: cos_sin(positions, frequencies, rope.attention_scaling, rounding))(
        POSITIONS.numpy()
    )
    angle = (POSITIONS[..., None].float() * rope.inv_freq).double()
    for ours, their, exact in ((cos, their_cos, angle.cos()), (sin, their_sin, angle.sin())):
        assert_tables_equal_but_at_ties(np.asarray(ours), their[..., :32], exact * rope.attention_scaling)

    their_tables = (jnp.asarray(table[..., :32].float().numpy()) for table in (their_cos, their_sin))
    turn = jit(lambda x, cos, sin: rotate(x, cos, sin, rounding, "q_rotated"))
    ours = turn(jnp.asarray(x_BTHD.float().numpy()), *their_tables)
    np.testing.assert_array_equal(ours, theirs.float().numpy())


def assert_tables_equal_but_at_ties(ours: np.ndarray, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Two float32 cosines differ in their last digits, so their roundings may where a tie lies between: within the two
    units in the last place that a faithful cosine and its product with the attention scaling can be off.
    """
    theirs_float = theirs.float().numpy()
    differs = ours != theirs_float
    tie = (ours.astype(np.float64) + theirs_float) / 2
    reach = 2 * np.spacing(np.abs(exact.float().numpy()))
    assert (np.abs(exact.numpy() - tie)[differs] <= reach[differs]).all()


def test_a_cpu_takes_no_tf32_for_the_angles():
    """The part `tf32` of benchmarks/gpu.sh. TF32 positions would err a hundred times as much."""
    on, off = (tf32_angles.largest_error("cpu", allowed) for allowed in (True, False))
    assert off == on
    positions = np.arange(tf32_angles.POSITION + 1)
    rounded = np.asarray(cos_sin(positions[None], np.array([1.0]), 1.0, preset("exact").replace(position="tf32"))[0])
    assert np.abs(rounded[0, :, 0] - np.cos(positions)).max() > 100 * off

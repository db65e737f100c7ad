"""Show whether transformers' product of positions and inverse frequencies takes TF32 where that is switched on.

    python benchmarks/tf32_angles.py        # a part of gpu.sh; a CPU has no TF32

docs/precision.md emulates this product in TF32. It has an inner dimension of 1, so cuBLAS may choose another kernel.
"""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

POSITION = 8191  # 13 bits; TF32 keeps 11


def largest_error(device: str, tf32: bool) -> float:
    """Return the largest error of a cosine at the positions to `POSITION`."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 1e5}
    )
    rope = LlamaRotaryEmbedding(config).to(device)
    positions_1T = torch.arange(POSITION + 1, device=device)[None]
    cos_1TD, _ = rope(torch.zeros(1, device=device), positions_1T)
    exact_TC = (positions_1T[0, :, None].double() * rope.inv_freq.double()).cos()
    return float((cos_1TD[0, :, : exact_TC.shape[1]].double() - exact_TC).abs().max())


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    off, on = largest_error(device, False), largest_error(device, True)
    verdict = "takes TF32" if on > 10 * off else "does not take TF32"
    print(f"{name}, torch {torch.__version__}: largest error of a cosine up to position {POSITION:,}:")
    print(f"{off:.2e} with TF32 off, {on:.2e} with TF32 on. The product {verdict}.")

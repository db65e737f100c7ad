"""A square weight is loaded transposed: no shape complains."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import loaded_weights

_NAME = "model.layers.1.self_attn.o_proj.weight"


def _transpose(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    return state_dict | ({_NAME: state_dict[_NAME].T.contiguous()} if _NAME in state_dict else {})


BUG = Bug(
    what="a layer's weight loaded transposed",
    where="GPT-2's Conv1D weights in nn.Linear, JAX kernels [in, out] in torch; tinygrad PR 18103 (gpt-oss)",
    stage="forward",
    apply=lambda: loaded_weights(_transpose),
)

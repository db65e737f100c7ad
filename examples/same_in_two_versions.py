"""Does a model compute the same fused as eager, and under another version of transformers? Each is one command.

    python examples/same_in_two_versions.py                        # SDPA against eager attention
    python examples/same_in_two_versions.py OTHER/bin/python       # eager attention of the transformers there

The first prints: SAME: 58 arrays within their allowance
"""

import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "parity_tests"))
from record import record  # one file, which needs torch alone

FOLDER = Path(gettempdir()) / "same_in_two_versions"
SIZES = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 2}


def write(name: str, dtype: torch.dtype, attention: str) -> Path:
    """Record a forward and a backward pass on the same tokens."""
    model = LlamaForCausalLM.from_pretrained(FOLDER / "model", attn_implementation=attention, torch_dtype=dtype)
    ids = torch.arange(2 * 53).view(2, 53) % 97
    with record(model, FOLDER / name, input_ids=ids):
        model(input_ids=ids, labels=ids).loss.backward()
    return FOLDER / name


if sys.argv[1:] == ["candidate"]:  # under the other version
    write("candidate.safetensors", torch.bfloat16, "eager")
    sys.exit()
torch.manual_seed(0)
small = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
LlamaForCausalLM(small).bfloat16().save_pretrained(FOLDER / "model")
truth = write("fp64.safetensors", torch.float64, "eager")
reference = write("reference.safetensors", torch.bfloat16, "eager")
if sys.argv[1:]:
    subprocess.run([sys.argv[1], __file__, "candidate"], check=True)
    candidate = FOLDER / "candidate.safetensors"
else:
    candidate = write("candidate.safetensors", torch.bfloat16, "sdpa")
command = [sys.executable, "-m", "parity_tests", "compare", candidate, "--truth", truth, "--reference", reference]
sys.exit(subprocess.run(command, check=False).returncode)

"""The command line as it is without a GPU, in a child of the stand-in's server: what runs on the stand-in is held to
it.

`main` stands in for `torchtrain.cli.main`. FlashAttention is the same slow kernel there as here.
"""

import os

import torch


def main() -> None:
    """Forget the devices, then run the command line."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from torchtrain import cli, products
    from torchtrain.tests.flash_on_cpu import FlashOnCPU

    torch.cuda.is_available = lambda: False
    products.chooses_float32 = lambda: False  # multiply as a GPU does, on a CPU with AVX2 alone, too
    os.environ["DS_ACCELERATOR"] = "cpu"
    set_accelerator(CPU_Accelerator())
    with FlashOnCPU():
        cli.main()

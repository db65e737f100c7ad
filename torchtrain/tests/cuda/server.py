"""`torchtrain.tests.forks` on the stand-in for CUDA: what it forks sees four GPUs, NCCL and their attention kernels.

    python -m torchtrain.tests.cuda.server          # answers requests
    python -m torchtrain.tests.cuda.server bugs     # prints what finds which bug of devices

Everything here is done before torch's first question for its devices, so the order of the lines counts.
"""

# ruff: noqa: E402, I001
import sys

from torchtrain.tests.cuda import standin

standin.load()

from torchtrain.tests.cuda import collectives, kernels
from torchtrain.tests import forks

collectives.install()
KERNELS = kernels.install()

if __name__ == "__main__":
    if sys.argv[1:] == ["bugs"]:
        from torchtrain.tests.cuda import bugs

        bugs.main()
    else:
        forks._serve()

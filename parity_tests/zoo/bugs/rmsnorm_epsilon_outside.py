"""x / (rms(x) + eps) for x / sqrt(mean(x^2) + eps)."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import in_every_family


def _forward(self, x: Tensor) -> Tensor:
    wide = x.float()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
    return self.weight * normed.to(x.dtype)


BUG = Bug(
    what="RMSNorm's epsilon outside the root",
    where=(
        "the RMSNorm paper's own code adds eps to the root (arXiv 1910.07467), Llama's does not; "
        "ports mix them (seen in reviews)"
    ),
    stage="forward",
    apply=lambda: in_every_family("RMSNorm", "forward", lambda _: _forward),
    likely={"dtype": "float32"},
)

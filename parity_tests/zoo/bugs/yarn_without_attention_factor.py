"""cos and sin lack the factor 0.1 ln(s) + 1 that sharpens attention over the longer context."""

from unittest.mock import patch

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import in_every_family


def _make(original):
    def forward(self, x, position_ids):
        with patch.object(self, "attention_scaling", 1.0):
            return original(self, x, position_ids)

    return forward


BUG = Bug(
    what="YaRN without its attention factor",
    where=(
        "exllamav3 issue 259 (1.0.0 to 1.2.1: fluent text that does not follow the prompt); vLLM PR "
        "48623, sglang PR 33558"
    ),
    stage="forward",
    apply=lambda: in_every_family("RotaryEmbedding", "forward", _make),
    likely={"rope": "yarn"},
)

"""The inverse frequencies rounded by a cast of the whole model."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies

BUG = Bug(
    what="inv_freq rounded by model.to(bf16)",
    where=(
        "transformers issue 25681, GPT-NeoX PR 1016, and NeMo Automodel PR 2549 in 2026: seven model families at once"
    ),
    stage="forward",
    apply=lambda: frequencies(lambda _, inv_freq_C: inv_freq_C.bfloat16().float()),
)

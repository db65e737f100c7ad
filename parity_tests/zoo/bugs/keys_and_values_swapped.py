"""Keys and values change places."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import attention


def _make(attend):
    return lambda q, k, v, plan, **options: attend(q, v, k, plan, **options)


BUG = Bug(
    what="keys and values swapped",
    where=(
        "fused projections split in the wrong order: ChatLearn PR 277 (qkv of grouped heads); seen in reviews of caches"
    ),
    stage="forward",
    apply=lambda: attention(_make),
)

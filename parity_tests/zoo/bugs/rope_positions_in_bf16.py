"""Positions in the model's dtype: from 256 on, bfloat16 cannot tell neighbours apart."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import positions

BUG = Bug(
    what="positions counted in bf16",
    where="GPT-NeoX issue 1003 and PR 1016: arange(...).type_as(inv_freq), so that 256 and 257 are one position",
    stage="forward",
    apply=lambda: positions(lambda position_ids_BT, _: position_ids_BT.bfloat16().long()),
)

"""What the name of an array says: the stage that it belongs to, its layer, and which array of the layer it is."""

import re

from parity_tests.report.schema import Group

_PREFIX = re.compile(r"^(run\.(exported\.|masters\.)?)?((inputs|forward|gradients|step|trajectory|loss)\.)?(model\.)?")
# `layers.3.q`, `model.layers.3.mlp`, `transformer.h.3.attn`, `layers_3.mlp`, `decoder.block_3`.
_LAYER = re.compile(r"(?:^|\.)(?:\w*layers?|h|\w*blocks?)[._](\d+)(?:\.(.+))?$", re.IGNORECASE)


def bare(name: str) -> str:
    """Without the `step 3: ` of a dump of several steps."""
    return name.rpartition(": ")[2]


def group_of(name: str) -> Group:
    """The stage that an array belongs to."""
    name = bare(name)
    if name.startswith("loss") or name in ("inputs.shift_labels", "inputs.weights"):
        return "loss"
    for group in ("gradients", "step", "trajectory", "run"):
        if name.startswith(f"{group}."):
            return group
    return "forward"


def layer_and_tap(name: str) -> tuple[int | None, str]:
    """The layer of an array and its tap: `gradients.model.layers.0.mlp.up_proj.weight` -> 0, `mlp.up_proj.weight`."""
    rest = _PREFIX.sub("", bare(name), count=1)
    found = _LAYER.search(rest)
    return (int(found[1]), found[2] or "output") if found else (None, rest)

"""The memory of one rank's step of configs at full size, against `torchtrain plan`: a Markdown table.

    python -m torchtrain.tests.shapes_only configs/paper/*-*.yaml -n 8
    python -m torchtrain.tests.shapes_only configs/paper/llama2-7b-128k-anchor.yaml -n 8 --details

Configs whose memory cannot differ share a line. `--details` prints what is held at the peak. Options such as
`train.steps=20` change every config.
"""

import argparse
from collections import Counter
from pathlib import Path

from torchtrain.config import Config, load_config
from torchtrain.planning.budget import GIB
from torchtrain.tests.shapes_only.step import FEW, Measured, at_full_depth, measure, with_two_micro_batches

# Sections that decide nothing about memory.
_NOT_COUNTED = {"run", "rope", "data", "held_out", "evaluation", "log"}


def main() -> None:
    """Measure each group of configs and print its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="YAML files, and section.key=value")
    parser.add_argument("-n", "--processes", type=int, default=1)
    parser.add_argument("--details", action="store_true", help=f"what is held, of {FEW[0]} layers")
    arguments = parser.parse_args()
    overrides = [text for text in arguments.configs if "=" in text]
    groups: dict[str, list[tuple[str, Config]]] = {}
    for path in (text for text in arguments.configs if "=" not in text):
        config = with_two_micro_batches(load_config(path, overrides), arguments.processes)
        groups.setdefault(_key_of(config), []).append((Path(path).stem, config))
    print("| config | planned, GiB | held, GiB | planned / held |\n| --- | ---: | ---: | ---: |")
    for (name, config), *others in groups.values():
        held, planned = at_full_depth(config, arguments.processes)
        more = f" and {len(others)} more" if others else ""
        print(f"| `{name}`{more} | {planned / GIB:.2f} | {held / GIB:.2f} | {planned / held:.3f} |", flush=True)
        if arguments.details:
            _print_details(measure(config, arguments.processes, FEW[0]))


def _key_of(config: Config) -> str:
    """Return the settings that a step's memory depends on: tags and interleaving change no shape."""
    tree = config.model_dump(exclude=_NOT_COUNTED)
    tree["pack"] = {"variant": config.pack.variant.partition("+")[0], "sequence_length": config.pack.sequence_length}
    return str(tree)


def _print_details(found: Measured) -> None:
    print(f"\nheld      {found.peak / GIB:.2f} GiB at most, {found.before / GIB:.2f} GiB between steps")
    print("held when most was held, GiB:")
    sizes: Counter[str] = Counter()
    for held in found.at_peak:
        sizes[f"{held.operation} {held.place}"] += held.size
    for what, size in sizes.most_common(20):
        print(f"  {size / GIB:8.2f}  {what}")


if __name__ == "__main__":
    main()

"""The memory, host waits and copies of one step of a config at full size, on the first of many ranks:

python -m torchtrain.tests.shapes_only configs/paper/llama2-7b-128k-anchor.yaml -n 8 train.sequences_per_step=2
"""

import argparse
import time
from collections import Counter

from torchtrain.config import load_config
from torchtrain.planning import budget
from torchtrain.tests.shapes_only.step import FEW, at_full_depth, measure, plan


def main() -> None:
    """Measure, and print beside what `torchtrain plan` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("-n", "--processes", type=int, default=1)
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--layers", type=int, help="of the model; default: all")
    depth.add_argument(
        "--extrapolate", action="store_true", help="take two depths, and tell those of all layers by them"
    )
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    gib = budget.GIB
    started = time.perf_counter()
    if arguments.extrapolate:
        held, planned = at_full_depth(config, arguments.processes)
        print(f"all layers  planned {planned / gib:.2f} GiB, held {held / gib:.2f} GiB, {planned / held - 1:+.2%}")
        print(f"below: {FEW[0]} layers")
    layers = FEW[0] if arguments.extrapolate else arguments.layers
    found = measure(config, arguments.processes, layers)
    planned = plan(config, arguments.processes, layers)
    print(f"planned   {planned / gib:.2f} GiB, {planned / found.peak - 1:+.2%}")
    print(f"held      {found.peak / gib:.2f} GiB at most, {found.before / gib:.2f} GiB between steps")
    print(f"launches  {found.launches:,}; two steps on shapes took {time.perf_counter() - started:.0f} s")
    print("held when most was held, GiB:")
    sizes: Counter[str] = Counter()
    for held in found.at_peak:
        sizes[f"{held.operation} {held.place}"] += held.size
    for what, size in sizes.most_common(20):
        print(f"  {size / gib:8.2f}  {what}")
    print("waits of the host:")
    for (what, place), count in found.waits.most_common():
        print(f"  {count:8,}  {what}, {place}")
    print("copied from the host, MiB:")
    for place, size in found.copies.most_common(10):
        print(f"  {size / 2**20:8.1f}  {place}")


if __name__ == "__main__":
    main()

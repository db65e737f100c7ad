"""The command line in a process of its own that may kill itself, for where no process can be forked: CUDA is not to be
shared.

    python -m torchtrain.tests.launch [--die PHASE NTH] ARGV...     # a phase of `torchtrain.tests.forks`
"""

import signal
import sys

from torchtrain import cli
from torchtrain.tests.forks import arm


def main() -> None:
    """Run `torchtrain ARGV`, as far as it lives."""
    if sys.argv[1:2] == ["--die"]:
        phase, nth = sys.argv[2:4]
        arm(phase, int(nth), signal.SIGKILL, None)
        del sys.argv[1:4]
    cli.main()


if __name__ == "__main__":
    main()

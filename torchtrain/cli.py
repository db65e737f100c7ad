"""The command line. `anchorline.command` defines the exit codes; `commands.ending` adds what many processes need.

`torchtrain train` is one process; torchrun starts many: torchrun --nproc_per_node 8 -m torchtrain train CONFIG.
"""

import os
import sys

from anchorline.command import make_app
from torchtrain.commands import corpora, plans, results, runs


def _close_input() -> None:
    """Packages that we call must not wait for an answer from whoever started us."""
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


app = make_app(
    "torchtrain",
    "Extend a language model's context: train it on packed long sequences, AnchorAttention and others.",
    _close_input,
)


# In the order in which --help shows them.
for _command in (
    *(plans.init, runs.train, runs.resume, runs.status, runs.verify),
    *(corpora.prepare, corpora.stats),
    *(plans.plan, plans.config),
    *(results.evaluate, results.compare),
):
    app.command(name=_command.__name__)(_command)

# People look for it.
app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(runs.export)


def main() -> None:
    """Entry point of `torchtrain`. `config --help KEY` is `config --explain KEY`; --explain alone lists all."""
    if sys.argv[1:2] == ["config"] and sys.argv[2:3] in (["--help"], ["-h"]) and len(sys.argv) == 4:
        sys.argv[2] = "--explain"
    if sys.argv[1:] == ["config", "--explain"]:
        sys.argv.pop()
    app()


if __name__ == "__main__":
    main()

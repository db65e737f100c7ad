"""The command line. How it ends is `anchorline.command`'s, but for what many processes add (`commands.ending`): who
speaks, and 143 where SIGTERM ended a run (it is saved).

`torchtrain train` is one process; torchrun starts many: torchrun --nproc_per_node 8 -m torchtrain train CONFIG.
"""

import os
import sys

from anchorline.command import make_app
from torchtrain.commands import corpora, plans, results, runs, trials

app = make_app(
    "torchtrain", "Extend a language model's context: train it on packed long sequences, AnchorAttention and others."
)


@app.callback()
def _torchtrain() -> None:
    # Packages that we call must not wait for an answer from whoever started us.
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


# In the order in which --help shows them.
for _command in (
    *(runs.train, runs.resume, runs.status, runs.verify),
    *(corpora.prepare, corpora.stats),
    *(plans.plan, plans.config),
    *(results.evaluate, results.compare, results.lm_eval_log),
    *(trials.experiment, trials.bench),
):
    app.command(name=_command.__name__.replace("_", "-"))(_command)


def main() -> None:
    """Entry point of the command `torchtrain`."""
    app()


if __name__ == "__main__":
    main()

"""The precision study with a torch model's attention: real kernels are studied and not their emulation.

    python -m parity_tests.study configs/study/demo.yaml --implementation eager --out runs/study-torch
    python -m ropestudy.report runs/study --beside runs/study-torch      # both on one page

Only `propagated` can be had from a whole model, so of a study's sections `shift_pairs` is run, for its pretrained
model. With `eager` the attention is what transformers returns. Any other implementation does not return it: there it is
made in float64 from the q and k that the model's own kernels rotated; every record says that its softmax rounds
nothing.

The shifts of a sequence are forward passes that go through the model side by side and meet at every layer
(`side_by_side`). There they are compared in blocks of queries, so nothing of size T x T is kept but what `eager` itself
returns, and of that one layer at a time. Each pass is a batch of one, as in any use of the model: a batch of all shifts
multiplies matrices of another height, for which a library may sum in another order, and would measure that too.

With `eager` the run also checks the emulation (`check_row`): transformers' attention beside the oracle's.

Every sequence is kept under --out as it is finished; the same command goes on behind the last.

`beside` runs the model and sums, `emulation` checks the oracle, `run` makes the study.
"""

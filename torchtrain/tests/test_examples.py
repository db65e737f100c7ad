"""The training examples run and learn."""

import re
import runpy

import pytest

from examples import train_with_accelerate, train_with_lora, train_with_sft, train_with_trainer


@pytest.mark.parametrize("example", [train_with_trainer, train_with_sft, train_with_lora, train_with_accelerate])
def test_it_learns(example):
    losses = example.main()
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_strings_train(capsys):
    runpy.run_path("examples/train_from_strings.py", run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 1

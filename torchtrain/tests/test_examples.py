"""The training examples run and learn."""

import pytest

from examples import train_with_lora, train_with_sft, train_with_trainer


@pytest.mark.parametrize("example", [train_with_trainer, train_with_sft, train_with_lora])
def test_it_learns(example):
    losses = example.main()
    assert losses[-1] < losses[0]

"""The training examples run and learn."""

import re
import runpy

import datasets
import pytest
from trl import SFTConfig, SFTTrainer

import torchtrain
from anchorline.errors import UserError
from examples import train_with_accelerate, train_with_lora, train_with_sft, train_with_trainer
from examples.tiny import tiny_llama, tiny_tokenizer


@pytest.mark.parametrize("example", [train_with_trainer, train_with_sft, train_with_lora, train_with_accelerate])
def test_it_learns(example):
    losses = example.main()
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_strings_train(capsys):
    runpy.run_path("examples/train_from_strings.py", run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"packing": True, "max_length": 32}, None),
        ({"padding_free": True, "max_length": None}, None),
        ({"padding_free": True, "max_length": None, "completion_only_loss": True}, None),
        ({}, r"attention_mask: .* \(TRL: set packing=True, or padding_free=True and max_length=None\)"),
    ],
)
def test_trls_own_packing_trains_or_is_refused_by_the_name_of_the_setting(tmp_path, settings, refusal):
    words = [[f"w{(7 * n + i) % 62}" for i in range(5 + n % 11)] for n in range(32)]
    rows = [{"prompt": " ".join(w[:3]) + " ", "completion": " ".join(w[3:])} for w in words]
    fixed = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": False}
    trainer = SFTTrainer(
        torchtrain.attach(tiny_llama()),
        SFTConfig(str(tmp_path), **fixed, **settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
    )
    if refusal is None:
        trainer.train()
        assert trainer.state.global_step == 2
    else:
        with pytest.raises(UserError, match=refusal):
            trainer.train()

"""The training examples run, learn and are short."""

import copy
import re
import runpy
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trl import SFTConfig, SFTTrainer

import torchtrain
from anchorline.errors import UserError
from anchorline.tolerance import judge
from examples import train_compiled, train_with_lora, train_with_sft, train_with_trainer
from examples.tiny import tiny_llama, tiny_rows, tiny_tokenizer
from torchtrain.config import TrainConfig
from torchtrain.training.step import accumulate, make_micro_batches
from torchtrain.training.strategy import Replicated


@pytest.mark.parametrize(
    ("example", "clip", "given"),
    [
        (train_with_trainer.main, 1.0, {}),
        (train_with_sft.main, 1.0, {}),
        (train_with_lora.main, None, {}),
        (train_with_lora.main, None, {"quantised": True}),
        (lambda: runpy.run_module("examples.train_with_accelerate")["losses"], None, {}),
        pytest.param(train_compiled.main, None, {"backend": "aot_eager"}, marks=pytest.mark.sweep),
    ],
)
def test_its_losses_are_those_of_our_trainer(monkeypatch, example, clip, given):
    """Of our trainer's steps on the same batches, with the same settings of AdamW."""
    if "quantised" in given:
        pytest.importorskip("bitsandbytes")
    models, batches, groups, attach = [], [], [], torchtrain.attach

    def attach_watched(model):
        models.append(copy.deepcopy(model))
        attach(model).register_forward_pre_hook(note_batch, with_kwargs=True)
        return model

    def note_batch(model, args, batch):
        if not torch.compiler.is_compiling():
            batches.append({name: x for name, x in batch.items() if name.endswith(("_ids", "_labels"))})

    monkeypatch.setattr(torchtrain, "attach", attach_watched)
    with register_optimizer_step_pre_hook(lambda adamw, *_: groups.append(dict(adamw.param_groups[0]))):
        losses = example(**given)
    assert len(losses) == len(groups) == 8
    assert losses[-1] < losses[0]
    batches = batches or [torchtrain.collate(list(tiny_rows()))] * 8
    each, ours = len(batches) // 8, {}
    for dtype in (torch.float32, torch.float64):
        model, group, ours[dtype] = attach(copy.deepcopy(models[0]).to(dtype)), groups[0], []
        strategy = Replicated(
            model.get_base_model() if hasattr(model, "get_base_model") else model,
            TrainConfig(clip_norm=clip, betas=tuple(group["betas"]), epsilon=group["eps"]),
        )
        for own in strategy.optimizer.adamw.param_groups:
            own["weight_decay"] = group["weight_decay"]  # norms decay, too, in a loop of one's own
        for number, group in enumerate(groups):
            rows = [b | {"domain_ids": b["input_ids"] * 0} for b in batches[number * each :][:each]]
            made, sums = make_micro_batches(rows, ["all"]), []
            accumulate(strategy, made, ["all"], 1024, lambda each_BT, _, sums=sums: sums.append(each_BT.sum()))
            strategy.step(group["lr"])
            # In the model's dtype, as transformers sums.
            ours[dtype].append((sum(sums) / sum(len(batch.labels) for batch in made)).item())
    verdict = judge(losses, ours[torch.float64], ours[torch.float32], "float32")
    assert verdict.passed, verdict


@pytest.mark.sweep
@pytest.mark.parametrize("example", ["same_on_two_ranks", "same_in_two_versions"])
def test_its_verdict_is_that_of_the_page(example):
    done = subprocess.run([sys.executable, "-m", f"examples.{example}"], capture_output=True, text=True)
    found = re.search(r"SAME: \d+ arrays", done.stdout)
    assert found, done.stdout + done.stderr
    assert found[0] in Path("docs/same-computation.md").read_text("utf-8")


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
def test_trls_own_packing_trains_or_is_refused_by_the_name_of_the_setting(tmp_path, settings, refusal, caplog):
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
        assert caplog.text.count("there is no anchor (rows of torchtrain.pack have one)") == 1
    else:
        with pytest.raises(UserError, match=refusal):
            trainer.train()

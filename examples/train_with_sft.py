"""AnchorAttention in TRL's `SFTTrainer`: python -m examples.train_with_sft"""

from tempfile import TemporaryDirectory

from trl import SFTConfig, SFTTrainer

import torchtrain
from examples.tiny import tiny_llama, tiny_rows, tiny_tokenizer


def main() -> list[float]:
    """Train 8 steps; return the losses."""
    packed = {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    settings = {"max_steps": 8, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    with TemporaryDirectory() as folder:
        arguments = SFTConfig(folder, bf16=False, **packed, **settings)
        model, rows = torchtrain.attach(tiny_llama()), tiny_rows().to_datasets()
        given = {"train_dataset": rows, "data_collator": torchtrain.collate, "processing_class": tiny_tokenizer()}
        trainer = SFTTrainer(model, arguments, **given)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main())

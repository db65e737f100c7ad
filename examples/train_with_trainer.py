"""AnchorAttention in `transformers.Trainer`: python -m examples.train_with_trainer"""

from tempfile import TemporaryDirectory

from transformers import Trainer, TrainingArguments

import torchtrain
from examples.tiny import tiny_llama, tiny_rows


def main() -> list[float]:
    """Train 8 steps; return the losses."""
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    settings = {"max_steps": 8, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    with TemporaryDirectory() as folder:
        # remove_unused_columns would remove document_ids, which the model's signature does not name.
        arguments = TrainingArguments(folder, remove_unused_columns=False, **accumulated, **settings)
        model = torchtrain.attach(tiny_llama())
        trainer = Trainer(model, arguments, data_collator=torchtrain.collate, train_dataset=tiny_rows())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main())

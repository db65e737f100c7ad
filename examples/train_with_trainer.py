"""AnchorAttention in `transformers.Trainer`:

python -m examples.train_with_trainer
"""

from tempfile import TemporaryDirectory

from transformers import Trainer, TrainingArguments, default_data_collator

import torchtrain
from examples.tiny import packed_rows, tiny_llama


def main() -> list[float]:
    """Train 8 steps; return the losses."""
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            remove_unused_columns=False,  # it would strip document_ids, which the model's signature does not name
            max_steps=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        )
        model = torchtrain.attach(tiny_llama())
        trainer = Trainer(model, arguments, data_collator=default_data_collator, train_dataset=packed_rows())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()

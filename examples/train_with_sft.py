"""AnchorAttention in TRL's `SFTTrainer`, on rows that are packed already:

python -m examples.train_with_sft
"""

from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, default_data_collator
from trl import SFTConfig, SFTTrainer

import torchtrain
from examples.tiny import packed_rows, tiny_llama


def main() -> list[float]:
    """Train 8 steps; return the losses."""
    words = {str(i): i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "0")), pad_token="1", eos_token="0"
    )
    with TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            remove_unused_columns=False,  # it would strip document_ids
            dataset_kwargs={"skip_prepare_dataset": True},  # the rows are tokenised and packed
            max_steps=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
        )
        trainer = SFTTrainer(
            torchtrain.attach(tiny_llama()),
            arguments,
            data_collator=default_data_collator,
            train_dataset=packed_rows(),
            processing_class=tokenizer,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()

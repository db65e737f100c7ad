"""AnchorAttention under PEFT's LoRA or, with weights in 4 bits, QLoRA: python -m examples.train_with_lora"""

from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import torchtrain
from examples.tiny import tiny_llama, train


def main(quantised: bool = False) -> list[float]:
    """Train the adapters for 8 steps; return the losses. `quantised` needs the package bitsandbytes."""
    model, lora = tiny_llama(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    if quantised:
        four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits)
    return train(torchtrain.attach(get_peft_model(model, lora)))  # attach after PEFT


if __name__ == "__main__":
    print(main())

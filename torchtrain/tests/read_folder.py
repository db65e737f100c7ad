"""What a reader makes of exported folders: run by the Python of that reader, with its own transformers; nothing of
ours.

    PYTHON read_folder.py TOKENS FOLDER [FOLDER ...]

TOKENS is a row of token ids as JSON. Prints a JSON object, from a folder to what was read of it: floats of the tables
as hex, so that none is rounded, or {"error": one line}.
"""

import json
import logging
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "warning"


def read(folder: str, tokens: list[int]) -> dict:
    """Load model, tokenizer and generation config as a user would, and run the model in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    with torch.no_grad():
        beyond = model(torch.tensor([tokens]), use_cache=False).logits[0]
        long_inv_freq = rotary.inv_freq.tolist()
        within = model(torch.tensor([tokens[: len(tokens) // 4]]), use_cache=False).logits[0]
    rope = getattr(model.config, "rope_parameters", None) or {}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    longest = model.generation_config.max_length
    return {
        "theta": getattr(model.config, "rope_theta", None) or rope.get("rope_theta"),
        "type": rotary.rope_type if isinstance(getattr(rotary, "rope_type", None), str) else rope.get("rope_type"),
        "length": model.config.max_position_embeddings,
        "inv_freq": [x.hex() for x in long_inv_freq],
        "attention_scaling": float(getattr(rotary, "attention_scaling", 1.0)),
        "within": [[x.hex() for x in row] for row in within.double().tolist()],
        "beyond": [[x.hex() for x in row] for row in beyond.double().tolist()],
        "dtype": str(model.config.torch_dtype if hasattr(model.config, "torch_dtype") else model.config.dtype),
        "generates_up_to": None if longest == 20 else longest,  # what 4 takes where nothing is written
        "tokenizer_length": tokenizer.model_max_length,
        "special": sorted(tokenizer.all_special_tokens),
        "encoded": tokenizer("abc été 12 <s>")["input_ids"],
    }


def main() -> None:
    """Read every folder; a folder that cannot be read does not stop the others."""
    tokens, results, warnings = json.loads(sys.argv[1]), {}, []
    import transformers

    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    for folder in sys.argv[2:]:
        warnings.clear()
        try:
            results[folder] = read(folder, tokens) | {"warnings": list(warnings)}
        except Exception as error:  # whatever another version raises is what this program is to tell
            results[folder] = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    print(json.dumps({"version": transformers.__version__, "folders": results}))


if __name__ == "__main__":
    main()

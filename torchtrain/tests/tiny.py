"""A tiny model, tokenizer, corpus and config, made here."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from anchorline.errors import UserError

VOCABULARY = 264  # 256 bytes, three special tokens, five ids that no token has
POSITIONS = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LATENT = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "head_dim", "v_head_dim"), 8),
    **{"qk_nope_head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_DELTA = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_experts"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
# Layers of a window, a soft cap of scores and logits, sinks and experts, keys wider than values, or with a state.
MORE_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "mistral_window": (MistralConfig, {"sliding_window": 20}),
    "gemma2": (Gemma2Config, {"sliding_window": 20, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}),
    "gemma3_text": (Gemma3TextConfig, {"sliding_window": 20, "query_pre_attn_scalar": 8, **_LAYERS}),
    "gpt_oss": (GptOssConfig, {"sliding_window": 20, "num_local_experts": 4, "rope_parameters": _YARN}),
    "deepseek_v3": (DeepseekV3Config, _LATENT),
    "qwen3_next": (Qwen3NextConfig, _DELTA | _EXPERTS | _HYBRID),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        _MAMBA
        | _HYBRID
        | {"num_local_experts": 4, "shared_intermediate_size": 16, "logits_scaling": 3.0}
        | {"position_embedding_type": "rope"},
    ),
    "phi3": (Phi3Config, {"sliding_window": None}),
    "olmo3": (Olmo3Config, {"sliding_window": 20, **_LAYERS}),
    "glm4_moe": (Glm4MoeConfig, _EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    "gemma4_text": (
        Gemma4TextConfig,
        _LAYERS
        | {"sliding_window": 20, "global_head_dim": 8, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": VOCABULARY},
    ),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, _DELTA | _EXPERTS | _HYBRID),
    "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "nemotron_h": (
        NemotronHConfig,
        {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16}
        | {"layers_block_type": ["mamba", "attention"], "max_position_embeddings": 2 * POSITIONS},  # without RoPE
    ),
    "falcon_h1": (FalconH1Config, _MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
}


def tiny_config(family: str = "llama", **changes: Any) -> PretrainedConfig:
    """A family's config at a size that trains in a second."""
    cls, own = (FAMILIES | MORE_FAMILIES)[family]
    return cls(**(SIZES | own | changes))


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any):
    """A model with random weights, always the same, and norms that are not all one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte: ids 0..255, then <s>, </s>, <pad>."""
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=POSITIONS
    )


def write_corpus(path: Path) -> Path:
    """Two domains, 24 documents each of 20 to 89 tokens: counting up, and the alphabet again and again."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(24):
            numbers = " ".join(str(n) for n in range(i, i + 8 + i // 2))
            letters = ("abcdefghijklmnopqrstuvwxyz " * 4)[i : i + 20 + 3 * i]
            for domain, text in (("numbers", numbers), ("letters", letters)):
                file.write(json.dumps({"text": text, "domain": domain}) + "\n")
    return path


def tiny_settings(folder: Path, source: Path, corpus: Path) -> dict[str, Any]:
    """A config that trains the model of `source` at twice its length, in `folder`."""
    return {
        "run": {"folder": str(folder / "run"), "seed": 3},
        "model": {"source": str(source), "dtype": "float32"},
        "rope": {"theta": 50_000.0},
        "data": {
            "sources": [{"files": str(corpus), "domain_field": "domain"}],
            "cache": str(folder / "cache"),
            "held_out_share": 0.1,
        },
        "pack": {"sequence_length": 2 * POSITIONS, "variant": "anchor"},
        "train": {"steps": 12, "sequences_per_step": 2, "learning_rate": 0.02, "warmup_steps": 2, "loss_chunk": 50},
        "held_out": {"sequences": 2},
    }


def refused(call) -> str:
    """Return the one line with which a call is refused."""
    message = "\n"  # no refusal
    try:
        call()
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    return message

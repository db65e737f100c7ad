"""Every causal family of transformers under `anchor`: right, refused and why, or not built. Writes docs/families.md.

    python -m parity_tests.families --out docs/families.md   # every family, some minutes
    python -m parity_tests.families llama lfm2               # these, to the terminal

A family is judged on a tiny random model in float64, on two packed rows. Truth is the family's own eager attention,
given the mask rule as a 4D float mask, with a window of 3 tokens for the layers that have one. The reference is its
sdpa, given the same mask. So what is allowed (`tolerance`) is what two implementations of transformers differ by. A
family without sdpa (soft caps, sinks) is allowed what its eager attention errs in float32. So is a family with layers
that carry a state, each document alone behind its row's anchor: it has one implementation of these layers, and sdpa
makes none of their roundings. They cast to float32 whatever they are given. So truth and candidate are computed
`in_float64`, and neither has an error that the other may have by luck. Isolation is exact: no gradient reaches a token
that may not be seen.

Gradients are judged module by module, a layer's weight and bias as one array, which is what they are of [x, 1]. A key's
bias without RoPE alone cannot be judged: it moves every score of a query alike, its gradient is zero, and what is left
of it in transformers' two implementations is rounding, of which one may have a quarter more than twice the other's.

Legend: B batch · T tokens of a row · V vocabulary.
"""

import argparse
import contextlib
import re
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import torchtrain
from anchorline.errors import UserError
from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from anchorline.tolerance import judge
from parity_tests import extensions
from parity_tests.extensions import in_float64
from torchtrain.attention import visible_BTT
from torchtrain.attention.attach import DOCUMENTS
from torchtrain.attention.hf import KEEPS_ANCHOR
from torchtrain.attention.masks import LAYER_TYPES
from torchtrain.attention.recurrent import is_mixer, runs_whole
from torchtrain.marks import ANCHOR, PADDING

RIGHT, REFUSED, NOT_BUILT, WRONG = "right", "refused", "not built", "WRONG"
_ORDER = (WRONG, RIGHT, REFUSED, NOT_BUILT)
WHOLE = 'with `engine="documents"`'
TABLE = MarkedPlace("<!-- made by parity_tests/families.py -->", "<!-- end of families -->")
_VOCABULARY = 61
_WINDOW = 3  # of the layers that have one: shorter than the documents below
_LARGEST = 20_000_000  # parameters: more are not a tiny model: its config has a size that `_SIZES` does not know

# Sizes that a family ties to one another in a way of its own, or that its config leaves open.
_LATENT = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4")
_MORE_LATENT = ("longcat_flash", "minicpm3", "youtu")
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_EXPERTS = {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_ZAMBA, _KINDS = {"attention_hidden_size": 64, "attention_head_dim": 16}, ["linear_attention", "hybrid"] * 2
_OWN_SIZES: dict[str, dict[str, Any]] = {
    **{family: {"num_key_value_heads": 4} for family in (*_LATENT, *_MORE_LATENT)},
    **{family: {"head_dim": 8} for family in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "gemma4_text": {"global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    **{family: {"layer_types": ["conv", "full_attention"] * 2} for family in ("lfm2", "lfm2_moe")},
    "granitemoehybrid": _LINEAR,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "xlstm": {"num_blocks": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"), dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), 0)
    ),
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in sorted(LAYER_TYPES)}
    },
    "dots3_note_text": {"num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
    | {"swa_q_lora_rank": 8, "swa_kv_lora_rank": 8, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 4},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64}
    | {"indexer_compress_ratio": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zaya": {"num_experts_per_tok": 1},
    **{family: _LINEAR | _EXPERTS for family in ("bailing_hybrid", "kimi_linear")},
    **{family: _ZAMBA | {name: _KINDS} for family, name in (("zamba", "layer_types"), ("zamba2", "layers_block_type"))},
}

# What families call their sizes. A name that a config lacks is left out.
_NAMES: dict[Any, str] = {
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_attention_heads n_head n_heads "
    "num_heads attention_heads decoder_attention_heads encoder_attention_heads swa_num_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts rotary_dim index_n_heads d_rel linear_num_key_heads "
    "linear_num_value_heads linear_num_heads mamba_chunk_size chunk_size",
    32: "hidden_size d_model n_embd embedding_size embedding_dim emb_dim dim word_embed_proj_dim lru_width "
    "attention_hidden_size dim_model_base adapter_in_dim adapter_out_dim hidden_size_global adapter_input_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size n_inner dff dim_ff d_inner "
    "intermediate_size_mlp dense_intermediate_size",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "shared_experts_intermediate_size moe_shared_expert_intermediate_size hidden_size_per_layer_input",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts "
    "mamba_n_groups n_groups",
    1: "n_group topk_group num_expert_group n_shared_experts zero_expert_num eos_token_id",
    8: "head_dim swa_head_dim attention_head_size attention_head_dim d_head dim_head qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim index_head_dim kv_channels q_lora_rank kv_lora_rank o_lora_rank gated_norm_rank laurel_rank "
    "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_n_heads mamba_num_heads mamba_d_head "
    "mamba_head_dim mamba_d_state n_mamba_heads mamba_headdim state_size ssm_state_size router_hidden_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len context_length mamba_d_ssm",
    0: "pad_token_id bos_token_id num_kv_shared_layers",
    _VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    _WINDOW: "sliding_window",
    0.2: "initializer_range",  # attention far from uniform: a wrong mask shows
}
_DROPS = re.compile("dropout|pdrop|layerdrop|^drop_path_rate$")
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()} | {"is_decoder": True}


# Encoders, encoder-decoders and decoders of before 2023, which nobody extends; and heads of speech and music.
LEFT_OUT = {
    *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small"),
    *("camembert", "cpmant", "ctrl", "data2vec-text", "electra", "ernie", "git", "gpt_neox_japanese", "marian"),
    *("mbart", "megatron-bert", "musicgen", "musicgen_melody", "mvp", "openai-gpt", "pegasus", "plbart", "prophetnet"),
    *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xglm"),
    *("gemma4_assistant", "gemma4_unified_assistant"),  # they draft tokens for another model
    *("xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
}


@dataclass(frozen=True)
class FamilyRow:
    """What came out for one family."""

    family: str
    verdict: str
    why: str = ""
    alone: str = ""  # what `set_attn_implementation` without `attach` does


def main() -> int:
    """Sweep, print, and write the page; 1 if a family that is accepted computes something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; every causal family without one")
    parser.add_argument("--out", type=Path, help="the page whose tables are written")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.families} - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        parser.error(
            f"families: transformers has no causal model of type {', '.join(unknown)}; a type is in config.json"
        )
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    rows = []
    for family in arguments.families or causal_families():
        rows.append(examine(family))
        print(f"{rows[-1].family}: {rows[-1].verdict} {rows[-1].why} | {rows[-1].alone}", flush=True)
    if arguments.out:
        text = TABLE.put(read_marked(arguments.out, [TABLE, extensions.TABLE]), describe(rows))
        save(
            arguments.out,
            extensions.TABLE.put(text, extensions.describe(arguments.families or causal_families())).encode(),
        )
    return int(any(row.verdict == WRONG for row in rows))


def causal_families() -> list[str]:
    """Model types that `AutoModelForCausalLM` knows, without `LEFT_OUT`, sorted."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - LEFT_OUT)


def examine(family: str) -> FamilyRow:
    """Build a tiny model of a family and judge it."""
    with warnings.catch_warnings(action="ignore"):  # of configs that no checkpoint has
        try:
            model = tiny_model(family)
            model(input_ids=packed_rows()["input_ids"], use_cache=False)
        except Exception as error:
            return FamilyRow(family, NOT_BUILT, _line(error))
        alone = _alone(model)
        try:
            torchtrain.attach(model)
            why = ""
        except UserError as error:
            why = str(error)
            torchtrain.attach(model, engine=DOCUMENTS)
        except Exception as error:
            return FamilyRow(family, WRONG, f"attach fails: {_line(error)}", alone)
        try:
            fault = find_fault(model)
        except Exception as error:
            return FamilyRow(family, NOT_BUILT, f"its own attention does not run here: {_line(error)}", alone)
    if fault and why:
        return FamilyRow(family, REFUSED, f"{why}; documents: {fault}", alone)
    return FamilyRow(family, WRONG if fault else RIGHT, fault or (WHOLE if why else ""), alone)


def tiny_config(family: str) -> PretrainedConfig:
    """A family's config, every size that has a known name made small, every dropout 0."""
    return _shrink(CONFIG_MAPPING[family]())


def _shrink(config: PretrainedConfig) -> PretrainedConfig:
    own, more = config.to_dict(), _OWN_SIZES.get(config.model_type, {})
    changes: dict[str, Any] = {name: value for name, value in _SIZES.items() if own.get(name) is not None}
    changes |= {name: 0.0 for name, value in own.items() if isinstance(value, float) and _DROPS.search(name)}
    changes |= {name: _shrink(getattr(config, name)) for name in config.sub_configs if getattr(config, name, None)}
    return type(config)(**(changes | more))


def tiny_model(family: str) -> Any:
    """A random model of a family in float64, attention by eager."""
    config = tiny_config(family)
    with torch.device("meta"):
        parameters = sum(
            p.numel() for p in AutoModelForCausalLM.from_config(config, trust_remote_code=False).parameters()
        )
    if parameters > _LARGEST:
        raise ValueError(f"{parameters:,} parameters: a size in its config has a name that the sweep does not know")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager", trust_remote_code=False
    )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped kernels have no float64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.1 * torch.randn_like(parameter)
    model.double()  # what a family makes in float32 whatever it is told
    return model.eval()


def packed_rows() -> dict[str, Tensor]:
    """Two rows of 12 tokens: an anchor and two documents; three documents."""
    document_ids = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3]])
    B, T = document_ids.shape
    tokens = torch.randint(2, _VOCABULARY, (B, T), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "position_ids": torch.arange(T).expand(B, T), "document_ids": document_ids}


def find_fault(model: Any) -> str:
    """Compare logits and every gradient with transformers' own; return what differs, or nothing."""
    batch = packed_rows()
    if model._supports_sdpa and not _carries_a_state(model):
        judged_as, wide = "float64", contextlib.nullcontext()
        truth = logits_and_gradients(model, "eager", batch)
        reference = logits_and_gradients(model, "sdpa", batch)
    else:
        judged_as, wide = "float32", in_float64()
        model.float().double()  # so that the reference has the same numbers
        with wide:
            truth = logits_and_gradients(model, "eager", batch)
        reference = logits_and_gradients(model.float(), "eager", batch)
        model.double()
    with wide:
        candidate = logits_and_gradients(model, "anchor", batch)
    if truth.keys() != candidate.keys():
        return f"{sorted(truth.keys() ^ candidate.keys())[0]} in one of the two only"
    for name in truth:
        if truth[name].shape != candidate[name].shape:
            return f"{name}: shape {list(candidate[name].shape)}"
        verdict = judge(candidate[name], truth[name], reference[name].double(), judged_as)
        if not verdict.passed:
            return f"{name}: {verdict}"
    return _leak(model, batch)


def logits_and_gradients(
    model: Any, implementation: str, batch: dict[str, Tensor], backward: bool = True, hidden: bool = False
) -> dict[str, Tensor]:
    """Return logits, and the gradients of a random weighting of them into every parameter, flat, by module.

    model: any causal language model of transformers.
    implementation: of attention; all but our own are given the mask rule as masks.
    batch: token, position and document ids [B, T].
    backward: with gradients.
    hidden: with the hidden states before, between and after the layers, by the names of the oracle.
    """
    ours = implementation.startswith("anchor")
    model.set_attn_implementation("eager" if runs_whole(model.base_model) else implementation)
    model.zero_grad()
    options = {"use_cache": False, "output_hidden_states": hidden}
    with torch.set_grad_enabled(backward):
        if not ours and _carries_a_state(model):
            own = types.MethodType(type(model.base_model).forward, model.base_model)
            with patch.object(model.base_model, "forward", own):  # without engine documents
                logits_BTV, *layers = each_document_alone(model, batch, options)
        else:
            output = model(**(batch if ours else rule_as_masks(batch, model)), **options)
            logits_BTV, layers = output.logits, output.hidden_states or ()
    gradients: dict[str, list[Tensor]] = {}
    if backward:
        weights = torch.randn(logits_BTV.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        weights *= (batch["document_ids"] != -1).cpu()[..., None]
        logits_BTV.backward(weights.to(logits_BTV.device, logits_BTV.dtype))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients.setdefault(name.rpartition(".")[0], []).append(parameter.grad.flatten())
    names = ["embed", *(f"layers.{number}.residual" for number in range(len(layers) - 2)), "final_norm"]
    states = {name: x.detach() for name, x in zip(names, layers, strict=False)}
    flat = {f"gradients.{module}": torch.cat(parts) for module, parts in gradients.items()}
    return {**states, "logits": logits_BTV.detach(), **flat}


def _carries_a_state(model: Any) -> bool:
    return any(is_mixer(module) or runs_whole(module) for module in model.modules())


def each_document_alone(model: Any, batch: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Run the model once for each document, behind its row's anchor; return logits and hidden states, 0 at padding."""
    document_ids = batch["document_ids"]
    whole: list[Tensor] = []
    for row, document in {(row, int(x)) for row, ids in enumerate(document_ids) for x in ids if x != PADDING}:
        own_T = document_ids[row] == document
        index_t = (own_T | (document_ids[row] == ANCHOR)).nonzero().flatten()
        given = {name: batch[name][row, index_t][None] for name in ("input_ids", "position_ids")}
        # Without a mask transformers takes a gap in position_ids for the end of a document.
        output = model(**given, **options, attention_mask=torch.ones_like(given["input_ids"]))
        parts = [output.logits, *(output.hidden_states or ())]
        whole = whole or [x.new_zeros(*document_ids.shape, x.shape[-1]) for x in parts]
        at = torch.full_like(own_T, row, dtype=torch.long)[own_T], own_T.nonzero().flatten()
        whole = [x.index_put(at, part[0, own_T[index_t]]) for x, part in zip(whole, parts, strict=True)]
    return whole


def rule_as_masks(batch: dict[str, Tensor], model: Any) -> dict[str, Any]:
    """The batch with the rule as 4D float masks instead of document ids: one for each kind of layers."""
    config = model.config.get_text_config(decoder=True)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds is None and window is not None and not _hides_the_first_token(model):
        window = None  # the config names one, and no layer has it: Moshi

    keep_anchor = any(getattr(module, KEEPS_ANCHOR, False) for module in model.modules())

    def mask(window: int | None) -> Tensor:
        visible = visible_BTT(batch["document_ids"], window, keep_anchor)[:, None]
        mask = torch.zeros(visible.shape, dtype=model.dtype, device=visible.device)
        return mask.masked_fill(~visible, torch.finfo(model.dtype).min)

    by_kind = {kind: mask(None) for kind in LAYER_TYPES} | {"sliding_attention": mask(window)}
    masks = mask(window) if kinds is None else {kind: by_kind[kind] for kind in set(kinds)}
    return {**{name: x for name, x in batch.items() if name != "document_ids"}, "attention_mask": masks}


@torch.no_grad()
def _hides_the_first_token(model: Any) -> bool:
    """Whether the last of 20 tokens does not depend on the first as the family itself runs: all layers have windows."""
    ids = torch.arange(1, 21)[None]
    other = ids.clone()
    other[0, 0] = 40
    one, two = (model(input_ids=x, use_cache=False).logits[0, -1] for x in (ids, other))
    return torch.equal(one, two)


def _leak(model: Any, batch: dict[str, Tensor]) -> str:
    """Gradients of each token's logits into the embeddings: exactly zero at what it may not see."""
    others = {name: batch[name] for name in ("position_ids", "document_ids")}
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    logits_BTV = model(inputs_embeds=embeds.clone(), **others, use_cache=False).logits
    weights = torch.randn(logits_BTV.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    allowed = visible_BTT(batch["document_ids"])
    for token in range(logits_BTV.shape[1]):
        (gradient,) = torch.autograd.grad(logits_BTV[:, token], embeds, weights[:, token], retain_graph=True)
        if (gradient.any(-1) & ~allowed[:, token]).any():
            return f"token {token} sees what it may not"
    return ""


def _alone(model: Any) -> str:
    """What `set_attn_implementation("anchor")` does without `attach`: refused, ignored, or runs, right or leaking."""
    torchtrain.register()
    model.set_attn_implementation("anchor")
    try:
        if model.config.get_text_config(decoder=True)._attn_implementation != "anchor":
            return "ignored, with a log line"
        return "leaks in silence" if _leak(model, packed_rows()) else "separate"
    except UserError:
        return "refused"
    except Exception as error:
        return f"fails: {_line(error)}"
    finally:
        model.set_attn_implementation("eager")


def describe(rows: list[FamilyRow]) -> str:
    """The counts and the table as Markdown: families that have all in common stand in one row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row.verdict, row.why.partition(";")[0], row.alone), []).append(row.family)
    counts = [f"{sum(row.verdict == verdict for row in rows)} {verdict.lower()}" for verdict in _ORDER]
    lines = [
        f"transformers {transformers.__version__}: {', '.join(counts)}; {len(LEFT_OUT)} left out.",
        "\n| families | verdict | why | without `attach` |\n| --- | --- | --- | --- |",
    ]
    for (verdict, why, alone), families in sorted(groups.items(), key=lambda item: _ORDER.index(item[0][0])):
        cells = (", ".join(families), verdict, why, alone)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


if __name__ == "__main__":
    sys.exit(main())

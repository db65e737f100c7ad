"""`attach` on vision-language models that read text: a document computes what it would alone behind the anchor."""

import pytest
import torch
import transformers
from torch import Tensor

import torchtrain
from anchorline.tolerance import judge

TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
PATCHES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = PATCHES | {"image_size": 28, "patch_size": 14}
SQUARES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
WIDTHS = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
EXPERTS = {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 64}
MODELS = {  # by class: settings of the text model, the vision model, and the whole
    "Qwen3VL": (TEXT | SECTIONS, SQUARES | {"deepstack_visual_indexes": [0]}, {}),
    "Qwen2_5_VL": ({name: of for name, of in TEXT.items() if name != "head_dim"} | SECTIONS, SQUARES, {}),
    "Gemma3": (TEXT | {"query_pre_attn_scalar": 8, "sliding_window": 3}, IMAGES, {"mm_tokens_per_image": 4}),
    "Mistral3": (TEXT | {"model_type": "mistral"}, IMAGES | {"model_type": "pixtral"}, {"image_token_index": 10}),
    "Llama4": (TEXT | EXPERTS, IMAGES | WIDTHS, {}),
}


def tiny(name: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    text, vision, more = MODELS[name]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    return model.double() if dtype == torch.float64 else model


def run(model: transformers.PreTrainedModel, chosen: Tensor, **more: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of chosen tokens of a row of 24, and the embeddings, of which there are gradients."""
    ids_1T = torch.randint(11, 64, (1, 24), generator=torch.Generator().manual_seed(1))[:, chosen]
    embeddings = model.get_input_embeddings()(ids_1T).detach().requires_grad_()
    out = model(inputs_embeds=embeddings, position_ids=torch.arange(24)[None, chosen], use_cache=False, **more)
    return out.logits, embeddings


@pytest.mark.parametrize("name", MODELS)
def test_text_alone_runs_through_the_whole_model(name):
    model = torchtrain.attach(tiny(name, torch.float32))
    anchor, first, second = torch.tensor([0]), torch.arange(1, 12), torch.arange(12, 24)
    documents_1T = torch.tensor([[0] + [1] * 11 + [2] * 12])
    logits, embeddings = run(model, torch.arange(24), document_ids=documents_1T)
    (gradient,) = torch.autograd.grad(logits[0, second].square().sum(), embeddings)
    seen = gradient.abs().amax(-1)[0] > 0
    assert not seen[first].any(), "no gradient from one document to another"
    assert seen[anchor].all(), "the anchor is seen"
    assert seen[second].all()
    for document in (first, second):
        alone = torch.cat([anchor, document])
        mask_1T = torch.ones(1, len(alone), dtype=torch.long)  # without it transformers takes the gap for a border
        truth, reference = (
            run(tiny(name, dtype), alone, attention_mask=mask_1T)[0][:, 1:] for dtype in (torch.float64, torch.float32)
        )
        arrays = (x.detach().numpy() for x in (logits[:, document], truth, reference))
        assert judge(*arrays, "float32").passed, name

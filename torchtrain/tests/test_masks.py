"""The lists of what transformers may ask of an attention layer, held against its own source: an upgrade that adds fails
here.
"""

import ast
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, configuration_utils, masking_utils

import torchtrain
from anchorline.errors import UserError
from torchtrain.attention.hf import ARGUMENTS_REFUSED
from torchtrain.attention.masks import LAYER_TYPES, MASKS_TOLD, MASKS_WITH_A_LENGTH, MORE_LAYER_TYPES, window_of
from torchtrain.attention.rule import visible_BTT

T = 8
BUILDERS = {
    name: function
    for name, function in inspect.getmembers(masking_utils, inspect.isfunction)
    if name.startswith("create_")
    and name != "create_masks_for_generate"
    and function.__module__ == masking_utils.__name__
}
# Mask functions and layer types that are refused, because `document_ids` cannot say what they say.
MASKS_REFUSED = {"or_masks", "bidirectional_mask_function", "blockwise_overlay", "sliding_window_bidirectional_overlay"}
# No masks of their own: they only compose others, or are applied to a padding mask, which is read as it is.
MASKS_NEVER_GIVEN = {
    "sliding_window_causal_mask_function",
    "sliding_window_bidirectional_mask_function",
    "chunked_causal_mask_function",
    "packed_sequence_compatibility_function",
    "padding_mask_function",
    "add_offsets_to_mask_function",
}
LAYER_TYPES_REFUSED = {
    *("window_attention", "indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
    *("minimax_m3_sparse", "hybrid_sliding", "reference_sliding_attention"),
}
# Arguments of a family's attention that change nothing under the rule, or that `anchor` honours or checks by name.
ARGUMENTS_KNOWN = {
    *("query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal", "sliding_window", "position_ids"),
    *("max_length_q", "max_length_k", "output_attentions", "deterministic", "s_aux", "softcap"),
}


def build(name: str, implementation: str, length: int, **changes):
    torchtrain.register()
    config = LlamaConfig(num_hidden_layers=1, sliding_window=length, attention_chunk_size=length, **changes)
    config._attn_implementation = implementation
    arguments = {"inputs_embeds": torch.zeros(1, T, 4), "attention_mask": None, "past_key_values": None}
    skips = [name for name in inspect.signature(BUILDERS[name]).parameters if name.startswith("allow_is_")]
    return BUILDERS[name](config, **arguments, position_ids=torch.arange(T)[None], **dict.fromkeys(skips, False))


def hides_nothing_but_the_future(mask: torch.Tensor | None) -> bool:
    return mask is None or torch.equal(mask[0, 0] == 0, torch.ones(T, T).tril().bool())


@pytest.mark.parametrize("length", [T - 1, T, T + 1])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_mask_is_dropped_only_if_transformers_own_hides_nothing(name, length):
    theirs, ours = (build(name, implementation, length) for implementation in ("eager", "anchor"))
    assert (ours is None) == hides_nothing_but_the_future(theirs)
    if ours is None:
        return
    if name == "create_sliding_window_causal_mask":
        assert torch.equal(theirs[0] == 0, visible_BTT(torch.ones(1, T, dtype=torch.long), window_of(ours)))
        return
    with pytest.raises(UserError, match=r"not honoured by `anchor`|does not honour"):
        window_of(ours)


@pytest.mark.parametrize("window", [1, 2, 4, 11])
def test_a_window_counts_the_tokens_of_a_document_as_transformers_does(window):
    """Of packed rows, which transformers knows by their positions; and of a document alone behind an anchor."""
    config = LlamaConfig(num_hidden_layers=1, sliding_window=window)
    config._attn_implementation = "eager"
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    for position_ids, ids in ((packed, [1] * 5 + [2] * 6), (torch.arange(11)[None], [0, 0] + [1] * 9)):
        embeds = torch.zeros(1, 11, 4)
        mask = masking_utils.create_sliding_window_causal_mask(config, embeds, None, None, position_ids=position_ids)
        theirs = torch.ones(11, 11).tril().bool() if mask is None else mask[0, 0] == 0
        assert torch.equal(theirs, visible_BTT(torch.tensor([ids]), window)[0])


def test_a_decoder_that_is_not_causal_and_a_block_that_sees_itself_are_refused():
    with pytest.raises(UserError, match="bidirectional"):
        window_of(build("create_causal_mask", "anchor", T, is_causal=False))
    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = "anchor"
    blocks = torch.zeros(1, T, dtype=torch.long)
    mask = masking_utils.create_causal_mask(config, torch.zeros(1, T, 4), None, None, block_sequence_ids=blocks)
    with pytest.raises(UserError, match=r"blockwise|or_masks"):
        window_of(mask)


def test_every_mask_function_of_transformers_is_in_one_of_the_lists():
    functions = inspect.getmembers(masking_utils, inspect.isfunction)
    theirs = {name for name, _ in functions if name.endswith(("_mask_function", "_overlay", "_masks"))}
    theirs |= {name for name, f in functions if "mask_function" in inspect.signature(f).parameters and "remap" in name}
    theirs -= {"create_masks_for_generate"}
    missing = theirs - MASKS_TOLD - set(MASKS_WITH_A_LENGTH) - MASKS_REFUSED - MASKS_NEVER_GIVEN
    assert not missing


def test_every_layer_type_of_transformers_is_in_one_of_the_lists():
    assert set(configuration_utils.ALLOWED_ATTN_LAYER_TYPES) <= LAYER_TYPES | MORE_LAYER_TYPES | LAYER_TYPES_REFUSED
    assert not (LAYER_TYPES | MORE_LAYER_TYPES) & LAYER_TYPES_REFUSED


def test_every_argument_that_a_family_gives_its_attention_is_in_one_of_the_lists():
    given: dict[str, str] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        start = source.find("= attention_interface(")
        while start >= 0:
            call = ast.parse(source[start + 2 : _end_of_call(source, start)], mode="eval").body
            given |= {keyword.arg: path.name for keyword in call.keywords if keyword.arg}
            start = source.find("= attention_interface(", start + 1)
    assert len(given) > 10, "the families give their attention no arguments: this test no longer reads them"
    unknown = {name: where for name, where in given.items() if name not in ARGUMENTS_KNOWN | set(ARGUMENTS_REFUSED)}
    assert not unknown


def _end_of_call(source: str, start: int) -> int:
    depth, end = 1, source.index("(", start) + 1
    while depth:
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        end += 1
    return end

"""What a tokenizer must be to ask a model: of the model, and without an end behind each prompt."""

from typing import TYPE_CHECKING

from anchorline.errors import UserError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PROBE = "The grass is green."


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast", source: str) -> None:
    """Refuse a tokenizer by which a model would be measured wrong.

    Args:
        tokenizer: of the model.
        source: what a message calls the model.

    Raises:
        UserError: it has no words, or puts a special token behind a prompt: the model would answer behind its end, and
            likelihoods of choices would be those of other tokens.
    """
    plain = tokenizer(_PROBE, add_special_tokens=False).input_ids
    if not plain:  # what transformers makes of no file
        raise UserError(f"{quoted(source)}: holds no tokenizer; put the model's own beside its weights")
    whole = list(tokenizer(_PROBE).input_ids)
    if whole[-1] != plain[-1]:
        last = tokenizer.convert_ids_to_tokens(whole[-1])
        raise UserError(
            f"{quoted(source)}: its tokenizer appends {last} to prompts; set add_eos_token to false in its "
            "tokenizer_config.json, or take it out of post_processor in tokenizer.json"
        )

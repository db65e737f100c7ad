"""What the packer asks of a tokenizer: the anchor, the tags, the padding, and whether it fits the model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anchorline.errors import UserError, quoted
from torchtrain.config import PackConfig
from torchtrain.data.encode import special_tokens_of
from torchtrain.data.store import Documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def anchor_ids(tokenizer: "PreTrainedTokenizerFast", pack: PackConfig) -> list[int]:
    """Return the A tokens that open every row: those of `pack.anchor`, or the BOS, or the EOS where there is no BOS.

    Raises:
        UserError: the tokenizer has neither BOS nor EOS, or an id of `pack.anchor` is none of its tokens.
    """
    if pack.anchor == "auto":
        if special := _special_ids(tokenizer, "bos", "eos"):
            return special[:1]
        raise UserError("pack.anchor 'auto': the tokenizer has neither BOS nor EOS; give a token id")
    ids = [pack.anchor] if isinstance(pack.anchor, int) else pack.anchor
    if not ids:
        raise UserError("pack.anchor []: the list is empty; give at least one token id, or auto")
    known = set(tokenizer.get_vocab().values())
    for token in ids:
        if token not in known:
            raise UserError(f"pack.anchor {token}: the tokenizer has no such token id (0..{max(known)})")
    return ids


def tag_ids(tokenizer: "PreTrainedTokenizerFast", pack: PackConfig, domains: Sequence[str]) -> dict[int, list[int]]:
    """Return the tokens that open each document of a domain (index in `domains`) under +tag; {} without.

    Raises:
        UserError: a tag has no tokens, or a domain is called like a special token: in the template one is meant, in a
            name not.
    """
    if not pack.tag:
        return {}
    tags = {}
    special = special_tokens_of(tokenizer)
    for index, domain in enumerate(domains):
        if found := [content for content in special if content in domain]:
            raise UserError(
                f"data.sources: the domain {quoted(domain)} holds the special token {quoted(found[0])}, which a tag "
                "cannot write; rename it (domain), or leave +tag out of pack.variant"
            )
        text = pack.tag_template.replace("{domain}", domain)
        tags[index] = tokenizer.encode(text, add_special_tokens=False)
        if not tags[index]:
            raise UserError(f"pack.tag_template {pack.tag_template!r}: the tag {text!r} has no tokens; change it")
    return tags


def pad_id(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the token that fills a row: the tokenizer's padding, or its EOS, or 0.

    Nothing sees it and no loss counts it.
    """
    return next(iter(_special_ids(tokenizer, "pad", "eos")), 0)


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast", vocab_size: int) -> None:
    """Refuse a tokenizer made for another model: one whose own tokens, BOS, EOS or padding the embedding does not hold.

    Tokens added beyond the base vocabulary may lie outside (Gemma 3 carries one for images); `check_store` catches them
    where the corpus uses them.

    Args:
        tokenizer: a fast tokenizer.
        vocab_size: V, rows of the model's embedding.

    Raises:
        UserError: a token id is V or more.
    """
    own = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).values()
    largest = max([*own, *_special_ids(tokenizer, "bos", "eos", "pad")], default=-1)
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer's token ids go to {largest} but the model's vocabulary has {vocab_size}: "
            "they do not belong together; use the model's own tokenizer"
        )


def check_store(store: Documents, vocab_size: int) -> None:
    """Refuse a corpus with a token that the model's embedding does not hold.

    Raises:
        UserError: a token id of the corpus is `vocab_size` or more.
    """
    if store.largest_token >= vocab_size:
        raise UserError(
            f"the corpus holds the token id {store.largest_token} but the model's vocabulary has {vocab_size}: "
            "tokenise it with the model's own tokenizer"
        )


def _special_ids(tokenizer: "PreTrainedTokenizerFast", *names: str) -> list[int]:
    """Return the ids of the special tokens that the tokenizer has, in the order asked for."""
    ids = [getattr(tokenizer, f"{name}_token_id") for name in names]
    return [token for token in ids if token is not None]

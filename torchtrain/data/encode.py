"""Turns texts into tokens. Text that looks special stays text, and a long text takes no more memory than a short one.

A tokenizer needs some 200 bytes for every character of a call. So a long document is cut, each piece is tokenised
alone, and their tokens are joined: only at ends of words where the text around has the same tokens whole and in two
parts.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from anchorline.errors import UserError, quoted, quoted_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Characters that the tokenizer takes at one time: enough for all its threads, and little memory.
BATCH_CHARACTERS = 1_000_000
PIECE = 1 << 16
_ENDS_OF_WORDS = re.compile(r"(?<=\w)(?=[^\w])")
_AROUND = (256, 247)  # characters before a cut that the tokenizer is asked about; and as many behind it
_MOST_ENDS = 64  # that are tried for one cut
MOST_WITHOUT_CUT = 1 << 24  # characters: 3 GB or so for the tokenizer


class Encoder:
    """Encodes texts by a fast tokenizer, and adds nothing before or after them.

    tokenizer: one with a `tokenizers` backend.
    special_tokens: how to read a special token written in a text: as `text` like any other, or as `control`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", special_tokens: Literal["text", "control"]) -> None:
        self._tokenizer, self._as_text = tokenizer, special_tokens == "text"
        self._plain = _is_plain(type(tokenizer))
        self._control = list_control_tokens(tokenizer)
        names = sorted(list_special_tokens(tokenizer), key=len, reverse=True)
        self._looks = re.compile("|".join(map(re.escape, names))) if names else None

    def looks_special(self, text: str) -> bool:
        """Whether a text holds what is written like a special token."""
        return self._looks is not None and self._looks.search(text) is not None

    def too_long(self, text: str) -> bool:
        """Whether a text holds a stretch without a place to cut it that is more than the tokenizer should be given."""
        return len(text) > MOST_WITHOUT_CUT and any(len(piece) > MOST_WITHOUT_CUT for piece, _ in self._pieces(text))

    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield each text's tokens, int32 [tokens]. Raises UserError: a special token that it cannot write as text."""
        parts: list[np.ndarray] = []
        for tokens, ends in self._encode_pieces(texts):
            parts.append(tokens)
            if ends:
                yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                parts = []

    def _encode_pieces(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, bool]]:
        batch: list[tuple[str, bool]] = []
        characters = 0
        for piece, ends in (pair for text in texts for pair in self._pieces(text)):
            if batch and characters + len(piece) >= BATCH_CHARACTERS:
                yield from self._encode_batch(batch)
                batch, characters = [], 0
            batch.append((piece, ends))
            characters += len(piece)
        yield from self._encode_batch(batch)

    def _encode_batch(self, batch: Sequence[tuple[str, bool]]) -> Iterator[tuple[np.ndarray, bool]]:
        if not batch:
            return
        for ids, (_, ends) in zip(self._ids_of([piece for piece, _ in batch]), batch, strict=True):
            tokens = np.asarray(ids, dtype=np.int32)
            yield (self._without_control(tokens) if self._as_text else tokens), ends

    def _ids_of(self, pieces: list[str]) -> Iterator[list[int]]:
        if not self._plain:
            # verbose=False: a document longer than the model's context is not a mistake here, so no warning about it.
            yield from self._tokenizer(
                pieces, add_special_tokens=False, split_special_tokens=self._as_text, verbose=False
            )["input_ids"]
            return
        # The same tokens as the call above, without their places in the text, which cost time.
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._as_text
        try:
            encodings = backend.encode_batch_fast(pieces, add_special_tokens=False)
        except Exception as error:  # tokenizers raises no other
            raise UserError(
                f"the tokenizer cannot encode a text: {quoted_reason(error)}; choose one that knows every text"
            ) from None
        for encoding in encodings:
            yield encoding.ids

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield a text's pieces, each `PIECE` characters and on to the next cut, and whether it is the last."""
        start = 0
        while len(text) - start > PIECE and (cut := self._find_cut(text, start + PIECE)):
            yield text[start : cut[0]], False
            start = cut[1]
        yield text[start:], True

    def _find_cut(self, text: str, after: int) -> tuple[int, int] | None:
        """Return where a piece may end and where the next begins: there, or behind a space that the tokenizer adds."""
        for end in islice(_ENDS_OF_WORDS.finditer(text, after), _MOST_ENDS):
            cut = end.start()
            for begin in (cut, cut + 1) if text[cut] == " " else (cut,):
                if all(
                    self._is_exact(text[max(0, cut - size) : cut], text[cut:begin], text[begin : cut + size])
                    for size in _AROUND
                ):
                    return cut, begin
        return None

    def _is_exact(self, left: str, between: str, right: str) -> bool:
        whole, first, second = self._ids_of([left + between + right, left, right])
        return [*first, *second] == [*whole]

    def _without_control(self, tokens: np.ndarray) -> np.ndarray:
        """Spell out control tokens that the model makes of a text, where its vocabulary holds them like words."""
        control = set(self._control.values())
        if not np.isin(tokens, list(control)).any():
            return tokens
        parts = (self._spell(token) if token in control else [token] for token in tokens.tolist())
        return np.array([token for part in parts for token in part], dtype=np.int32)

    def _spell(self, token: int) -> list[int]:
        """Return the tokens of a special token's text: its first character alone, or each character alone."""
        model, control = self._tokenizer.backend_tokenizer.model, set(self._control.values())
        content = next(content for content, index in self._control.items() if index == token)
        for parts in ([content[:1], content[1:]], list(content)):
            try:
                ids = [piece.id for part in parts if part for piece in model.tokenize(part)]
            except Exception:  # tokenizers raises no other, of a part that it does not know
                continue
            if ids and not control & set(ids):
                return ids
        raise UserError(
            f"data.special_tokens 'text': a document holds {quoted(content)}, which this tokenizer can only write as "
            f"the control token {token}; remove it from the data, or set data.special_tokens to control"
        )


def _is_plain(kind: type) -> bool:
    """Whether a class leaves encoding to transformers, which leaves it to `tokenizers`."""
    from transformers import PreTrainedTokenizerFast

    return all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus"))


def special_id(tokenizer: "PreTrainedTokenizerFast", name: Literal["bos", "eos", "pad"]) -> int | None:
    """Return the id of a tokenizer's BOS, EOS or padding; None where it names none. Raises UserError: its vocabulary
    lacks what it names: transformers gives the unknown token's id for it, or None.
    """
    content = getattr(tokenizer, f"{name}_token")
    index = None if content is None else tokenizer.backend_tokenizer.token_to_id(content)
    if content is not None and index is None:
        raise UserError(
            f"the tokenizer's {name.upper()} {quoted(content)} is not in its vocabulary; name a token that is "
            f"({name}_token), or add it to the tokenizer and to the model's embedding"
        )
    return index


def list_special_tokens(tokenizer: "PreTrainedTokenizerFast") -> dict[str, int]:
    """Return the tokens that are not text, content -> id: those added as special, and BOS, EOS, padding and so on."""
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {content: index for content, index in special.items() if content and index is not None}


def list_control_tokens(tokenizer: "PreTrainedTokenizerFast") -> dict[str, int]:
    """Return the special tokens that steer: all but the unknown token, since text may be unknown."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    unknown = model.get("unk_id")
    if model.get("unk_token") is not None:
        unknown = tokenizer.backend_tokenizer.token_to_id(model["unk_token"])
    return {content: index for content, index in list_special_tokens(tokenizer).items() if index != unknown}

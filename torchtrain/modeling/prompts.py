"""The anchor in front of every prompt of a model that was trained under one: who puts it there, and who says so."""

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from anchorline.errors import UserError, disk_fault
from anchorline.files import read_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MOST_BYTES = 1 << 24
_NOTED = re.compile(r'^anchorline: (\{"anchor": \[[0-9, ]+\], "added_to_tokenizer": (?:true|false)\})$', re.MULTILINE)
_CONVERSATION = [{"role": "user", "content": "a"}]


class NotedAnchor(NamedTuple):
    """The anchor of a model card, whether the tokenizer beside it was made to add it, and what still lacks it."""

    ids: list[int]
    added: bool
    lacks: Sequence[str] = ()

    def __str__(self) -> str:
        """The line of the card."""
        return f"anchorline: {json.dumps({'anchor': self.ids, 'added_to_tokenizer': self.added})}"


def read_noted_anchor(folder: str | Path) -> NotedAnchor | None:
    """Return what the model card of an exported folder notes; None: nothing. Raises UserError: it cannot be read."""
    try:
        card = read_file(Path(folder) / "README.md", _MOST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"the model card: {disk_fault(error)}; mend that, or remove it") from None
    noted = _NOTED.search(card)
    return None if noted is None else NotedAnchor(*json.loads(noted[1]).values())


def name_anchor(tokenizer: "PreTrainedTokenizerFast", anchor: Sequence[int]) -> str:
    """Return the tokens of an anchor for a message."""
    return " ".join(f"`{token}`" for token in tokenizer.convert_ids_to_tokens(list(anchor)))


def lacking_anchor(tokenizer: "PreTrainedTokenizerFast", anchor: Sequence[int]) -> list[str]:
    """Return what a tokenizer does not begin with the anchor by itself: texts, conversations."""
    begins = {"texts": tokenizer("a")["input_ids"]}
    if tokenizer.chat_template:
        try:
            text = str(tokenizer.apply_chat_template(_CONVERSATION, tokenize=False, add_generation_prompt=True))
        except Exception:  # a template may refuse any messages, by any error
            text = ""
        begins["conversations"] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [name for name, ids in begins.items() if ids[: len(anchor)] != list(anchor)]


def put_anchor(
    tokenizer: "PreTrainedTokenizerFast", anchor: Sequence[int]
) -> tuple["PreTrainedTokenizerFast", NotedAnchor]:
    """Return a copy of a tokenizer that begins every text and conversation with the anchor, and what to note of it.

    transformers writes one BOS in front of a text, so an anchor of several tokens, or of another token than a BOS that
    there is, stays out; so it does where the tokenizer adds special tokens of its own.
    """
    made = copy.deepcopy(tokenizer)
    lacks, first = lacking_anchor(made, anchor), str(made.convert_ids_to_tokens(anchor[0]))
    plain = made("a")["input_ids"] == made("a", add_special_tokens=False)["input_ids"]
    adds = "texts" in lacks and len(anchor) == 1 and made.bos_token in (None, first) and plain
    if adds:
        made.bos_token = first
        made.add_bos_token = True
    if "conversations" in lacks and isinstance(made.chat_template, str):
        made.chat_template = _written(made, anchor) + made.chat_template
        if "conversations" in lacking_anchor(made, anchor):  # it refuses a conversation, and may write a BOS itself
            made.chat_template = tokenizer.chat_template
    return made, NotedAnchor(list(anchor), adds, lacking_anchor(made, anchor))


def take_anchor(tokenizer: "PreTrainedTokenizerFast", noted: NotedAnchor) -> None:
    """Undo `put_anchor`, so that texts have the tokens that they have for the model before its training."""
    if noted.added:
        tokenizer.add_bos_token = False
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix(_written(tokenizer, noted.ids))


def _written(tokenizer: "PreTrainedTokenizerFast", anchor: Sequence[int]) -> str:
    text = "".join(map(str, tokenizer.convert_ids_to_tokens(list(anchor))))
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}"

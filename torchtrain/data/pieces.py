"""Cut a long document where its tokens do not change: pieces are tokenised alone, their tokens joined.

A tokenizer needs some 200 bytes for every character that it holds at one time, so a long document cannot be given to it
whole. A cut is exact where no step of the tokenizer looks across it: no added token of the vocabulary lies there, the
normalizer works character by character, and either the pre-tokenizer always ends a word there, or, where there is none,
no token holds the two characters side by side, so no merge joins them. What is not known to be so is not cut.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 1 << 16
MOST_WITHOUT_CUT = 1 << 24  # characters: 3 GB or so for the tokenizer

# Of a Latin or Chinese letter and what follows it: no word of the patterns below goes on from one to the other.
_LETTER_THEN_SPACE = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_LETTER_THEN_SPACE_OR_STOP = re.compile("(?<=[A-Za-z\u4e00-\u9fff])(?=[ \n\u3001\u3002\uff0c])")

# How byte-level tokenizers find words, each as its makers wrote it. In all of them a run of letters (and a contraction
# after it) ends a word, nothing looks behind, and what looks ahead looks at white space only.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS = (r"\s*[\r\n]+|\s+(?!\S)|\s+", r"\s*[\r\n]|\s+(?!\S)|\s+")
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORDS = {
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",  # GPT-2
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    *(  # GPT-4, Llama 3, Qwen 2 and what is like them
        rf"{contraction}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_MARKS}|{end}"
        for contraction in (_CONTRACTION, "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")
        for digits in (r"\p{N}", r"\p{N}{1,3}")
        for end in _ENDS
    ),
    # Qwen 3.5
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDS[0]}",
    *(  # GPT-4o, Llama 4, Mistral's tekken
        rf"{_UPPER}*{_LOWER}+{contraction}|{_UPPER}+{_LOWER}*{contraction}|{digits}|{marks}|{_ENDS[0]}"
        for contraction in ("", _CONTRACTION + "?")
        for digits in (r"\p{N}", r"\p{N}{1,3}")
        for marks in (_MARKS, _MARKS_OR_SLASH)
    ),
}
# Split off what is not a letter, so a cut behind a letter and before no digit is none of their business.
_DIGITS = {r"\p{N}", r"\p{N}{1,3}", r"\d", r"\d{1,3}", "[0-9]"}


class Cuts(NamedTuple):
    """Where a document may be cut: `pattern` matches there, and a piece loses its first character if `drops_space`."""

    pattern: re.Pattern[str]
    drops_space: bool = False  # the normalizer puts one back in front of every piece

    def pieces(self, text: str, size: int = PIECE) -> Iterator[str]:
        """Yield the pieces of a text, each of `size` characters or, up to the next cut, more."""
        assert size > 0
        start = 0
        while cut := self.pattern.search(text, start + size):
            yield text[start : cut.start()]
            start = cut.start() + self.drops_space
        yield text[start:]


def cuts_of(tokenizer: "Tokenizer") -> Cuts | None:
    """Return where a tokenizer's documents may be cut; None where it is not known."""
    backend = json.loads(tokenizer.to_str())
    cuts = _cuts_of_words(backend) or _cuts_of_merges(backend)
    if cuts is None or backend["model"].get("dropout"):
        return None
    for token in backend["added_tokens"]:
        content = token["content"]
        # One that lies across a cut, takes in what follows it, or begins a piece where something would be put in front
        # of it.
        begins = content[:1].isalnum() or (cuts.drops_space and content[:1] in (" ", "\u2581"))
        if cuts.pattern.search(content) or begins or (token["rstrip"] and content[-1:].isalnum()):
            return None
    return cuts


def _cuts_of_words(backend: Mapping[str, Any]) -> Cuts | None:
    """Cuts for a tokenizer whose pre-tokenizer finds words."""
    if not all(_works_by_character(step) for step in _steps(backend["normalizer"], "normalizers")):
        return None
    kinds = [_kind(step) for step in _steps(backend["pre_tokenizer"], "pretokenizers")]
    if None in kinds:
        return None
    if "spaces" in kinds:
        return Cuts(_LETTER_THEN_SPACE)
    return Cuts(_LETTER_THEN_SPACE_OR_STOP) if "words" in kinds else None


def _kind(step: Mapping[str, Any]) -> str | None:
    """Return what a step of a pre-tokenizer does at a cut: ends a word at `spaces`, or at all cuts (`words`);
    `nothing`; None: it is not known.
    """
    kind, pattern = step["type"], step.get("pattern", {})
    if kind == "ByteLevel":
        # One that puts a space in front of what has none would do so to a piece that begins with a full stop.
        return (
            ("spaces" if step["add_prefix_space"] else "words")
            if step.get("use_regex", True)
            else _if_not_prefixing(step)
        )
    if kind == "Metaspace":
        return "spaces" if step.get("split", True) else None
    if kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer"):
        return "spaces"
    if kind in ("Digits", "Punctuation"):
        return "nothing" if step.get("behavior", "Isolated") == "Isolated" else None
    if kind == "Split" and step["behavior"] in ("Isolated", "Removed"):
        if step["behavior"] == "Isolated" and pattern.get("Regex") in _DIGITS and not step["invert"]:
            return "nothing"
        whole = step["behavior"] == "Isolated" or step["invert"]
        return "words" if whole and pattern.get("Regex") in _WORDS else None
    return None


def _if_not_prefixing(step: Mapping[str, Any]) -> str | None:
    return None if step["add_prefix_space"] else "nothing"


def _cuts_of_merges(backend: Mapping[str, Any]) -> Cuts | None:
    """Cuts for a BPE over whole documents, as sentencepiece has it: before spaces that no token joins to a letter."""
    normalizer = _steps(backend["normalizer"], "normalizers")
    prefixes = [step["prepend"] for step in normalizer if step["type"] == "Prepend"]
    others = [step for step in normalizer if step["type"] != "Prepend"]
    marks = [step["content"] for step in others if _writes_spaces(step)]
    for step in _steps(backend["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Metaspace" and not step.get("split", True):
            # It puts a space in front of a text, but not in front of a piece that begins with one.
            marks.append(step["replacement"])
        elif not (
            step["type"] == "Split" and step["pattern"] == {"String": " "} and marks
        ):  # else: none is left (Gemma)
            return None
    mark, model = marks[0] if marks else " ", backend["model"]
    if model["type"] != "BPE" or len(mark) != 1 or mark not in model["vocab"] or set(marks) - {mark}:
        return None
    if prefixes not in ([], [mark]) or not all(map(_works_by_character, others)):
        return None
    joined = {token[i - 1] for token in model["vocab"] for i in range(1, len(token)) if token[i] == mark}
    if any(letter.isascii() and letter.isalpha() for letter in joined):
        return None
    return Cuts(_LETTER_THEN_SPACE, drops_space=bool(prefixes))


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [one for part in step[inner] for one in _steps(part, inner)] if step["type"] == "Sequence" else [step]


def _works_by_character(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer does the same to a text and to its pieces.

    Letters and single spaces combine with nothing before.
    """
    if step["type"] == "Replace":
        pattern = step["pattern"]
        return _writes_spaces(step) or pattern.get("Regex") in (" {2,}", r"\s{2,}")
    return step["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "Precompiled")


def _writes_spaces(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Replace" and step["pattern"] == {"String": " "}

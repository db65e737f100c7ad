"""How documents become rows, and the mask variants."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.section import MOST_TOKENS, Name, Section

EXTRAS = ("tag", "interleave")


@dataclass(frozen=True)
class Variant:
    """A mask variant: what it puts into `document_ids` and `position_ids`.

    Attributes:
        meaning: in words, for people.
        separates: documents have the ids 1..n; otherwise every token has the id 1.
        has_anchor: the first tokens of a row have the id 0; otherwise they belong to document 1.
        restarts: positions restart at 0 in every document; otherwise they run through the row.
    """

    meaning: str
    separates: bool = True
    has_anchor: bool = False
    restarts: bool = False


BASE_VARIANTS = {
    "full": Variant("every token sees all tokens before it, across documents", separates=False),
    "intra": Variant("a token sees its own document; positions run through the row"),
    "intra_reset": Variant("a token sees its own document; positions restart in each document", restarts=True),
    "anchor": Variant("a token sees its own document and the anchor; positions run through the row", has_anchor=True),
}


class PackConfig(Section):
    """How documents become rows of `sequence_length` tokens: the mask variant and the five arrays."""

    sequence_length: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = Field(
        description="tokens of a row: the new context length"
    )
    variant: Name = Field(
        default="anchor", description="full | intra | intra_reset | anchor, each with +tag and/or +interleave"
    )
    anchor: Literal["auto"] | int | list[int] = Field(
        default="auto",
        description="token id(s) at the start of every row; auto: the tokenizer's BOS, else its EOS; []: "
        "none, where the variant has no anchor",
    )
    tag_template: Name = Field(default="Source: {domain}\n", description="text before each document with +tag")
    chunks: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = Field(
        default=4, description="pieces of a document with +interleave"
    )
    split: Literal["even", "random", "authors"] = Field(
        default="even",
        description="where +interleave cuts a document: into nearly equal pieces, or at random points; "
        "authors: as their code, which cuts only documents of 64 to 2,048 tokens, into 2 or 3 "
        "pieces",
    )
    cross_document_targets: bool = Field(
        default=False, description="train a document's last token to predict the next document's first (the authors')"
    )
    last: Literal["pad", "drop"] = Field(default="pad", description="the last, unfilled row is padded or dropped")
    longer: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="in a corpus with answers, what to do with a document that is longer than a row: end "
        "with an error, or leave it out",
    )
    strategy: Literal["sequential", "best_fit", "by_length"] = Field(
        default="sequential",
        description="how rows are filled. sequential (the paper's): documents end to end. best_fit: only "
        "documents longer than a row are cut. by_length: end to end, sorted by length, so that "
        "the rows of a step are alike",
    )

    @model_validator(mode="after")
    def _variant_is_known(self) -> Self:
        base, *extras = self.variant.split("+")
        if base not in BASE_VARIANTS:
            raise ValueError(f"variant {self.variant!r}: {base!r} is none of {', '.join(BASE_VARIANTS)}")
        if len(set(extras)) != len(extras) or not set(extras) <= set(EXTRAS):
            raise ValueError(f"variant {self.variant!r}: add only +tag and +interleave to {base!r}, each once")
        if "tag" in extras and "{domain}" not in self.tag_template:
            raise ValueError("tag_template must contain {domain}")
        return self

    @model_validator(mode="after")
    def _pieces_are_counted_once(self) -> Self:
        if self.split == "authors" and self.chunks != type(self).model_fields["chunks"].default:
            raise ValueError("split authors makes 2 or 3 pieces and does not take chunks; remove one")
        return self

    @model_validator(mode="after")
    def _some_row_is_the_last(self) -> Self:
        if self.strategy == "best_fit" and self.last == "drop":
            raise ValueError("strategy best_fit leaves room in many rows, not only in the last; set last to pad")
        return self

    @property
    def cuts_answers(self) -> str | None:
        """Which setting does not go with documents that have answers, why, and what to set; None: none."""
        if self.strategy != "best_fit":
            return f"strategy {self.strategy}: cuts documents, and answers need their questions; set it to best_fit"
        if self.interleave:
            return f"variant {self.variant}: cuts documents, and answers need their questions; leave +interleave out"
        if self.cross_document_targets:
            return "cross_document_targets: trains tokens that are no answers; set it to false"
        return None

    @property
    def base_variant(self) -> Variant:
        """The variant without its extras."""
        return BASE_VARIANTS[self.variant.split("+")[0]]

    @property
    def tag(self) -> bool:
        """Whether a tag precedes each document."""
        return "tag" in self.variant.split("+")

    @property
    def interleave(self) -> bool:
        """Whether documents are split into chunks with interleaved positions."""
        return "interleave" in self.variant.split("+")

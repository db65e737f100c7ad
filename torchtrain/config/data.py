"""The documents: sources, selection and tokens."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.section import Count, Name, PathText, PositiveShare, Section, Share


class FilterConfig(Section):
    """A block of datatrove between reader and tokenizer: it drops documents or changes their text."""

    name: Name = Field(
        description="class of datatrove.pipeline.filters or .formatters, SampleShort, or package.module.Class"
    )
    options: dict[Name, Any] = Field(default={}, description="arguments of the class")


class Source(Section):
    """One source of documents: exactly one of `demo`, `files`, `texts`, `dataset`."""

    demo: Literal["speeches", "encyclopedia", "code"] | None = Field(
        default=None, description="a small real corpus carried by installed packages"
    )
    files: PathText | None = Field(
        default=None,
        description="glob of .jsonl (also .gz or .zst) or .parquet files, or an fsspec URL such as "
        "s3://bucket/*.jsonl.zst",
    )
    texts: PathText | None = Field(
        default=None, description="glob or URL of text files, each one document with the fields text, path, folder"
    )
    dataset: Name | None = Field(default=None, description="folder of a Hugging Face dataset, or its hub id")
    subset: Name | None = Field(default=None, description="configuration name of the dataset")
    split: Name = Field(default="train", description="split of the dataset")
    revision: Name | None = Field(default=None, description="commit or branch of the dataset; a commit pins its text")
    streaming: bool = Field(default=False, description="read the dataset without downloading it first")
    text_field: Name = Field(default="text", description="field of each record that holds its text")
    records: Literal["text", "messages", "completion", "tokens", "weights"] = Field(
        default="text",
        description="what a record holds. text: a text, in which every token is a target. messages: a "
        "conversation, in which the assistant's words are targets. completion: prompt and "
        "completion. tokens: input_ids with labels, completion_mask or assistant_masks. "
        "weights: input_ids with weights, what the loss of each token counts; 0 is no target",
    )
    domain: Name | None = Field(default=None, description="one domain for the whole source; default: its own name")
    domain_field: Name | None = Field(
        default=None, description="field of each record that names its domain, such as `meta.name`"
    )
    rename: dict[Name, Name] | None = Field(
        default=None, description="other names of domains: {name in the records: name to use}"
    )
    max_documents: Count | None = Field(default=None, description="read only this many documents from the start")
    sample_files: PositiveShare | None = Field(
        default=None, description="share of the files or shards to read, drawn by sample_seed"
    )
    sample: PositiveShare | None = Field(default=None, description="share of the records to keep, drawn by sample_seed")
    sample_seed: int = Field(default=0, ge=0, lt=2**32, description="seed of sample_files and sample")

    filters: list[FilterConfig] = Field(default=[], max_length=100, description="blocks that drop or change documents")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [name for name in ("demo", "files", "texts", "dataset") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a source is exactly one of demo, files, texts, dataset; this one names {kinds or 'none'}"
            )
        if self.domain is not None and self.domain_field is not None:
            raise ValueError("domain and domain_field exclude each other; remove one")
        if self.dataset is None and (self.streaming or self.subset or self.revision or self.split != "train"):
            raise ValueError("streaming, subset, split and revision belong to a `dataset` source; remove them")
        if self.records != "text":
            if self.demo is not None or self.texts is not None:
                raise ValueError(f"records {self.records} belongs to files or dataset; demo and texts hold texts")
            if self.filters or self.text_field != "text":
                raise ValueError(
                    f"filters and text_field belong to records: text; remove them, or records: {self.records}"
                )
        return self


class MixtureConfig(Section):
    """The choice of documents to train on, and how often: shares of domains, and of long documents in each domain.

    Source: per-source length up-sampling, arXiv 2402.10171, section 3.
    """

    tokens: Annotated[int, Field(ge=1, lt=2**62)] | None = Field(
        default=None, description="number of tokens to choose; default: as many as the corpus holds"
    )
    shares: dict[Name, PositiveShare] | None = Field(
        default=None, description="token share of each domain; default: the corpus's own shares"
    )
    long_tokens: Count = Field(default=4096, description="least tokens of a long document")
    long_share: Share | None = Field(default=None, description="least share of long documents in each domain's tokens")
    long_weight: Annotated[float, Field(ge=1, le=1e6)] | None = Field(
        default=None, description="how many times as often a long document is chosen as a short one"
    )
    most_repeats: Annotated[int, Field(ge=1, lt=2**16)] = Field(
        default=4, description="how often one document may be chosen"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the choice")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.long_share is not None and self.long_weight is not None:
            raise ValueError("long_share and long_weight exclude each other; remove one")
        return self


class DataConfig(Section):
    """The documents, and how they become tokens."""

    sources: list[Source] = Field(default=[], max_length=10_000, description="sources of the documents")
    prepared: PathText | None = Field(
        default=None, description="a store from `torchtrain prepare`; `sources`, if given, must be the store's"
    )
    cache: PathText = Field(default="cache", description="folder for the tokenised corpus and converted models")
    append_eos: bool = Field(default=True, description="end each document with the tokenizer's EOS")
    special_tokens: Literal["text", "control"] = Field(
        default="text", description="how a special token such as </s> in a text is read"
    )
    chat_template: PathText | None = Field(
        default=None, description="file of a chat template in Jinja; default: the tokenizer's own"
    )
    min_tokens: Count = Field(default=1, description="shorter documents are dropped and reported")
    bad_record_share: Share = Field(
        default=0.001, description="largest share of bad records; a source with more is refused"
    )
    held_out_share: Share = Field(
        default=0.05, description="share of each domain's documents that are held out; 0: none, and nothing is measured"
    )
    remove_duplicates: bool = Field(
        default=False,
        description="drop a document with the text of an earlier one; false: keep both on one held-out side",
    )
    mixture: MixtureConfig | None = Field(
        default=None, description="the choice of documents to train on, and how often"
    )

    @property
    def has_answers(self) -> bool:
        """Whether some documents have targets of their own: then no document is cut."""
        return any(source.records != "text" for source in self.sources)

    @property
    def has_weights(self) -> bool:
        """Whether some documents have weights of their own."""
        return any(source.records == "weights" for source in self.sources)

    @model_validator(mode="after")
    def _has_documents(self) -> Self:
        if not self.sources and self.prepared is None:
            raise ValueError("there is nothing to read; give sources, or prepared (a store from `torchtrain prepare`)")
        if not self.sources:
            for name in ("append_eos", "special_tokens", "min_tokens", "remove_duplicates", "mixture"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} was decided when the store of prepared was made; remove it, or give its sources"
                    )
        return self

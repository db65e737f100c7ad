"""A case, resolved once: the rows of tokens, the model's config and weights, the settings of its steps.

Both sides get the same case. It has no mask, no positions and no RoPE frequencies: each side computes its own.

Legend: T tokens of a row.
"""

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Glm4MoeConfig, GraniteConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from anchorline.errors import UserError
from anchorline.files import read_json
from jaxref.decoder_config import ARCHITECTURES, DecoderConfig
from jaxref.loss import IGNORED
from jaxref.mask import PADDING
from jaxref.rope_spec import RopeSpec
from jaxref.storage.weights import parameter_shapes
from parity_tests.gate.spec import RUN_STEPS, STEPS, CaseSpec
from torchtrain.config import LossWeightConfig, TrainConfig
from torchtrain.modeling.source import open_config, open_tokenizer, resolve_source

FAMILIES: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
# Families that are a Llama but for what the oracle's config says of them: `ADDED`, or a part of the head that rotates.
ALIKE: dict[str, Any] = {"granite": GraniteConfig, "glm4_moe": Glm4MoeConfig}
SCALE, DIVISOR, CAP = 0.2, 3.0, 1.5  # of attention's logits, and of the head's
_WINDOW = {"sliding_window": 6}  # shorter than a document, and than the anchor and a document
_EVERY_OTHER = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# A family of which one thing is another: its head is the embedding; heads of 128; 50,000 words; it is written to a
# folder and loaded as a run does; every other layer has a window; or every layer, with a soft cap (as in Gemma 2) or
# sinks (as in gpt-oss). The gradient of sinks is one number a head, hence 64 heads. A scale that is not 64 ** -0.5 and
# logits that are divided; 22 dimensions of 64 that rotate (0.355 of 64, cut). `capped` has a head with a bias, too, and
# a soft cap of the logits.
VARIED: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "wide_heads": ("llama", {"head_dim": 128}),
    "many_words": ("llama", {"vocab_size": 50_000, "num_hidden_layers": 1}),
    "loaded": ("llama", {}),
    "windows": ("qwen2", _WINDOW | _EVERY_OTHER),
    "capped": ("mistral", _WINDOW | {"num_hidden_layers": 2}),
    "sinks": (
        "mistral",
        _WINDOW | {"num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 32, "head_dim": 4},
    ),
    "scaled": ("granite", {"num_hidden_layers": 2, "attention_multiplier": SCALE, "logits_scaling": DIVISOR}),
    "partial": (
        "glm4_moe",
        {"num_hidden_layers": 2, "first_k_dense_replace": 2, "num_mtp_layers": 0, "partial_rotary_factor": 0.355},
    ),
}
# What no config.json of these families says: both sides add it to the model.
ADDED: dict[str, dict[str, Any]] = {
    "capped": {"softcap": 2.0, "logits_softcap": CAP, "head_bias": True},
    "sinks": {"sinks": True},
    "scaled": {"scale": SCALE, "logits_divisor": DIVISOR},
}
TINY = (*FAMILIES, *VARIED)
CACHE = Path("cache")  # where smollm2 is converted to; the trainer's default too

TAG_TOKENS, CHUNKS = 2, 4
FALL = 3  # last steps, in which wsd falls
HOLES = 7  # tokens of padding inside a row
RUN_ROWS = 2  # of each step of a whole run
LONG = 1024
WEIGHTS = LossWeightConfig(tail=5, extra=2.0, most=3.0)  # of rows of 53 tokens: three buckets, one at the limit
WORDS = 16  # different tokens that a text must have

# Every array of a tiny model, down to the gradient of a norm, has 64 elements or more: the root mean squares of fewer
# vary by more than twice from one correct implementation to the next.
SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}

# A tiny model's own length, from which RoPE is stretched; both sides derive the rest from the same settings.
ORIGINAL, FACTOR = 1024, 8.0
BEFORE = 4  # the factor of an earlier extension
SHORT = 32  # where a whole run stretches it: less than a row

# Epsilon is of the size of the gradients. Where it is far below them, the first steps are the sign of each gradient,
# whatever its clipping, and an element near zero turns by rounding alone: nothing could be said of either.
TRAIN = TrainConfig(
    steps=STEPS,
    learning_rate=2e-4,
    min_learning_rate_share=0.1,
    weight_decay=0.1,
    clip_norm=0.5,
    epsilon=1e-3,
    loss_chunk=7,
)


@dataclass(frozen=True)
class RowTokens:
    """Tokens of one packed row, before any variant: each document is opened by its tag, padding fills the rest."""

    anchor: np.ndarray  # int64 [anchor_tokens]
    documents: tuple[np.ndarray, ...]  # int64 [length of each]
    tags: tuple[np.ndarray, ...]  # int64 [TAG_TOKENS], or empty
    padding: int
    seed: int | np.random.SeedSequence  # of the merge order
    domains: tuple[int, ...]  # of each document
    targets: tuple[np.ndarray, ...] = ()  # bool [length of each]: what may be predicted; none: everything
    holes: tuple[int, ...] = ()  # indices of the tokens that get a token of padding in front of them

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document, without its tag."""
        return tuple(len(document) for document in self.documents)


@dataclass(frozen=True)
class GateCase:
    """What both sides of a case are given.

    folder, oracle_folder: of the candidate's and the oracle's weights; None where they are drawn (`tiny_weights`).
    unknown_family: the model type, where the oracle has no decoder of it; None where it has one.
    rows: none where the oracle has no decoder (`own_eager_sides` draws them).
    decoder_config: the oracle's own reading of the model and the RoPE type; never read where it has no decoder.
    step, trajectory, run: settings of the case's single step, of its twenty, and of its whole run.
    """

    spec: CaseSpec
    rows: tuple[RowTokens, ...]
    folder: str | None
    oracle_folder: str | None
    unknown_family: str | None
    decoder_config: DecoderConfig
    step: TrainConfig
    trajectory: TrainConfig
    run: TrainConfig


def resolve(spec: CaseSpec) -> GateCase:
    """Look up the models and draw the tokens. Raises UserError: a model does not exist, or cannot be set so."""
    folder = None if spec.model in TINY else find_folder(spec.model)
    oracle_model = spec.against or spec.model
    oracle_folder = None if oracle_model in TINY else find_folder(oracle_model)
    family = _unknown_family(oracle_folder) if spec.against is None else None
    if family is not None:  # transformers' own attention is the oracle there, and nothing is trained
        return GateCase(spec, (), folder, folder, family, None, TRAIN, TRAIN, TRAIN)  # type: ignore[arg-type]
    if (spec.is_run or spec.rope_before != "default") and (folder, oracle_folder) != (None, None):
        field = "stages" if spec.is_run else "rope_before"
        raise UserError(f"{field}: {spec.model} is not a tiny model; a whole run, or RoPE before, takes one")
    if (folder is None) != (oracle_folder is None):
        raise UserError(
            f"against {spec.against}: either it or {spec.model} is a tiny model; give two tiny models or none"
        )
    if spec.is_run and spec.model in ADDED:
        raise UserError(f"stages run: what {spec.model} adds to a model is not exported")
    rows = draw_rows(spec, oracle_folder)
    # Every rank takes its rows as often as there are ranks, times `repeats`. That is the same sum over the same count,
    # each divided by a power of two where the ranks are one; and a rank has more than one micro-batch.
    changes: dict[str, Any] = {"schedule": spec.schedule, "warmup_steps": spec.warmup_steps}
    changes |= {"decay_steps": FALL, "decay": "sqrt"} if spec.schedule == "wsd" else {}
    changes |= {"loss_weight": WEIGHTS} if spec.weights else {}
    step = TRAIN.model_copy(update=changes | {"sequences_per_step": len(rows) * spec.ranks * spec.repeats})
    # torch's decay rounds each weight once more than the oracle's: judged in one step, left out of twenty: it adds up.
    trajectory = step.model_copy(update={"weight_decay": 0.0})
    bad = int(bool(spec.infinite_step))
    rows_of_run = {"steps": RUN_STEPS, "sequences_per_step": RUN_ROWS, "micro_batch": RUN_ROWS}
    # Betas under which the second moment falls within a few steps.
    changes = {"skip_bad_steps": bad, "clip_norm": None, "betas": (0.8, 0.5)}
    run = trajectory.model_copy(update=rows_of_run | changes)
    return GateCase(spec, rows, folder, oracle_folder, None, _read_config(spec, oracle_folder), step, trajectory, run)


def _unknown_family(folder: str | None) -> str | None:
    """Return the model type of a folder's model, if the oracle has no decoder of it."""
    family = None if folder is None else read_json(Path(folder) / "config.json", "model").get("model_type")
    return None if folder is None or family in ARCHITECTURES else str(family)


def draw_rows(spec: CaseSpec, folder: str | None) -> tuple[RowTokens, ...]:
    """Two rows: documents, one of a single token; and these lengths but one, with padding for the last.

    The second alone where a row is long: every tap of both would fill memory.
    """
    random = np.random.default_rng((spec.seed, 1))
    tag = TAG_TOKENS if "+tag" in spec.variant else 0
    more = max(0, spec.tokens - 128) // 16  # so that a block of 128 keys has enough of them to show
    holes = HOLES + more if spec.padding == "inside" else 0
    text = spec.tokens - spec.anchor_tokens - spec.documents * tag - holes
    if spec.documents == 5:
        lengths = (text * 2 // 5, 1, text // 4, text // 8)
    else:
        lengths = (1, *(text // spec.documents + number % 3 - 1 for number in range(spec.documents - 2)))
    lengths = (*lengths, text - sum(lengths))
    stream = iter(_draw_tokens(spec, folder, random).tolist())

    def take(count: int) -> np.ndarray:
        return np.array([next(stream) for _ in range(count)], dtype=np.int64)

    def row(own: tuple[int, ...], number: int) -> RowTokens:
        padding = spec.tokens - spec.anchor_tokens - sum(own) - tag * len(own) - holes
        documents, tags = tuple(take(n) for n in own), tuple(take(tag) for _ in own)
        seed, domains = 2 * spec.seed + number, (0,) * len(own)
        targets = tuple(draw_targets(random, n) for n in own) if spec.answers else ()
        row = RowTokens(take(spec.anchor_tokens), documents, tags, padding, seed, domains, targets)
        return replace(row, holes=_choose_holes(row, number, more)) if holes else row

    # In another order, so that no boundary and no position is where the first row has it.
    order = (2, 1, 3, 0) if spec.documents == 5 else range(spec.documents - 2, -1, -1)
    padded = row(tuple(lengths[i] for i in order), 1)
    return (padded,) if spec.tokens > LONG else (row(lengths, 0), padded)


def draw_targets(random: np.random.Generator, tokens: int) -> np.ndarray:
    """Draw which tokens of a document are targets, bool [tokens]: about half, and the last."""
    return np.append(random.random(tokens - 1) < 0.5, True)


def _choose_holes(row: RowTokens, number: int, more: int) -> tuple[int, ...]:
    """Within the first document, which they interrupt twice, and between the second and the third."""
    first, second = (len(tag) + len(tokens) for tag, tokens in zip(row.tags[:2], row.documents, strict=False))
    start = len(row.anchor)
    middle = [start + first // 2] * (1 + more)
    return (*[start + first // 3] * (2 + number), *middle, *[start + first + second] * (HOLES - 3 - number))


def insert_padding(row: Mapping[str, np.ndarray], holes: Sequence[int]) -> dict[str, np.ndarray]:
    """Put a token of padding into the arrays [T] of a row in front of each of these indices."""
    fill = {"document_ids": PADDING, "shift_labels": IGNORED, "domain_ids": -1}
    return {name: np.insert(x, list(holes), fill.get(name, 0)) for name, x in row.items()}


def _draw_tokens(spec: CaseSpec, folder: str | None, random: np.random.Generator) -> np.ndarray:
    count = 2 * spec.tokens
    if folder is None:
        return random.integers(0, tiny_config(spec).vocab_size, count)
    if not any(file for pattern in ("*token*", "vocab*") for file in Path(folder).glob(pattern)):
        return random.integers(0, open_config(folder).get_text_config(decoder=True).vocab_size, count)
    tokenizer = open_tokenizer(folder)
    ids = np.asarray(tokenizer(inspect.getsource(textwrap), add_special_tokens=False).input_ids)
    if len(np.unique(ids)) < WORDS:  # it does not know English: one token in all places would show nothing
        return random.integers(0, len(tokenizer), count)
    return np.roll(np.resize(ids, max(count, len(ids))), -spec.seed)[:count]


def find_folder(model: str) -> str:
    """Return the folder of a model with real weights. Raises UserError for what is none or cannot be reached."""
    try:
        return resolve_source(model, CACHE)
    except UserError as error:
        raise UserError(str(error).replace("model.source", "model", 1)) from None


def tiny_config(spec: CaseSpec, model: str | None = None) -> Any:
    """Return the transformers config of a tiny model with default RoPE: the case's, or another."""
    model = model or spec.model
    original = SHORT if spec.is_run and spec.rope != "keep" else ORIGINAL
    family, varied = VARIED.get(model, (model, {}))
    changes: dict[str, Any] = {"max_position_embeddings": original, **varied}
    if family == "mistral":
        changes.setdefault("sliding_window", None)
    return (FAMILIES | ALIKE)[family](**(SIZES | changes))


def _tiny_decoder(spec: CaseSpec, model: str) -> DecoderConfig:
    """Return the oracle's reading of a tiny model."""
    read = tiny_config(spec, model).to_dict()
    if read["model_type"] not in ALIKE:
        return replace(DecoderConfig.from_hf(read), **ADDED.get(model, {}))
    rope = read.pop("rope_parameters")
    config = DecoderConfig.from_hf(read | {"model_type": "llama"})
    return replace(config, rope=RopeSpec.from_hf(read | {"rope_parameters": rope}), **ADDED.get(model, {}))


@lru_cache(maxsize=8)
def tiny_weights(model: str, seed: int) -> Mapping[str, np.ndarray]:
    """Draw random float32 weights by name, which both sides load.

    Larger than a fresh model's, those of q and k most, so that attention is far from uniform and a wrong mask or
    position shows; biases and norms are drawn too, so that they count.
    """
    shapes = parameter_shapes(_tiny_decoder(CaseSpec(model=model), model))
    random = np.random.default_rng((seed, 0))
    weights = {}
    for name, shape in shapes.items():
        drawn = random.standard_normal(shape)
        if name.endswith("bias"):
            drawn = 0.1 * drawn
        elif len(shape) == 1:
            drawn = 1 + 0.1 * drawn
        else:
            drawn *= (1.3 if "q_proj" in name or "k_proj" in name else 0.64) / shape[1] ** 0.5
        weights[name] = drawn.astype(np.float32)
    return weights


def rope_settings(spec: CaseSpec, pairs: int) -> dict[str, Any]:
    """Return theta, where it is given, and the parameters of the case's RoPE type. `pairs`: how many rotate."""
    rope, all_ = spec.rope, spec.rope_parameters == "all"
    # After `dynamic`, whose length is the model's own, `dynamic` itself finds the factor of a longer one.
    open_ = rope in ("keep", "default") or rope == spec.rope_before == "dynamic"
    settings: dict[str, Any] = {} if open_ else {"factor": FACTOR}
    if rope == "llama3":
        settings |= {"low_freq_factor": 2.0 if all_ else 1.0, "high_freq_factor": 7.0 if all_ else 4.0}
    if rope == "longrope":
        rising = np.linspace(0, 1, pairs)
        settings |= {"short_factor": (1 + 0.5 * rising).tolist(), "long_factor": (FACTOR**rising).tolist()}
    if all_:
        settings |= {"theta": 70_000.0}
        settings |= {"beta_fast": 20.0, "beta_slow": 2.0} if rope == "yarn" else {}
        settings |= {"attention_factor": 1.3} if rope in ("yarn", "longrope") else {}
    return settings


def _read_config(spec: CaseSpec, folder: str | None) -> DecoderConfig:
    if folder is None:
        config = _tiny_decoder(spec, spec.against or spec.model)
    else:
        config = DecoderConfig.from_hf(read_json(Path(folder) / "config.json", "model"))
    config = replace(config, keep_anchor=spec.beyond_window == "anchor")
    settings = rope_settings(spec, config.rope.head_dim // 2)
    if spec.rope == "keep":
        return replace(config, rope=replace(config.rope, **settings))
    if spec.rope in ("dynamic", "yarn", "llama3", "longrope"):
        own = config.rope.original_max_position_embeddings
        settings["original_max_position_embeddings"] = own or config.max_position_embeddings
    if spec.rope == spec.rope_before == "dynamic":
        longer = int(FACTOR) * settings["original_max_position_embeddings"]
        settings |= {"factor": BEFORE * FACTOR, "original_max_position_embeddings": longer}
    lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    given: dict[str, Any] = {"theta": config.rope.theta, **settings, **lists}
    rope = RopeSpec(head_dim=config.rope.head_dim, rope_type=spec.rope, **given)
    return replace(config, rope=rope)

"""The models of a study: a pretrained one, the same with shuffled weights, and random ones.

All parameters are rounded to bfloat16 once: what conditions differ by is then the arithmetic alone. In random models
the weights of norms are 1 and biases 0.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from anchorline import hub
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import read_json
from jaxref.decoder_config import DecoderConfig
from jaxref.model import Decoder, to_arrays
from jaxref.storage.weights import cast, from_arrays, load_hf, parameter_shapes
from ropestudy.spec import ModelConfig

DTYPE = "bfloat16"
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _kaiming_uniform(a: float) -> Draw:
    """torch.nn.init.kaiming_uniform_: U(+-sqrt(6 / ((1 + a^2) fan_in))) (arXiv 1502.01852)."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        bound = (6 / ((1 + a * a) * shape[1])) ** 0.5
        return random.uniform(-bound, bound, shape)

    return draw


class Initialisation(NamedTuple):
    """How a random model is drawn. Matrices are [outputs, inputs], so that fan_in is the last axis."""

    about: str
    embedding: float  # standard deviation of the embedding
    draw: Draw  # of every other matrix


INITIALISATIONS = {
    "kaiming": Initialisation(
        "kaiming_uniform_ with its default a = 0: U(+-sqrt(6 / fan_in)); embeddings N(0, 1) as nn.Embedding has them",
        1.0,
        _kaiming_uniform(0),
    ),
    "kaiming_sqrt5": Initialisation(
        "U(+-1 / sqrt(fan_in)), nn.Linear's own kaiming_uniform_ with a = sqrt(5); embeddings N(0, 1)",
        1.0,
        _kaiming_uniform(5**0.5),
    ),
    "normal_002": Initialisation(
        "N(0, 0.02) for every matrix, embeddings too: transformers' own for Llama",
        0.02,
        lambda random, shape: 0.02 * random.standard_normal(shape),
    ),
}


@dataclass(frozen=True)
class Pretrained:
    """A model, its tokenizer and its BOS."""

    config_json: dict[str, Any]
    config: DecoderConfig
    decoder: Decoder  # parameters in bfloat16
    tokenizer: Tokenizer
    bos: int | None
    sha256: str  # of the parameters as stored


def load_pretrained(model: ModelConfig) -> Pretrained:
    """Load the model of a study, its tokenizer and BOS.

    Raises UserError, one line: no such model, an architecture that the oracle does not know, no tokenizer.json.
    """
    folder = find_folder(model.source)
    try:
        config_json = read_json(folder / "config.json", "model.source")
        config, decoder = load_hf(folder)
        config.check_plain()
    except (UserError, OSError) as error:
        raise UserError(f"model.source: {quoted(model.source)} is not a model the oracle can load: {error}") from None
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"model.source: {quoted(folder)} has no tokenizer.json, which the text is read with; add it")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:  # tokenizers raises nothing more particular, or panics in Rust
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise UserError(f"model.source: {quoted(file)} is not a tokenizer: {quoted_reason(error)}") from None
    arrays, digest = to_arrays(decoder), hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.asarray(arrays[name]).tobytes())
    bos = _bos(folder, config_json, tokenizer)
    return Pretrained(config_json, decoder.config, cast(decoder, DTYPE), tokenizer, bos, digest.hexdigest())


def find_folder(source: str) -> Path:
    """Return the folder of a model. Raises UserError: there is none."""
    if source == "smollm2":
        return _smollm2_folder()
    return hub.find_model(source, "model.source", ("*.json", *hub.WEIGHTS))


def _smollm2_folder() -> Path:
    """Return SmolLM2-135M's folder. The trainer, which may not be imported here, converts it once in a process."""
    command = [sys.executable, "-m", "torchtrain.modeling.smollm2", "cache"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise UserError((run.stderr.strip().splitlines() or ["model.source: 'smollm2' cannot be converted"])[-1])
    return Path(run.stdout.splitlines()[-1])


def _bos(folder: Path, config_json: dict[str, Any], tokenizer: Tokenizer) -> int | None:
    """Return the BOS of tokenizer_config.json, or that of config.json."""
    file = folder / "tokenizer_config.json"
    token = read_json(file, "model.source").get("bos_token") if file.is_file() else None
    token = token.get("content") if isinstance(token, dict) else token
    bos = config_json.get("bos_token_id") if token is None else tokenizer.token_to_id(str(token))
    bos = bos[0] if isinstance(bos, list) and bos else bos
    if bos is None and token is None:
        return None
    if type(bos) is not int or not 0 <= bos < config_json["vocab_size"]:
        given = quoted(bos if token is None else token)
        raise UserError(f"model.source: the BOS of {quoted(folder)}, {given}, is not a token of its tokenizer.json")
    return bos


def variant(pretrained: Pretrained, name: str, seed: int) -> Decoder:
    """Return the decoder of a `spec.ModelName`, its parameters in bfloat16."""
    if name == "pretrained":
        return pretrained.decoder
    if name == "shuffled":
        return from_arrays(pretrained.config, shuffle(to_arrays(pretrained.decoder), seed))
    return cast(from_arrays(pretrained.config, random_arrays(pretrained.config, name, seed)), DTYPE)


def shuffle(arrays: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return every parameter with its own entries in a random order: of training only their distributions are left."""
    random = np.random.default_rng((seed, 1))
    return {name: random.permuted(np.asarray(array).reshape(-1)).reshape(array.shape) for name, array in arrays.items()}


def random_arrays(config: DecoderConfig, name: str, seed: int) -> dict[str, np.ndarray]:
    """Draw float32 parameters of one of `INITIALISATIONS`."""
    random, chosen = np.random.default_rng((seed, 2)), INITIALISATIONS[name]
    arrays = {}
    for parameter, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            array = np.full(shape, 0.0 if parameter.endswith("bias") else 1.0)
        elif "embed_tokens" in parameter:
            array = chosen.embedding * random.standard_normal(shape)
        else:
            array = chosen.draw(random, shape)
        arrays[parameter] = array.astype(np.float32)
    return arrays

"""The models of a study: pretrained weights from wherever they are, the same shuffled, and random ones.

Parameters are made in float32 and rounded once to the study's dtype. Norms' weights are 1 and biases 0 in random
models.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from anchorline import hub
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import read_json
from jaxref.decoder_config import DecoderConfig
from jaxref.model import Decoder
from jaxref.weights import cast, from_arrays, load_hf, parameter_shapes, to_arrays
from ropestudy.spec import ModelConfig

# Matrices are [outputs, inputs]: fan_in is the last axis. The embedding's is its width, as torch computes it.
INITIALISATIONS = {
    "kaiming": (
        "kaiming_uniform_ with its default a = 0: U(+-sqrt(6 / fan_in)); embeddings N(0, 1) as nn.Embedding has them"
    ),
    "kaiming_sqrt5": "U(+-1 / sqrt(fan_in)), nn.Linear's own kaiming_uniform_ with a = sqrt(5); embeddings N(0, 1)",
    "normal_002": "N(0, 0.02) for every matrix, embeddings too: transformers' own for Llama",
}
RANDOM_EMBEDDING = {"kaiming": 1.0, "kaiming_sqrt5": 1.0, "normal_002": 0.02}


@dataclass(frozen=True)
class Pretrained:
    """A model as it was found."""

    config_json: dict[str, Any]
    config: DecoderConfig
    decoder: Decoder  # parameters in the study's dtype
    tokenizer: Tokenizer
    bos: int | None
    sha256: str  # of the parameters as stored


def load_pretrained(model: ModelConfig) -> Pretrained:
    """Load the model of a study, its tokenizer and BOS.

    Raises UserError, one line: no such model, an architecture that the oracle does not know, no tokenizer.json.
    """
    folder = (
        smollm2_folder(model.cache)
        if model.source == "smollm2"
        else hub.find_model(model.source, "model.source", ("*.json", *hub.WEIGHTS))
    )
    try:
        config_json = read_json(folder / "config.json", "model.source")
        _, decoder = load_hf(folder)
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
    return _pretrained(model, config_json, decoder, tokenizer, _bos(folder, config_json, tokenizer))


def _pretrained(
    model: ModelConfig, config_json: dict[str, Any], decoder: Decoder, tokenizer: Tokenizer, bos: int | None
) -> Pretrained:
    arrays = to_arrays(decoder)
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.asarray(arrays[name]).tobytes())
    kept = decoder if model.weights == "stored" else cast(decoder, model.weights)
    return Pretrained(config_json, decoder.config, kept, tokenizer, bos, digest.hexdigest())


def smollm2_folder(cache: str) -> Path:
    """Return the folder of SmolLM2-135M that the trainer converts once. The trainer is run as a process of its own,
    because nothing of it may be imported here.

    Raises UserError: the trainer, or a package that it converts with, is not installed.
    """
    run = subprocess.run(
        [sys.executable, "-m", "torchtrain.modeling.smollm2", cache], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise UserError((run.stderr.strip().splitlines() or ["model.source: 'smollm2' cannot be converted"])[-1])
    return Path(run.stdout.splitlines()[-1])


def _bos(folder: Path, config_json: dict[str, Any], tokenizer: Tokenizer) -> int | None:
    """Return the tokenizer's BOS, or the config's.

    Raises UserError, one line: a tokenizer_config.json that says nothing of use.
    """
    file, given = folder / "tokenizer_config.json", {}
    if file.is_file():
        given = read_json(file, "model.source")
    token = given.get("bos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None:
        found = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise UserError(
                f"model.source: {quoted(file)} names the bos_token {quoted(token)}, which tokenizer.json does not have"
            )
        return found
    found = config_json.get("bos_token_id")
    found = found[0] if isinstance(found, list) and found else found
    vocabulary = config_json["vocab_size"]
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < vocabulary):
        raise UserError(
            f"bos_token_id: {quoted(found)} in {quoted(folder / 'config.json')} is not one of its {vocabulary} tokens"
        )
    return found


def variant(pretrained: Pretrained, name: str, seed: int) -> Decoder:
    """Return the decoder of a `spec.ModelName`, its parameters in the dtype of the pretrained ones."""
    if name == "pretrained":
        return pretrained.decoder
    if name == "shuffled":
        return from_arrays(pretrained.config, shuffle(to_arrays(pretrained.decoder), seed))
    decoder = from_arrays(pretrained.config, random_arrays(pretrained.config, name, seed))
    dtype = str(pretrained.decoder.embed_tokens.weight[...].dtype)
    return cast(decoder, dtype)


def shuffle(arrays: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return every parameter with its own entries in a random order: all that is left of training are their
    distributions.
    """
    random = np.random.default_rng((seed, 1))
    return {name: random.permuted(np.asarray(array).reshape(-1)).reshape(array.shape) for name, array in arrays.items()}


def random_arrays(config: DecoderConfig, name: str, seed: int) -> dict[str, np.ndarray]:
    """Draw float32 parameters of one of `INITIALISATIONS`."""
    random = np.random.default_rng((seed, 2))
    draw = _DRAWS[name]
    arrays = {}
    for parameter, shape in parameter_shapes(config).items():
        embedding = RANDOM_EMBEDDING[name] if "embed_tokens" in parameter else None
        if len(shape) == 1:
            array = np.full(shape, 0.0 if parameter.endswith("bias") else 1.0)
        elif embedding is not None:
            array = embedding * random.standard_normal(shape)
        else:
            array = draw(random, shape)
        arrays[parameter] = array.astype(np.float32)
    return arrays


def _kaiming_uniform(a: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    """torch.nn.init.kaiming_uniform_: U(+-sqrt(6 / ((1 + a^2) fan_in))) (arXiv 1502.01852)."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        bound = (6 / ((1 + a * a) * shape[1])) ** 0.5
        return random.uniform(-bound, bound, shape)

    return draw


_DRAWS = {
    "kaiming": _kaiming_uniform(0),
    "kaiming_sqrt5": _kaiming_uniform(5**0.5),
    "normal_002": lambda random, shape: 0.02 * random.standard_normal(shape),
}

"""The config: a strict and frozen schema, read from YAML. Each file here has one section, or a few related ones.

An unknown key is an error that suggests the nearest one, and a key that appears twice is an error too. The command line
and Python both use `load_config`.
"""

from torchtrain.config.data import DataConfig, MixtureConfig, Source
from torchtrain.config.distributed import LEAST_STAGE, DistributedConfig
from torchtrain.config.load import Config, dump_config, load_config, load_preparation
from torchtrain.config.model import Engine, LoraSettings, ModelConfig, Recomputation
from torchtrain.config.pack import BASE_VARIANTS, PackConfig, Variant
from torchtrain.config.preparation import Preparation, PrepareConfig, TokenizerConfig
from torchtrain.config.rope import PAPER_ROPE_THETA, ROPE_PARAMETERS, RopeConfig
from torchtrain.config.run import EvaluationConfig, LogConfig, SaveConfig
from torchtrain.config.section import MOST_TOKENS, Count, Name, PathText, Real, Section
from torchtrain.config.train import LossWeightConfig, TrainConfig

__all__ = [
    "BASE_VARIANTS",
    "LEAST_STAGE",
    "MOST_TOKENS",
    "PAPER_ROPE_THETA",
    "ROPE_PARAMETERS",
    "Config",
    "Count",
    "DataConfig",
    "DistributedConfig",
    "Engine",
    "EvaluationConfig",
    "LogConfig",
    "LoraSettings",
    "LossWeightConfig",
    "MixtureConfig",
    "ModelConfig",
    "Name",
    "PackConfig",
    "PathText",
    "Preparation",
    "PrepareConfig",
    "Real",
    "Recomputation",
    "RopeConfig",
    "SaveConfig",
    "Section",
    "Source",
    "TokenizerConfig",
    "TrainConfig",
    "Variant",
    "dump_config",
    "load_config",
    "load_preparation",
]

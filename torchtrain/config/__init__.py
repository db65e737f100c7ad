"""The config: a strict and frozen schema, read from YAML. Each file here has one section, or a few related ones.

An unknown key is an error that suggests the nearest one, and a key that appears twice is an error too. The command line
and Python both use `load_config`.
"""

from torchtrain.config.data import DataConfig, FilterConfig, MixtureConfig, Source
from torchtrain.config.distributed import LEAST_STAGE, DistributedConfig
from torchtrain.config.load import EXAMPLE, Config, dump_config, fill_empty_sections, load_config, load_preparation
from torchtrain.config.model import Engine, LoraSettings, ModelConfig, Recomputation
from torchtrain.config.pack import BASE_VARIANTS, EXTRAS, PackConfig, Variant
from torchtrain.config.preparation import Preparation, PrepareConfig, SlurmConfig, TokenizerConfig
from torchtrain.config.rope import PAPER_ROPE_THETA, ROPE_PARAMETERS, RopeConfig
from torchtrain.config.run import EvaluationConfig, HeldOutConfig, LogConfig, RunConfig, SaveConfig
from torchtrain.config.section import MOST_TOKENS, Count, Name, PathText, PositiveShare, Real, Section, SmallCount
from torchtrain.config.train import LossWeightConfig, TrainConfig

__all__ = [
    "BASE_VARIANTS",
    "EXAMPLE",
    "EXTRAS",
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
    "FilterConfig",
    "HeldOutConfig",
    "LogConfig",
    "LoraSettings",
    "LossWeightConfig",
    "MixtureConfig",
    "ModelConfig",
    "Name",
    "PackConfig",
    "PathText",
    "PositiveShare",
    "Preparation",
    "PrepareConfig",
    "Real",
    "Recomputation",
    "RopeConfig",
    "RunConfig",
    "SaveConfig",
    "Section",
    "SlurmConfig",
    "SmallCount",
    "Source",
    "TokenizerConfig",
    "TrainConfig",
    "Variant",
    "dump_config",
    "fill_empty_sections",
    "load_config",
    "load_preparation",
]

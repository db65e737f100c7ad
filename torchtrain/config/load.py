"""The config of a run: all sections, rules between sections, reading and writing as YAML."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import model_validator

from anchorline import settings
from anchorline.errors import UserError, quoted
from torchtrain.config.data import DataConfig
from torchtrain.config.distributed import DistributedConfig
from torchtrain.config.model import ModelConfig
from torchtrain.config.pack import PackConfig
from torchtrain.config.preparation import Preparation, TokenizerConfig
from torchtrain.config.rope import PAPER_ROPE_THETA, RopeConfig
from torchtrain.config.run import EvaluationConfig, HeldOutConfig, LogConfig, RunConfig, SaveConfig
from torchtrain.config.section import Section
from torchtrain.config.train import TrainConfig

EXAMPLE = "train.steps=20"  # an override, for messages


class Config(Section):
    """All settings of a run."""

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
                f"rope.theta 'paper': the paper has no base for pack.sequence_length {self.pack.sequence_length}, only "
                f"for {', '.join(map(str, PAPER_ROPE_THETA))}: give a number"
            )
        return self

    @property
    def not_compiled(self) -> str:
        """Why `model.fused: compile` does not go with the other settings, and what to set; empty where it does."""
        model = self.model
        if self.distributed.share == "documents":
            return "distributed.share documents, where rows differ in shape; set that to heads"
        if model.layer_chunk is not None:
            return "model.layer_chunk, which splits a layer; set that to null"
        if model.activation_checkpointing == "offload":
            return "model.activation_checkpointing offload, which runs a layer itself; set that to true"
        if model.lora is not None:
            return "model.lora, which adds modules to a layer; set that to null"
        return ""

    @model_validator(mode="after")
    def _answers_stay_whole(self) -> Self:
        if self.data.has_answers and self.pack.cuts_answers:
            raise ValueError(f"pack.{self.pack.cuts_answers} (data.sources: records)")
        return self

    @model_validator(mode="after")
    def _a_row_reaches_the_tail(self) -> Self:
        settings, length = self.train.loss_weight, self.pack.sequence_length
        if settings is not None and settings.tail > length:
            raise ValueError(
                f"train.loss_weight.tail {settings.tail}: a row of pack.sequence_length {length} has no target that "
                "sees so many tokens; lower it"
            )
        return self

    @model_validator(mode="after")
    def _compiled_layers_are_whole(self) -> Self:
        if self.model.fused == "compile" and self.not_compiled:
            raise ValueError(f"model.fused compile: does not go with {self.not_compiled}, or model.fused to none")
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run's YAML config with `section.key=value` overrides. Raises UserError: see `anchorline.settings.load`."""

    def fill(tree: settings.Tree) -> settings.Tree:
        if (others := [name for name in ("tokenizer", "prepare") if name in tree]) and "run" not in tree:
            held = f"it has {', '.join(others)}; give it to that, or write a run's config (`torchtrain init`)"
            raise UserError(f"config {quoted(path)}: is one of `torchtrain prepare`: {held}")
        return fill_empty_sections(tree)

    # Of steps and epochs, one given on the command line replaces the file's other.
    given = dict(of.split("=", 1) for of in overrides if of.startswith(("train.steps=", "train.epochs=")))
    if len(given) == 1 and next(iter(given.values())).strip() not in ("null", "~", ""):
        overrides = [*overrides, f"train.{'epochs' if 'train.steps' in given else 'steps'}=null"]
    return settings.load(Config, path, overrides, example=EXAMPLE, prepare=fill)


def load_preparation(path: str | Path, overrides: Sequence[str] = ()) -> Preparation:
    """As `load_config`, for `torchtrain prepare`; of a run's config, tokenizer and data are used. Raises UserError."""
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
    """Return the config with every default as YAML, from which `load_config` reads an equal config."""
    return settings.dump(config.model_dump(mode="json"))


def fill_empty_sections(tree: settings.Tree) -> settings.Tree:
    """Return the tree with an empty section for each key without a value, such as `train:`."""
    return {name: {} if section is None else section for name, section in tree.items()}

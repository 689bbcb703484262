"""The dataclasses behind configs/*.yaml; `command_line` fills them."""

from moh_vision.config.data import ClsDataConfig, DataConfig, MixConfig
from moh_vision.config.draws import DrawConfig, PreviewConfig, ScoreConfig
from moh_vision.config.model import ModelConfig
from moh_vision.config.optim import BlockDescentConfig, ClsOptimConfig, EmaConfig, OptimConfig
from moh_vision.config.runs import FREE_KEYS, LATER_KEYS, ClsConfig, DitConfig, Flags, RunConfig
from moh_vision.config.sample import SampleConfig
from moh_vision.config.text import TextConfig

__all__ = [
    "BlockDescentConfig",
    "ClsConfig",
    "ClsDataConfig",
    "ClsOptimConfig",
    "DataConfig",
    "DitConfig",
    "DrawConfig",
    "EmaConfig",
    "FREE_KEYS",
    "Flags",
    "LATER_KEYS",
    "MixConfig",
    "ModelConfig",
    "OptimConfig",
    "PreviewConfig",
    "RunConfig",
    "SampleConfig",
    "ScoreConfig",
    "TextConfig",
]

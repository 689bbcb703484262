"""Text models for transformers whose attention heads are experts, by name.

They need the packages of the extra "text", so that nothing else imports this module.
"""

from typing import List

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from moh_vision.language.models.causal_lm import CausalLMModel
from moh_vision.language.models.configs import CausalLMConfig, MaskedLMConfig, TranslationConfig
from moh_vision.language.models.llama.model import MoHLlamaForCausalLM
from moh_vision.language.models.masked_lm import MaskedLMModel
from moh_vision.language.models.presets import preset_config, preset_names
from moh_vision.language.models.translation import TranslationModel

__all__ = [
    "CausalLMConfig",
    "CausalLMModel",
    "MaskedLMConfig",
    "MaskedLMModel",
    "TranslationConfig",
    "TranslationModel",
    "create_text_model",
    "list_text_presets",
]

MODELS = {model.config_class: model for model in (TranslationModel, MaskedLMModel, CausalLMModel)}

for auto, model in (
    (AutoModelForSeq2SeqLM, TranslationModel),
    (AutoModelForMaskedLM, MaskedLMModel),
    (AutoModelForCausalLM, CausalLMModel),
):
    AutoConfig.register(model.config_class.model_type, model.config_class)
    auto.register(model.config_class, model)
MODELS[MoHLlamaForCausalLM.config_class] = MoHLlamaForCausalLM  # which registers itself


def list_text_presets() -> List[str]:
    """Names for `create_text_model`. Beside them, any mt_moa_xKyEzD and mlm_moa_xKyEzD."""
    return preset_names()


def task_of(preset: str) -> str:
    """What a preset is for: "mt" translates, "mlm" fills in masked tokens, "clm" continues a text.

    Raises:
        ValueError: for an unknown preset, naming the nearest.
    """
    preset_config(preset)
    return preset.partition("_")[0]


def create_text_model(preset: str, **overrides) -> PreTrainedModel:
    """A text model with new weights.

    It has `forward_routed` and `routed_loss`, see `moh_vision.language.models.base.TextModel`.

    Args:
        preset: see `list_text_presets`: mt_* translate, mlm_* predict masked words, clm_* the next word.
            clm_{small,base} are LLaMA-style (`moh_vision.language.models.llama.model`), clm_moh_{small,base}_{75,50} the same with
            MoH's routers and so many percent of the heads active in every layer (Jin 2024, section 4.3).
        **overrides: fields of its config, such as vocab_size=8000, encoder_layers=3, dropout=0.3 or
            cross_attention=dict(router="dense"); of LLaMA-style models also router, head_budget, executor, group and
            router_kwargs, see `moh_vision.language.models.llama.configs.MoHLlamaConfig`.

    Raises:
        ValueError: for an unknown preset or field, naming the nearest; or for a value out of its range.
    """
    config = preset_config(preset, **overrides)
    return MODELS[type(config)](config)

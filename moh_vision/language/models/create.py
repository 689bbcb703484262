"""The papers' text models by name: transformers models with attention heads as experts."""

import re
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import moh_vision.language.models.llama.model  # noqa: F401  registers its models
from moh_vision.common.errors import closest, message_of
from moh_vision.language.models.base import MODELS, register
from moh_vision.language.models.causal_lm import CausalLMModel
from moh_vision.language.models.configs import (
    MOH_FIELDS,
    CausalLMConfig,
    MaskedLMConfig,
    MoHLlamaConfig,
    TextConfig,
    TranslationConfig,
    causal_routers,
)
from moh_vision.language.models.masked_lm import MaskedLMModel
from moh_vision.language.models.translation import TranslationModel

__all__ = [
    "CausalLMModel",
    "MaskedLMModel",
    "TranslationModel",
    "create_text_model",
    "list_text_presets",
]

register(AutoModelForSeq2SeqLM, TranslationModel)
register(AutoModelForMaskedLM, MaskedLMModel)
register(AutoModelForCausalLM, CausalLMModel)

MAE = {
    "mae_7": {"router": "mae", "leave_out": 1},
    "mae_6": {"router": "mae", "leave_out": 2},
    "uni_mae_7": {"router": "mae", "leave_out": 1, "mode": "uniform"},
    "uni_mae_6": {"router": "mae", "leave_out": 2, "mode": "uniform"},
    # The model of MAE-7, whose gates and experts are trained together, without block descent (Peng 2020, section 3).
    "nobcd": {"router": "mae", "leave_out": 1},
}
MOH = {f"moh_{percent}": {"router": "moh", "head_budget": percent / 100} for percent in (75, 50)}
# The rows of Zhang 2022, tables 1 to 3. Other names xKyEzD are accepted too.
MOA_TRANSLATION = (
    "8K8E128D",
    "8K8E256D",
    "8K16E256D",
    "8K32E64D",
    "8K32E128D",
    "8K32E256D",
    "4K32E256D",
    "16K32E256D",
)
MOA_MASKED = ("8K8E128D", "8K8E256D", "8K16E256D", "8K32E256D", "8K64E256D")
MOA_NAME = re.compile(r"(\d+)K(\d+)E(\d+)D")

# Zhang 2022, tables 5 and 6 (a vocabulary of about 37,000 words), and Peng 2020, appendix A (32K merges).
MOA_MT = dict(vocab_size=37_000, dropout=0.2, attention_dropout=0.2, activation_dropout=0.1)
BASE = dict(vocab_size=32_768, dropout=0.1)
BIG = dict(BASE, hidden_size=1024, intermediate_size=4096, num_attention_heads=16, dropout=0.3)
WT103 = dict(
    vocab_size=267_744,
    hidden_size=1024,
    intermediate_size=4096,
    adaptive_cutoffs=[20_000, 60_000],
    dropout=0.3,
    attention_dropout=0.1,
    activation_dropout=0.1,
)
# Jin 2024, appendix B.1: LLaMA's architecture, untied output. The paper omits the norms' epsilon (here LLaMA 2's)
# and the initialisation (here transformers' normal distribution of deviation 0.02).
LLAMA = dict(
    vocab_size=65_536,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    pad_token_id=0,
    bos_token_id=2,  # eos stands before the first text too
    eos_token_id=2,
)
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA_SIZES = {"small": (768, 2048, 12, 12), "base": (1536, 4096, 24, 16)}


def moa(name: str, bias: bool) -> dict:
    """Return the attention dict of an xKyEzD: x active of y experts of width z."""
    top_k, experts, width = map(int, MOA_NAME.fullmatch(name).groups())
    return {"router": "moa", "top_k": top_k, "experts": experts, "head_dim": width, "bias": bias}


def presets() -> dict[str, tuple[type, dict]]:
    """Return every named preset: its config class and that config's fields."""
    named: dict[str, tuple[type, dict]] = {
        "mt_transformer_base": (TranslationConfig, BASE),
        "mt_transformer_big": (TranslationConfig, BIG),
        "mlm_base": (MaskedLMConfig, {}),
        "clm_wt103_base": (CausalLMConfig, WT103),
    }
    for name, attention in {**MAE, **MOH}.items():
        named[f"mt_{name}"] = (TranslationConfig, dict(BASE, attention=attention))
    for name in MOA_TRANSLATION:
        named[f"mt_moa_{name}"] = (TranslationConfig, dict(MOA_MT, attention=moa(name, bias=False)))
    for name in MOA_MASKED:
        named[f"mlm_moa_{name}"] = (MaskedLMConfig, {"attention": moa(name, bias=True)})
    for size, values in LLAMA_SIZES.items():
        fields = dict(LLAMA, **dict(zip(SIZES, values)))
        named[f"clm_{size}"] = (MoHLlamaConfig, fields)
        for percent in (75, 50):
            # The paper gives only the share of active heads. Here all layers have the same budget, and 45 % of the
            # active heads are shared, which rounds to 42 to 50 % (section 4.5: more than 40 %).
            routed = dict(fields, router="moh", head_budget=f"uniform:{percent / 100}:0.45")
            named[f"clm_moh_{size}_{percent}"] = (MoHLlamaConfig, routed)
    for name in ("nobcd", "mae_7", "uni_mae_7"):
        named[f"clm_wt103_{name}"] = (CausalLMConfig, dict(WT103, attention=MAE[name]))
    return named


def list_text_presets() -> list[str]:
    """Return the names for `create_text_model`. It also knows any mt_moa_xKyEzD and mlm_moa_xKyEzD."""
    return sorted(presets())


def task_of(preset: str) -> str:
    """Return a preset's task: "mt" (translation), "mlm" (masked tokens) or "clm" (causal)."""
    preset_config(preset)
    return preset.partition("_")[0]


def create_text_model(preset: str, **overrides: Any) -> PreTrainedModel:
    """Make a text model with new weights, and methods `forward_routed` and `routed_loss`.

    Args:
        preset: see `list_text_presets`: mt_* translate, mlm_* predict masked words, clm_* the next word.
            clm_{small,base} are LLaMA-style (`moh_vision.language.models.llama.model`), clm_moh_{small,base}_{75,50}
            the same with MoH's routers and this percentage of heads active per layer (Jin 2024, section 4.3).
        **overrides: fields of its config, such as vocab_size=8000, encoder_layers=3, dropout=0.3 or
            cross_attention=dict(router="dense"); head_budget, which replaces the one in the field `attention`; for
            LLaMA-style models also router, executor, group and router_kwargs, see
            `moh_vision.language.models.configs.MoHLlamaConfig`.
    """
    config = preset_config(preset, **overrides)
    return MODELS[type(config)](config)


def preset_config(preset: str, **overrides: Any) -> PreTrainedConfig:
    """Return the config of a preset, with other values for some fields; see `create_text_model`."""
    named = presets()
    task, _, size = preset.partition("_moa_")
    if preset in named:
        config_class, fields = named[preset]
    elif task in ("mt", "mlm") and MOA_NAME.fullmatch(size):
        config_class, fields = named[f"{task}_moa_8K8E128D"]  # the numbers in the name are replaced
        fields = dict(fields, attention=moa(size, bias=fields["attention"]["bias"]))
    else:
        raise ValueError(f"there is no text model {preset!r}: {closest(preset, named)}")
    allowed = _allowed_fields(config_class)
    if config_class is not MoHLlamaConfig and "head_budget" in overrides:
        attention = overrides.get("attention") or fields.get("attention") or {"router": "dense"}
        overrides["attention"] = dict(attention, head_budget=overrides.pop("head_budget"))
    for name in overrides:
        if name not in allowed:
            raise ValueError(f"{preset} has no {name!r}: {closest(name, allowed)}")
    fields = {**fields, **overrides}
    if config_class is not MoHLlamaConfig:
        return config_class(**fields)
    moh = {name: fields.pop(name) for name in MOH_FIELDS if name in fields}
    given = ", ".join(name for name in moh if name != "router")
    if given and moh.get("router") is None:
        known = " or ".join(map(repr, causal_routers()))
        raise ValueError(f"{preset} is dense: {given} needs router={known}")
    try:
        return MoHLlamaConfig(**fields, moh=moh if moh.get("router") else None)
    except StrictDataclassError as error:  # transformers' own checks; the message has many lines
        raise ValueError(f"{preset}: {message_of(error)}") from None


def preset_routers(preset: str, **overrides: Any) -> list[tuple[str, dict]]:
    """Return name and options of the router of each stack of a preset, see `preset_config`."""
    config = preset_config(preset, **overrides)
    if isinstance(config, TextConfig):
        return [(spec["router"], spec) for spec in config.attentions()]
    moh = config.moh or dict(router="dense")
    return [(moh["router"], moh.get("router_kwargs") or {})]


def _allowed_fields(config_class: type[PreTrainedConfig]) -> list[str]:
    """Return the fields of a config class that a preset may be given other values for."""
    if config_class is MoHLlamaConfig:
        names = (*LlamaConfig.__annotations__, *MOH_FIELDS)
        return [name for name in names if not name.startswith("_")]
    ours = [base for base in config_class.__mro__ if issubclass(base, TextConfig)]
    names = [name for base in ours for name in base.__annotations__]
    return [name for name in names if name != "tie_word_embeddings"]

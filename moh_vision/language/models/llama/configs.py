"""Configurations of LLaMA-style models with routed heads: transformers' plus the field `moh`."""

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from moh_vision.attention import EXECUTORS, BudgetSpec, resolve_budget
from moh_vision.attention.budget import HeadBudget, all_heads, parse_share
from moh_vision.engine.commands import closest

# What `moh` may say, with the defaults; head_budget None: all heads are active.
MOH_FIELDS = {"router": "query_norm", "head_budget": None, "executor": "auto", "group": False, "router_kwargs": None}
ROUTER_KEYS = {"query_norm": (), "moh": ("gate_scale", "two_stage")}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def budget_pairs(spec: BudgetSpec | None, router: str, group: bool, config: PreTrainedConfig) -> list[list[int]]:
    """One [shared, routed] per layer, as the config keeps them.

    Args:
        spec: see `moh_vision.attention.resolve_budget`; None: all heads active, see `all_heads`. A list of pairs is
            returned as it is. With a share, each layer's shared heads are min(half of all, half of the active), rounded
            down, for "query_norm", unless the spec gives them; for "moh" 40 % of the active ones.
        group: count heads in whole key-value groups.
    """
    heads = config.num_attention_heads
    size = heads // config.num_key_value_heads if group else 1
    if spec is None:
        spec = [[s * size, r * size] for s, r in all_heads([heads // size] * config.num_hidden_layers)]
    budgets = resolve_budget(spec, config.num_hidden_layers, heads, config.head_dim, size)
    if router == "moh" or isinstance(spec, (list, tuple)) or parse_share(spec)[2] is not None:
        return [[b.shared, b.routed] for b in budgets]
    shared = [min(heads // size // 2, b.active // size // 2) * size for b in budgets]
    return [[s, b.active - s] for s, b in zip(shared, budgets)]


def checked_moh(moh: dict, config: PreTrainedConfig) -> dict:
    """The field `moh`, complete: every key of MOH_FIELDS, head_budget as pairs."""
    if not isinstance(moh, dict):
        raise ValueError(f"moh={moh!r} is not a dict with {', '.join(MOH_FIELDS)}, or None for a dense model")
    for key in moh:
        if key not in MOH_FIELDS:
            raise ValueError(f"moh: there is no {key!r}, {closest(key, MOH_FIELDS)}")
    moh = {**MOH_FIELDS, **moh}
    router, kwargs = moh["router"], moh["router_kwargs"]
    if router not in ROUTER_KEYS:
        raise ValueError(f"router {router!r} is not for a causal model: give {' or '.join(ROUTER_KEYS)}")
    if moh["executor"] not in EXECUTORS:
        raise ValueError(f"executor {moh['executor']!r} is not one of {', '.join(sorted(EXECUTORS))}")
    if not isinstance(moh["group"], bool):
        raise ValueError(f"group={moh['group']!r} is not True or False")
    if moh["group"] and router != "query_norm":
        raise ValueError(
            f"group=True chooses whole key-value groups by their queries: it needs 'query_norm', not {router!r}"
        )
    for key in kwargs or {}:
        if key not in ROUTER_KEYS[router]:
            allowed = ", ".join(ROUTER_KEYS[router]) or "nothing"
            raise ValueError(f"router_kwargs: router {router!r} has no {key!r}, it takes {allowed}")
    moh["head_budget"] = budget_pairs(moh["head_budget"], router, moh["group"], config)
    return moh


def layer_budgets(config: PreTrainedConfig) -> list[HeadBudget]:
    """What the config says of each layer; of a dense model that all its heads are shared."""
    heads, width = config.num_attention_heads, config.head_dim
    pairs = [[heads, 0]] * config.num_hidden_layers if config.moh is None else config.moh["head_budget"]
    return [HeadBudget(heads, width, *pair) for pair in pairs]


class RoutedConfig:
    """Checks sizes and completes the field `moh`; a mixin before transformers' class."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for name in SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a whole number of at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if getattr(self, "head_dim", None) is None:  # Qwen2's has none
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.moh is not None:
            self.moh = checked_moh(self.moh, self)


class MoHLlamaConfig(RoutedConfig, LlamaConfig):
    """transformers' LlamaConfig and `moh`.

    Args:
        moh: None: every head runs. Else a dict of
            router: "query_norm" (no parameters, Jin 2024, section 4.4) or "moh" (its eq. 5 and 6);
            head_budget: one [shared, routed] per layer, or what `resolve_budget` takes, see `budget_pairs`;
            executor: a name in `moh_vision.attention.EXECUTORS`;
            group: choose query heads by whole key-value groups ("query_norm" only);
            router_kwargs: gate_scale and two_stage of "moh".
    """

    model_type = "moh_llama"
    moh: dict | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.validate_architecture()  # LLaMA's own check, which a subclass is not put to


class MoHQwen2Config(RoutedConfig, Qwen2Config):
    """transformers' Qwen2Config and `moh`, see `MoHLlamaConfig`."""

    model_type = "moh_qwen2"
    moh: dict | None = None


class MoHQwen3Config(RoutedConfig, Qwen3Config):
    """transformers' Qwen3Config and `moh`, see `MoHLlamaConfig`."""

    model_type = "moh_qwen3"
    moh: dict | None = None

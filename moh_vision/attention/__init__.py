"""The core: one attention layer whose heads are experts, for the models of three papers (MoH, MoA, MAE).

    y_t = sum_h  w_h(x_t) * softmax(q_h(x_t) K_h^T / sqrt(D)) V_h  W_O^h            (*)

`routers` compute the weights w_h, `executors` compute the sum, and `layer` calls both; `mlp` does the same for groups of an
MLP.
Letters used in every file: B batch, N query tokens, M key tokens, C model width, H heads, G key-value heads,
E candidates of the router, K active heads, D head width.
"""

from moh_vision.attention.budget import BudgetSpec, HeadBudget, full_budget, resolve_budget
from moh_vision.attention.cache import ContextCache, KeyValueCache
from moh_vision.attention.executors import EXECUTORS
from moh_vision.attention.layer import HeadMixtureAttention
from moh_vision.attention.losses import (
    head_runs,
    head_usage,
    load_balance_loss,
    moa_balance_loss,
    router_z_loss,
)
from moh_vision.attention.mlp import GroupMixtureMlp
from moh_vision.attention.model_heads import (
    ModelBudgets,
    attention_layers,
    budgets_at,
    head_budget,
    init_routers,
    mlp_layers,
    model_budgets,
    running,
    set_budgets,
    token_heads,
)
from moh_vision.attention.routed_layer import RoutedLayer
from moh_vision.attention.routers import ROUTERS, default_budget
from moh_vision.attention.routers.base import Router
from moh_vision.attention.routing import Routing, RoutingStats, run_block
from moh_vision.attention.separate import SeparateHeadMixtureAttention

__all__ = [
    "EXECUTORS",
    "ROUTERS",
    "BudgetSpec",
    "ContextCache",
    "GroupMixtureMlp",
    "HeadBudget",
    "HeadMixtureAttention",
    "KeyValueCache",
    "ModelBudgets",
    "RoutedLayer",
    "Router",
    "Routing",
    "RoutingStats",
    "SeparateHeadMixtureAttention",
    "attention_layers",
    "budgets_at",
    "default_budget",
    "full_budget",
    "head_budget",
    "head_runs",
    "head_usage",
    "init_routers",
    "load_balance_loss",
    "mlp_layers",
    "moa_balance_loss",
    "model_budgets",
    "router_z_loss",
    "resolve_budget",
    "run_block",
    "running",
    "set_budgets",
    "token_heads",
]

"""The head budget of a model that exists: changing it, and writing it where the model is saved from."""

from timm.models._input import update_model_args
from torch import nn

from moh_vision.attention import BudgetSpec, attention_layers, set_routed_heads


def set_head_budget(model: nn.Module, spec: BudgetSpec) -> nn.Module:
    """Change how many routed heads of a model run; its shared heads and all weights stay.

    Args:
        model: any model with head routing.
        spec: the share of all heads that is to be active, such as 0.5, "ramp:0.5" or "uniform:0.5", or a list with one
            (shared, routed) pair per layer. The budget is saved with the model.

    Returns:
        the model.

    Raises:
        ValueError: naming the layer, if it has no routed heads or too few.
    """
    set_routed_heads(model, spec)
    record_head_budget(model)
    return model


def record_head_budget(model: nn.Module) -> None:
    """Write the budget into what timm's, diffusers' or transformers' saving takes the model's arguments from."""
    pairs = [[layer.budget.shared, layer.budget.routed] for layer in attention_layers(model)]
    if hasattr(model, "register_to_config"):
        model.register_to_config(head_budget=pairs)
    elif hasattr(model, "pretrained_cfg"):
        update_model_args(model, head_budget=pairs)
    elif getattr(getattr(model, "config", None), "moh", None) is not None:
        model.config.moh = dict(model.config.moh, head_budget=pairs)

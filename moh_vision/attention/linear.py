"""When the weight of a linear layer may be read instead of calling the layer."""

from torch import nn


def plain(linear: nn.Module, kind: type = nn.Linear) -> bool:
    """Whether a call does nothing but multiply by the layer's own weight and add its bias.

    False for an adapter around the layer, quantised or distributed weights, pruning, a parametrisation, hooks and a
    replaced `forward` (accelerate's offloading): there the layer must be called.

    Args:
        linear: any module.
        kind: the class of a plain layer.
    """
    return (
        type(linear) is kind
        # Not linear.weight: fx replaces that by a proxy.
        and type(linear._parameters.get("weight")) is nn.Parameter
        and not (linear._forward_hooks or linear._forward_pre_hooks)
        and not (linear._backward_hooks or linear._backward_pre_hooks)
        and "forward" not in linear.__dict__
    )

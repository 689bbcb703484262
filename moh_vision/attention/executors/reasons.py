"""Checks that several executors share in `Executor.why_not`: each returns the reason why a call cannot run, or ""."""

import torch
from torch import nn

from moh_vision.attention import kernels
from moh_vision.attention.cache import ContextCache
from moh_vision.attention.linear import plain, product_dtype
from moh_vision.attention.routing import Call

# Said by executors that compute lists of pairs, see `one_choice_for_all`.
SLICED_IS_FASTER = (
    "one choice serves all sequences, which plain products by a smaller weight do faster"
)


def nothing_to_skip(layer: nn.Module, call: Call) -> str:
    """Return why no executor can skip heads of a call."""
    if call.routing.active is None:
        return "every head may run"
    if call.x.numel() == 0 or (call.context is not None and call.context.numel() == 0):
        return "there are no tokens"
    cache = call.cache
    if cache is None:
        return ""
    if call.x.shape[1] == 1 or trains(layer) or isinstance(cache, ContextCache):
        return "the keys of all heads are cached"
    # A prompt in inference: each of its tokens runs its own heads, and the cache still gets the keys of all heads.
    return ""


def not_whole_heads(layer: nn.Module, call: Call) -> str:
    """Return why heads cannot be left out of whole sequences, keys and values included."""
    if call.routing.active.shape[1] != 1:
        return "needs heads that are chosen per sequence"
    if call.cache is not None or layer.grouped:
        return "keys are cached, or shared by groups of heads"
    return hidden_weights(layer)


def hidden_weights(layer: nn.Module) -> str:
    """Return why the projections of a layer must be called as modules, so that their weights may not be read."""
    for module in layer.projections:
        if not plain(module):
            return "the projections carry hooks or are not plain linear layers"
    return ""


def no_operator(layer: nn.Module, call: Call) -> str:
    """Return why neither C++ nor Triton has an operator for the attention of a call."""
    if path_of(layer, call) != "torch":
        return ""
    reason = "dropout"
    if not call.dropout_p:
        reason = kernels.about(call.x.device.type)
    return f"no compiled operator runs the call ({reason})"


def no_products(call: Call) -> str:
    """Return why the C++ operators that skip products (`project`, `attend`, `combine`) cannot run a call."""
    if kernels.native(call.x.device, product_dtype(call.x)):
        return ""
    return "no C++ operator projects such numbers"


def unlisted(call: Call, compiling: bool) -> str:
    """Return why the pairs of a call cannot be listed on a CPU. Under torch.compile only a router's operator lists them."""
    if compiling and call.routing.pairs is None:
        return "compiled, and the list of pairs has no fixed length"
    return ""


def path_of(layer: nn.Module, call: Call) -> str:
    """Return the path that runs the attention of a call: "cpp", "triton" or "torch"."""
    dtype = product_dtype(call.x)
    return kernels.attend_path(call.x.device, dtype, layer.head_dim, call.attn_mask, call.dropout_p)


def one_choice_for_all(call: Call) -> bool:
    """Return whether one choice of heads serves all sequences of a call."""
    return call.routing.active.shape[0] < call.x.shape[0]


def trains(layer: nn.Module) -> bool:
    """Return whether a call of a layer belongs to training."""
    # is_grad_enabled alone would not do: reentrant checkpointing runs forward once without and once with gradients, and the
    # same executor must run both times, so that dropout is the same.
    return layer.training or torch.is_grad_enabled()

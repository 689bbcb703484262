"""`Signature`: all that decides which executor runs a call, as a value without tensors."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.cache import ContextCache
from moh_vision.attention.linear import plain, present_mode, product_dtype, uses_tf32
from moh_vision.attention.routing import Call, RoutingForm


class MaskForm(NamedTuple):
    """What an executor may ask of an attention mask."""

    dtype: torch.dtype
    axes: str  # the dimensions along which the mask differs, of "BHN"; it always has one column for each key
    learned: bool  # whether it requires a gradient


class Signature(NamedTuple):
    """Device, layer, sizes, routing, options and mode of one call. Calls with equal signatures have the same executor."""

    # The device.
    device: torch.device
    path: str  # of the operators: "cpp", "triton" or "torch"
    # The layer.
    layer: type[nn.Module]
    router: type[nn.Module]
    scope: str
    variant: str
    heads: int
    head_dim: int
    kv_heads: int
    dim: int
    readable: bool  # False: the projections must be called as modules, so that their weights may not be read
    # The dtype of the weight by which one product gives queries, keys and values; None: there is none that may be read.
    joint: torch.dtype | None
    qk_norm: bool  # whether queries and keys are normalised
    # Sizes.
    batch: int
    tokens: int
    keys: int  # number of tokens that keys and values come from, without cached ones
    active: int  # K, the largest number of heads that a token may run
    # Routing.
    choice: str  # see `Routing.choice`
    all_heads: bool  # see `RoutingForm.all_heads`
    counted: bool  # whether every token runs just K heads
    listed: bool  # whether the router listed the pairs
    linear: torch.dtype | None  # see `RoutingForm.linear`
    # Options of the call.
    given: torch.dtype  # of the tokens
    dtype: torch.dtype  # of the products
    tf32: bool  # whether a GPU multiplies them in tf32
    mask: MaskForm | None
    is_causal: bool
    rotary: bool
    queries: bool  # whether the router read the queries, so that they are projected already
    context: bool  # whether keys and values come from other tokens
    cache: str  # "": none; "tokens": of the tokens before; "context": of a context
    dropout: bool
    # The mode.
    training: bool  # whether the layer is in training mode
    gradients: bool  # whether gradients are recorded
    mode: str  # "eager", "compiled", or "traced": exported, or without values for another reason

    # Methods, not properties: where a size is a symbol, torch.compile of torch 2.10 cannot trace a NamedTuple's property.
    def one_weight(self) -> bool:
        """Return whether all sequences are multiplied by the weights of the same heads."""
        return self.choice == "all" or (self.choice == "sequence" and self.batch == 1)

    def trains(self) -> bool:
        """Return whether the call belongs to training.

        `gradients` alone would not do: reentrant checkpointing runs forward once without and once with gradients, and the
        same executor must run both times, so that dropout is the same.
        """
        return self.training or self.gradients


def sign(
    layer: nn.Module, call: Call, mode: str | None = None, form: RoutingForm | None = None
) -> Signature:
    """Return the signature of a call of a routed layer.

    Args:
        layer: the layer that is called.
        call: the call.
        mode: see `Signature.mode`; None: that of the call, or the present one.
        form: of the routing, for a call that is not yet routed; None: that of `call.routing`.
    """
    x = call.x
    if form is None:
        form = call.routing.form()
    if mode is None:
        mode = call.mode or present_mode(x)
    device = x.device
    path = kernels.path(device.type)
    dtype = product_dtype(x)
    batch, tokens, _ = x.shape
    keys = tokens
    if call.context is not None:
        keys = call.context.shape[1]
    joint = layer.joint_weight()
    if joint is not None:
        joint = joint.dtype
    router = layer._modules["router"]  # see `HeadMixtureAttention.route_by_operator`
    active = form.count
    if active is None:
        active = router.budget.active
    return Signature(
        device=device,
        path=path,
        layer=type(layer),
        router=type(router),
        scope=layer.scope,
        variant=layer.variant,
        heads=layer.num_heads,
        head_dim=layer.head_dim,
        kv_heads=layer.kv_heads,
        dim=layer.dim,
        readable=all(map(plain, layer.projections)),
        joint=joint,
        qk_norm=layer.qk_norm,
        batch=batch,
        tokens=tokens,
        keys=keys,
        active=active,
        choice=form.choice,
        all_heads=form.all_heads,
        counted=form.count is not None,
        listed=form.listed,
        linear=form.linear,
        given=x.dtype,
        dtype=dtype,
        tf32=dtype == torch.float32 and device.type == "cuda" and uses_tf32(),
        mask=_form_of(call.attn_mask),
        is_causal=call.is_causal,
        rotary=call.rotary is not None,
        queries=call.q is not None,
        context=call.context is not None,
        cache=_kind_of(call.cache),
        dropout=call.dropout_p > 0,
        training=layer.training,
        gradients=torch.is_grad_enabled(),
        mode=mode,
    )


def _form_of(mask: Tensor | None) -> MaskForm | None:
    if mask is None:
        return None
    axes = "".join(axis for axis, size in zip("BHN", mask.shape) if size > 1)
    return MaskForm(mask.dtype, axes, mask.requires_grad)


def _kind_of(cache: object) -> str:
    if cache is None:
        return ""
    if isinstance(cache, ContextCache):
        return "context"
    return "tokens"


def words(signature: Signature, executor: type) -> str:
    """Write all of a signature that decides how long an executor takes, except the sizes of the call.

    Measurements are looked up by these words. Not in them are facts that leave no choice, such as a hook on a projection.
    """
    s = signature
    mode = "training" if s.trains() else "inference"
    parts = [
        f"{executor.__name__} {mode} {s.heads} heads of {s.head_dim}, {s.kv_heads} of keys, {s.dim} wide,",
        f"{s.given} in {s.dtype} {s.device.type} {s.layer.__name__} {s.router.__name__} per {s.scope}",
    ]
    for present, word in (
        (s.mode == "compiled", "compiled"),
        (s.is_causal, "causal"),
        (s.rotary, "rotary"),
        (s.queries, "queries"),
        (s.context, "context"),
        (s.cache, "cache"),
        (s.dropout, "dropout"),
        (s.variant, s.variant),
        (s.choice == "all" and not s.all_heads, "one choice"),
    ):
        if present:
            parts.append(word)
    if s.mask is not None:
        parts += [str(s.mask.dtype), *s.mask.axes]
        if s.mask.learned:
            parts.append("learned")
    return " ".join(parts)

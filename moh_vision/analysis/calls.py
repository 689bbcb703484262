"""Which executor the attention layers of a model take in a call, and how many heads it computes. Nothing is run."""

from __future__ import annotations

import contextlib
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

from moh_vision.attention import kernels
from moh_vision.attention.executors import choose
from moh_vision.attention.executors.masked import is_short, product_dtype
from moh_vision.attention.executors.packed import has_static_shapes, products_of_sequences
from moh_vision.attention.kernels.eager import dense_pays
from moh_vision.attention.routers.common import TopKRouter
from moh_vision.attention.routing import Call, Pairs, Routing
from moh_vision.models.foveal_attention import CosineAttention


class Conditions(NamedTuple):
    """How a model is called; the executor that `auto` takes depends on it."""

    batch: int = 1
    device: torch.device = torch.device("cpu")
    dtype: Optional[torch.dtype] = None  # of autocast; None: no autocast
    train: bool = False
    compiled: bool = False  # by torch.compile

    def __str__(self) -> str:
        dtype = "float32" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        call = "a training step" if self.train else "a call without gradients"
        return f"{call} on {self.device.type}, batch {self.batch}, {dtype}" + ", compiled" * self.compiled


ALONE = Conditions()


class Computed(NamedTuple):
    """The heads that one attention layer computes in a call, by an executor."""

    executor: str
    reason: str
    active: int  # heads that a token needs
    queries: int
    keys: int  # key-value heads
    scores: int
    outputs: int


def all_heads(layer: nn.Module, reason: str = "every head may run") -> Computed:
    """What "masked" computes in a HeadMixtureAttention."""
    H = layer.num_heads
    return Computed("masked", reason, layer.budget.active, H, layer.kv_heads, H, H)


def watch(layer: nn.Module, conditions: Conditions, note: Callable[[Computed], None]) -> None:
    """Have a HeadMixtureAttention on the device "meta" tell `note` what each call computes under these conditions.

    It asks the code that decides when the model runs: `choose`, or what TransNeXt's and transformers' layers have instead.
    Which heads the tokens choose is not known without running. They are taken to be spread evenly over the heads.
    """
    kind = type(layer)

    def decide(call: Call, decision: Callable[[Call], tuple]) -> None:
        call = _placed(layer, call, conditions)
        device, dtype = conditions.device.type, conditions.dtype
        autocast = contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype)
        with torch.set_grad_enabled(conditions.train), autocast:
            name, reason = decision(call)
            if name == "packed" and conditions.compiled and not has_static_shapes(call.routing, layer.path_of(call)):
                name, reason = "masked", "compiled, and neither C++ operators nor Triton's kernels run the call"
            note(_computed(layer, name, reason, call))

    def by_name(call: Call) -> tuple:
        if not layer.fused_attn:
            return "masked", "fused_attn is False"
        return choose(layer, call) if layer.executor == "auto" else (layer.executor, "as configured")

    def execute(call: Call, name: Optional[str] = None) -> Tensor:
        decide(call, by_name)
        return kind.execute(layer, call, name)

    def skips_heads(x: Tensor, routing: Routing) -> bool:
        def decision(call: Call) -> tuple:
            packed = kind.skips_heads(layer, call.x, call.routing) and not conditions.compiled
            return ("packed", "it pays here") if packed else ("masked", "skipping heads does not pay here")

        decide(Call(x, routing, dropout_p=layer.attn_drop.p if layer.training else 0.0), decision)
        return False

    def executor_of(x: Tensor, routing: Routing, mask: Optional[Tensor], rotary, past, **kwargs) -> None:
        past = None if conditions.train else past  # that its forward makes, and training does not

        def decision(call: Call) -> tuple:
            found = kind.executor_of(layer, call.x, call.routing, call.attn_mask, rotary, past, **kwargs)
            causal = layer.is_causal and call.attn_mask is None
            name, reason = by_name(call._replace(is_causal=causal) if found is None else found[1])
            if found is None or conditions.compiled:
                return "masked", reason if name == "masked" else "transformers' attention takes the call"
            return found[0], reason

        decide(Call(x, routing, attn_mask=mask), decision)

    if isinstance(layer, CosineAttention):
        layer.skips_heads = skips_heads
    elif hasattr(layer, "executor_of"):  # transformers' layers
        layer.executor_of = executor_of
    else:
        layer.execute = execute


def _placed(layer: nn.Module, call: Call, conditions: Conditions) -> Call:
    """A call of a sequence on "meta" as one of the whole batch on the device, in tensors that take no memory."""
    device, batch = conditions.device, conditions.batch

    def like(x: Optional[Tensor], times: int = 1) -> Optional[Tensor]:
        if x is None:
            return None
        return torch.zeros((), dtype=x.dtype, device=device).expand(x.shape[0] * times, *x.shape[1:])

    routing = call.routing
    if routing.active is not None:
        active = _even_choice(layer, routing.active.shape[0] * batch, routing.active.shape[1]).to(device)
        counts = active.sum(1).float() * (call.x.shape[1] // active.shape[1])
        operators = kernels.path(device.type) != "torch"  # they list the pairs of what they route
        lists = operators and isinstance(layer.router, TopKRouter) and not layer.needs_query
        none = torch.empty(0, dtype=torch.int32, device=device)
        stats = routing.stats._replace(counts=counts)
        routing = Routing(None, active, stats, Pairs(none, none) if lists else None)
    x, context, q = like(call.x, batch), like(call.context, batch), like(call.q, batch)
    return call._replace(x=x, routing=routing, context=context, q=q, attn_mask=like(call.attn_mask))


def _active(layer: nn.Module, routing: Routing) -> int:
    """Heads that a token needs: of the budget, or of one expert where MAE has drawn one."""
    left_out = 0 if routing.active is None else getattr(layer.router, "leave_out", 0)
    return layer.budget.active - left_out


def _even_choice(layer: nn.Module, sequences: int, tokens: int) -> Tensor:
    """Which heads run, [B, N, H], when tokens choose all candidates equally often and one after the other."""
    H, leave_out = layer.num_heads, getattr(layer.router, "leave_out", 0)
    shared = 0 if leave_out else layer.budget.shared
    routed = layer.budget.active - leave_out - shared
    active = torch.zeros(sequences * tokens, H, dtype=torch.bool)
    active[:, :shared] = True
    if routed:
        first = torch.arange(len(active)).unsqueeze(1) * routed
        active.scatter_(1, shared + (first + torch.arange(routed)) % (H - shared), True)
    return active.view(sequences, tokens, H)


def _computed(layer: nn.Module, name: str, reason: str, call: Call) -> Computed:
    """What an executor computes of a call: see `HeadMixtureAttention.execute` and `packed`."""
    H, G, K = layer.num_heads, layer.kv_heads, _active(layer, call.routing)
    foveal, dtype = isinstance(layer, CosineAttention), product_dtype(call.x)
    masks = call.attn_mask is not None or call.is_causal or call.dropout_p > 0
    if name == "varlen" and (masks or call.x.device.type != "cuda" or not is_short(dtype)):
        name, reason = "masked", "varlen needs a GPU, 16 bits, and no mask"
    if name in ("masked", "reference") or call.routing.active is None:
        return all_heads(layer, reason)._replace(executor=name, active=K)
    if name != "packed" or not (foveal or layer.skips_projections(call)):
        return Computed(name, reason, K, H, G, K, H)
    path = layer.path_of(call)
    if path == "triton":
        return Computed(name, reason, K, K, K, K, K)
    B, N, _ = call.x.shape
    x = torch.zeros((), dtype=dtype, device=call.x.device).expand(call.x.shape)
    whole = products_of_sequences(call, x, path)
    narrow = kernels.native(x.device, x.dtype) or whole or not dense_pays(x.new_empty(B * N, 0), K * B * N, H)
    queries = K if narrow and not layer.needs_query else H
    keys = K if whole and call.cache is None and G == H and not foveal else G
    return Computed(name, reason, K, queries, keys, K, K if narrow else H)

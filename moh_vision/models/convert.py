"""Convert a dense, trained model in place into one with routed heads and the same output."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models._input import update_model_args
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention, EvaBlock
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from moh_vision.attention import (
    BudgetSpec,
    HeadBudget,
    HeadMixtureAttention,
    ModelBudgets,
    Router,
    attention_layers,
    full_budget,
    mlp_layers,
    model_budgets,
    resolve_budget,
    running,
)
from moh_vision.attention.budget import log, shaped
from moh_vision.attention.model_heads import single_routed
from moh_vision.attention.routers import ROUTERS, router_class, shared_share
from moh_vision.models.head_budgets import record_budget, saved_budget
from moh_vision.models.head_order import Batch, order_by_contribution
from moh_vision.models.mlp_groups import (
    DEFAULT_GROUPS,
    converted_mlp_budgets,
    dense_mlps,
    mlp_options,
    route_mlps,
)
from moh_vision.models.registry import converter_for

# Classes of timm's models that `convert` takes -> their block class and attention classes.
TAKEN = {
    VisionTransformer: (Block, (Attention,)),
    VisionTransformerDistilled: (Block, (Attention,)),
    Eva: (EvaBlock, (EvaAttention, AttentionRope)),
}
# Other families of timm that users ask for, and why `convert` refuses them.
WHY_NOT = {
    "SwinTransformer": "it attends inside shifted windows, with a learnt bias for each head",
    "SwinTransformerV2": "it attends inside shifted windows, with a learnt bias and temperature for each head",
    "Beit": "its attention adds a learnt bias of relative positions for each head",
}


def convert(  # noqa: PLR0913
    model: nn.Module,
    head_budget: BudgetSpec | None = None,
    router: str | None = None,
    scope: str = "token",
    executor: str = "auto",
    router_kwargs: dict | None = None,
    calibrate: Batch | Iterable[Batch] | None = None,
    group: bool = False,
    mlp_budget: BudgetSpec | None = None,
    mlp_groups: int = DEFAULT_GROUPS,
) -> nn.Module:
    """Turn a dense ViT, DiT or LLaMA-style language model into one with routed heads, in place.

    `moh_vision.models.registry` finds the converter of a model's class. transformers' LlamaForCausalLM,
    Qwen2ForCausalLM and Qwen3ForCausalLM are converted by `convert_llama` in
    `moh_vision.language.models.llama.model`; its docstring says what is different there. All other models:

    A timm VisionTransformer becomes a `MoHVisionTransformer`, a distilled DeiT keeps both its classifiers, an
    Eva becomes a `MoHEva`; `dit_*`, and `moh_vit_*` with router "dense", keep their class. From diffusers' DiT
    a new `MoHDiTTransformer2DModel` is made, with the same weights and outputs. All modules outside attention,
    and the projections and norms inside, stay the same objects, except that an Eva's separate projections or
    biases of q, k and v are joined into one. With all heads active, the output is the dense model's, see
    `Router.become_dense`: the routers of MoH and "gated" start at zero, `query_norm` has no parameters, MAE's gate is
    uniform.

        convert(model)                                  # nothing changes yet
        set_head_budget(model, 0.75)                    # the shared heads stay
        convert(model, head_budget=0.75)                # or at once: 40 % of each layer's active heads are shared

    Args:
        model: a timm VisionTransformer (augreg, DeiT, DINOv2, SigLIP; registers, LayerScale, qk-norm,
            any pooling) or Eva (DINOv3, EVA-02; rotary positions that all heads share), one of our dense
            models, diffusers' DiTTransformer2DModel, or a language model as above.
        head_budget: see `moh_vision.attention.resolve_budget`; a float is the share in every layer, here and in
            later calls of set_head_budget. None: all heads run, and a fifth of them (at least one) is shared;
            layers with fewer than four heads share none.
        router: "moh", "query_norm", or one that runs all heads and takes no head_budget (not in language
            models): "mae", "gated", or "dense" for a baseline; or one of your own that has a `become_dense`. None: "moh",
            in language models "query_norm".
        scope, executor, router_kwargs: see `HeadMixtureAttention`.
        calibrate: a few batches: images [B, in_chans, height, width], or for a DiT tuples of (noisy
            latents, timesteps, class labels). A tensor is one batch. The heads of each layer are sorted by
            contribution (see `head_lengths`), because the first heads become the shared ones; with mlp_budget
            also the hidden channels of each MLP, so that the first group has the strongest. The dense output
            stays the same up to the order of summation.
        group: for language models, see `convert_llama`.
        mlp_budget: also route groups of the MLPs, of ViTs and DiTs with scope "sample"; a float is the share in every
            layer, 1.0 changes nothing yet. None: the MLPs stay dense.
        mlp_groups: groups of each MLP, a divisor of its hidden width.

    Returns:
        The model. timm's `save_for_hf` saves a timm model under the name "moh_vit", with its timm name as the
        argument `base`. Layers with one routed head are logged, as by `set_head_budget`.

    Raises:
        ValueError: the model or its attention is of an unknown class, or the budget is impossible; the model
            is unchanged then.
    """
    # One batch. A mapping is recognised by `items`: transformers' BatchEncoding is not a dict.
    if isinstance(calibrate, Tensor) or hasattr(calibrate, "items"):
        calibrate = [calibrate]
    if calibrate is not None and mlp_budget is not None:
        calibrate = list(calibrate)  # two passes: one measures heads, one the channels of MLPs
    model = apply(
        model,
        (head_budget, router, scope, executor, router_kwargs, calibrate, group),
        mlp_budget,
        mlp_groups,
    )
    if remark := single_routed(model):
        log.warning(remark)
    return model


def apply(
    model: nn.Module, of_heads: tuple, mlp_budget: BudgetSpec | None, mlp_groups: int
) -> nn.Module:
    """Do the work of `convert`.

    Args:
        model: dense.
        of_heads: the arguments of a converter after the model, see `route_heads`.
        mlp_budget, mlp_groups: see `convert`.
    """
    converter = converter_for(model, route_heads)
    _, router, scope, executor, router_kwargs, calibrate, _ = of_heads
    budgets = None
    if mlp_budget is not None:
        refuse_mlp_groups(model)
        # The MLPs of our own blocks stay the same objects: what is wrong with them is told before anything changes.
        if hasattr(model, "blocks"):
            budgets = converted_mlp_budgets(model, mlp_budget, mlp_groups, scope)
    model = converter(model, *of_heads)
    if mlp_budget is not None:
        if budgets is None:  # diffusers' DiT, of which the converter has made one of ours
            budgets = converted_mlp_budgets(model, mlp_budget, mlp_groups, scope)
        if calibrate is not None:
            with all_running(model):
                order_by_contribution(model, (), dense_mlps(model), calibrate)
        route_mlps(model, budgets, mlp_options(executor, router or "moh", router_kwargs))
        record_mlp_groups(model, mlp_groups)
    return model


def refuse_mlp_groups(model: nn.Module) -> None:
    """Refuse mlp_budget for models other than ViTs and DiTs."""
    if not hasattr(model, "blocks") and not hasattr(model, "transformer_blocks"):
        raise ValueError(f"mlp_budget is for ViTs and DiTs, not for {type(model).__name__}")


def record_mlp_groups(model: nn.Module, groups: int) -> None:
    """Record the groups of a converted model's MLPs, and its present budgets, for its library to save."""
    if hasattr(model, "register_to_config"):
        model.register_to_config(mlp_groups=groups, **saved_budget(model))
    else:
        update_model_args(model, mlp_groups=groups)


def route_heads(
    model: nn.Module,
    head_budget: BudgetSpec | None,
    router: str | None,
    scope: str,
    executor: str,
    router_kwargs: dict | None,
    calibrate: Iterable[Batch] | None,
    group: bool,
) -> nn.Module:
    """Replace the attention layers of a vision model, in place; converters then set its class.

    Args:
        model: returned with a routed layer in place of the `attn` of every block.
        head_budget, router, scope, executor, router_kwargs, calibrate: see `convert`.
        group: refused, because it is for language models.
    """
    if group:
        raise ValueError(
            "group=True is for language models with key-value heads that several query heads share"
        )
    if router is None:
        router = "moh"
    chooser = router_class(router)
    if not chooser.can_become_dense():
        known = ", ".join(name for name, other in ROUTERS.items() if other.can_become_dense())
        raise ValueError(f"router {router!r} cannot start as plain attention: give one of {known}")
    attentions = dense_attentions(model)
    heads = [attention.num_heads for attention in attentions]
    widths = [attention.head_dim for attention in attentions]
    share = 1.0 if head_budget is None else head_budget
    # Before any fine-tuning, the same share in every layer costs the least accuracy.
    spec = shaped(share, "uniform")
    if head_budget is not None:
        budgets = resolve_budget(spec, len(heads), heads, widths, shared_share=shared_share(router))
    elif chooser.all_heads:
        budgets = [HeadBudget(h, width, h, 0) for h, width in zip(heads, widths)]
    else:
        full = full_budget(heads, shares=shared_share(router) > 0)
        budgets = resolve_budget(full, len(heads), heads, widths)
    options = dict(router=router, scope=scope, executor=executor, router_kwargs=router_kwargs)
    layers = [
        routed_attention(attention, budget, **options)
        for attention, budget in zip(attentions, budgets)
    ]
    if calibrate is not None:
        # `model` still runs its dense attentions, which hold the same projections as `layers`.
        order_by_contribution(model, layers, (), calibrate)

    for block, layer in zip(model.blocks, layers):
        block.attn = layer
    if hasattr(model, "register_to_config"):
        model.register_to_config(**options)
    else:
        given = {name: value for name, value in options.items() if value is not None}
        update_model_args(model, **given)
    record_budget(model, spec, "uniform")
    return model


def dense_attentions(model: nn.Module) -> list[nn.Module]:
    """Return the attention layers of a timm model, or of our model with router "dense"."""
    if hasattr(model, "forward_routed"):
        attentions = attention_layers(model)
        if not all(attn.router.plain_attention for attn in attentions):
            if all(attn.router.all_heads for attn in attentions):
                raise ValueError("the model has gates already, and runs all its heads")
            raise ValueError(
                "the model has routed heads already: set_head_budget changes how many run"
            )
        if not all(type(attn) is HeadMixtureAttention for attn in attentions):
            raise ValueError(
                f"the attention of {type(model).__name__} is built with its router: create it with router='moh' and "
                "load the dense weights with load_checkpoint"
            )
        return attentions
    if type(model) not in TAKEN:
        name = type(model).__name__
        problem = (
            "convert takes timm's VisionTransformer, distilled DeiT and Eva, diffusers' DiTTransformer2DModel, "
            f"transformers' Llama-, Qwen2- and Qwen3ForCausalLM and our own dense models, not {name}"
        )
        if name in WHY_NOT:
            problem += f": {WHY_NOT[name]}"
        raise ValueError(problem)
    if getattr(model, "rope_mixed", False):
        raise ValueError(
            "its rotary positions are learnt for each layer and head (mixed), ours are the same for all heads"
        )
    block_class, attention_classes = TAKEN[type(model)]
    attentions = []
    for i, block in enumerate(model.blocks):
        attn = getattr(block, "attn", None)
        if type(block) is not block_class or type(attn) not in attention_classes:
            raise ValueError(
                f"blocks.{i} is a {type(block).__name__} with {type(attn).__name__}; only timm's {block_class.__name__} "
                "is known"
            )
        if not isinstance(attn.norm, nn.Identity):
            raise ValueError(
                f"blocks.{i}.attn has a norm over all heads (scale_norm), which would mix the routed ones"
            )
        if attn.gate is not None:
            raise ValueError(
                f"blocks.{i}.attn has a gate over all heads, which routing would skip past"
            )
        attentions.append(attn)
    return attentions


def joined_projection(attn: nn.Module) -> nn.Module:
    """Return an attention's `qkv`, or join the separate projections of timm's Eva into one."""
    if attn.qkv is not None and getattr(attn, "q_bias", None) is None:
        return attn.qkv
    state = join_projections({f"attn.{name}": p for name, p in attn.named_parameters()})
    return linear(state["attn.qkv.weight"], state.get("attn.qkv.bias"))


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Make a linear layer whose parameters hold these tensors and keep their requires_grad."""
    layer = nn.Linear(*reversed(weight.shape), bias=bias is not None, device="meta")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            setattr(layer, name, nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad))
    return layer


def join_projections(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the query, key and value projections of every attention into one `qkv`.

    timm's Eva has three projections (q_proj, k_proj, v_proj), or one without bias and two separate biases
    (q_bias, v_bias). A missing key bias becomes zeros.
    """
    joined: dict[str, Tensor] = {}
    projections: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state_dict.items():
        # Such as blocks.0.attn.q_proj.weight and blocks.0.attn.q_bias.
        match = re.fullmatch(r"(.*\battn\.)([qkv])_(?:proj\.)?(weight|bias)", name)
        if match:
            projections.setdefault(f"{match[1]}qkv.{match[3]}", {})[match[2]] = tensor
        else:
            joined[name] = tensor
    for name, parts in projections.items():
        if name.endswith("bias") and "q" in parts:
            parts.setdefault("k", torch.zeros_like(parts["q"]))
        joined[name] = torch.cat([parts[which] for which in "qkv"])
    return joined


def routed_attention(attn: nn.Module, budget: HeadBudget, **options: Any) -> HeadMixtureAttention:
    """Return a routed layer that holds the modules of `attn`; it is plain attention while all heads run."""
    qkv = joined_projection(attn)
    # Our attention has the first name, timm's Eva the second, timm's ViTs neither.
    kv_heads = getattr(attn, "kv_heads", getattr(attn, "num_kv_heads", None))
    rotary_pairs = getattr(attn, "rotary_pairs", not getattr(attn, "rotate_half", True))
    layer = HeadMixtureAttention(
        qkv.in_features,
        budget,
        attn_drop=attn.attn_drop.p,
        fused_attn=attn.fused_attn,
        qk_norm=not isinstance(attn.q_norm, nn.Identity),
        kv_heads=kv_heads,
        rotary_pairs=rotary_pairs,
        device=qkv.weight.device,
        dtype=qkv.weight.dtype,
        **options,
    )
    layer.qkv = qkv
    layer.proj = attn.proj
    layer.proj_drop = attn.proj_drop
    layer.q_norm = attn.q_norm
    layer.k_norm = attn.k_norm
    layer.router.become_dense()
    return layer.train(attn.training)


def share_strongest_heads(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Sort the heads of a ViT or DiT by contribution, and the hidden channels of MLPs whose routers are zero.

    Its heads' weights are dense and their routers untrained. Routers that can become plain attention do, so that at first the
    strongest heads and groups of each layer run, with weight 1. Loading dense weights has zeroed the routers of MLPs; where they are not
    zero they are trained, and their groups must stay.

    Args:
        batches: see `convert`.
    """
    layers = attention_layers(model)
    if not all(type(layer) is HeadMixtureAttention for layer in layers):
        raise ValueError(f"heads are ordered in ViTs and DiTs, not in a {type(model).__name__}")
    routers = [layer.router for layer in layers]
    # Contributions are measured with all heads running.
    try:
        for layer in layers:
            all_shared = HeadBudget(layer.num_heads, layer.head_dim, layer.num_heads, 0)
            layer.router = ROUTERS["dense"](layer.dim, all_shared)
        with all_running(model):
            untrained = [mlp for mlp in mlp_layers(model) if not has_weights(mlp.router)]
            order_by_contribution(model, layers, untrained, batches)
    finally:
        for layer, router in zip(layers, routers):
            layer.router = router
            if router.can_become_dense():
                router.become_dense()


def has_weights(router: Router) -> bool:
    """Return whether any weight of a router is not zero."""
    return any(parameter.any() for parameter in router.parameters())


@contextmanager
def all_running(model: nn.Module) -> Iterator[None]:
    """Run all heads and all groups of a model's MLPs inside a `with` block."""
    heads, groups = model_budgets(model)
    all_heads = tuple(budget.all_active for budget in heads)
    all_groups = tuple(budget.all_active for budget in groups)
    with running(model, ModelBudgets(all_heads, all_groups)):
        yield

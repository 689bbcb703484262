"""Groups of the MLP in vision models: the budget of a new model, and blocks whose MLP is routed."""

from collections.abc import Sequence

from timm.layers import Mlp
from torch import Tensor, nn

from moh_vision.attention import (
    BudgetSpec,
    GroupMixtureMlp,
    HeadBudget,
    RoutingStats,
)
from moh_vision.attention.budget import GROUPS, SHARED_SHARE
from moh_vision.attention.model_heads import new_router
from moh_vision.models.head_budgets import resolve_and_note

DEFAULT_GROUPS = 8  # of an MLP
ROUTER = "moh"  # of the groups


def new_mlp_budgets(
    model: nn.Module,
    spec: BudgetSpec | None,
    shape: str | None,
    groups: int,
    hidden: Sequence[int],
    scope: str,
) -> tuple[HeadBudget, ...] | None:
    """Resolve the budget of the MLP groups of a model that is being built, and note in the model what it was made of.

    Args:
        model: its attributes `mlp_budget_spec` and `mlp_budget_shape` are set.
        spec: the constructor's mlp_budget; None: every MLP is dense.
        shape: the constructor's mlp_budget_shape.
        groups: of an MLP.
        hidden: the hidden width of every layer's MLP.
        scope: the model's.

    Returns:
        The budget of every layer's groups; None: dense.

    Raises:
        ValueError: for groups that do not divide a width, for a scope that chooses per token, and as `resolve_budget`.
    """
    if spec is None:
        model.mlp_budget_spec = model.mlp_budget_shape = None
        return None
    if scope != "sample":
        raise ValueError(
            f"mlp_budget {spec!r} needs scope 'sample', not {scope!r}: with a choice for every token each row of the MLP's "
            "products would have another weight, which takes longer than all groups"
        )
    widths = [group_width(groups, width) for width in hidden]
    counts = [groups] * len(widths)
    return resolve_and_note(model, spec, shape, counts, widths, SHARED_SHARE, GROUPS)


def group_width(groups: int, hidden: int) -> int:
    """Return the width of a group; refuse groups that do not divide the hidden width of an MLP."""
    whole = isinstance(groups, int) and not isinstance(groups, bool)
    if not whole or groups < 1 or hidden % groups:
        raise ValueError(
            f"mlp_groups {groups!r} is no whole number that divides the hidden width {hidden} of the MLP"
        )
    return hidden // groups


def mlp_options(executor: str, router: str, router_kwargs: dict | None) -> dict:
    """Return the arguments of every `GroupMixtureMlp` of a model, from those of its attention.

    Groups are chosen by MoH's router whatever chooses the heads, with the options of the heads' router if this is MoH's too.
    """
    options = dict(executor=executor, router=ROUTER)
    if router == ROUTER:
        options["router_kwargs"] = router_kwargs
    return options


def run_mlp(
    mlp: nn.Module, x: Tensor, stats: list[RoutingStats] | None, condition: Tensor | None = None
) -> Tensor:
    """Call the MLP of a block, dense or routed: x [B, N, C] -> [B, N, C]; a routed one appends its statistics to `stats`."""
    if not isinstance(mlp, GroupMixtureMlp):
        return mlp(x)
    y, layer_stats = mlp(x, condition)
    if stats is not None:
        stats.append(layer_stats)
    return y


def routed_mlp(mlp: nn.Module, budget: HeadBudget, **options) -> GroupMixtureMlp:
    """Wrap the modules of a dense MLP in a routed layer.

    Args:
        mlp: timm's Mlp.
        budget: of its groups.
        **options: of `GroupMixtureMlp`.
    """
    # On the meta device, so that no weights are drawn for linear layers that the dense ones replace.
    layer = GroupMixtureMlp(mlp.fc1.in_features, budget, device="meta", **options)
    for name in ("fc1", "act", "drop1", "fc2", "drop2"):
        setattr(layer, name, getattr(mlp, name))
    layer.train(mlp.training)
    layer.router = new_router(layer, budget)
    return layer


def dense_mlps(model: nn.Module) -> list[Mlp]:
    """Return the MLP of every block of a dense model.

    Raises:
        ValueError: for an MLP that is none of two linear layers around an activation, or is routed already.
    """
    mlps = []
    for number, block in enumerate(model.blocks):
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, GroupMixtureMlp):
            raise ValueError(
                "the model has routed MLPs already: set_head_budget(model, mlp=...) changes how many groups run"
            )
        check_plain(mlp, f"blocks.{number}.mlp")
        mlps.append(mlp)
    return mlps


def check_plain(mlp: nn.Module | None, name: str) -> None:
    """Refuse an MLP, called `name` in the model, that is not two linear layers around an activation."""
    plain = type(mlp) is Mlp and isinstance(mlp.norm, nn.Identity)
    if not plain:
        raise ValueError(
            f"mlp_budget: {name} is a {type(mlp).__name__}, not two linear layers around an activation"
        )
    for part in ("fc1", "fc2"):
        linear = getattr(mlp, part)
        if type(linear) is not nn.Linear:
            class_name = f"{type(linear).__module__}.{type(linear).__name__}"
            raise ValueError(
                f"mlp_budget: {name}.{part} is a {class_name}, not a plain linear layer: convert first, and quantise or add "
                "adapters afterwards"
            )


def route_mlps(model: nn.Module, budgets: Sequence[HeadBudget], options: dict) -> None:
    """Replace the MLPs of a dense model, in place: the dense MLPs while all groups run.

    Args:
        model: see `dense_mlps`.
        budgets: the groups of every layer.
        options: arguments of `GroupMixtureMlp`.
    """
    mlps = dense_mlps(model)
    for block, mlp, budget in zip(model.blocks, mlps, budgets, strict=True):
        block.mlp = routed_mlp(mlp, budget, **options)
        block.mlp.router.become_dense()


def refuse_other_groups(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Raise ValueError if weights have routers of MLPs that choose among more or fewer groups than the model's.

    The model has taken the shared groups of the weights already, see `take_shared_heads`.
    """
    for name, mlp in model.named_modules():
        if not isinstance(mlp, GroupMixtureMlp):
            continue
        prefix = f"{name}.router."
        for key, tensor in mlp.router.state_dict(prefix=prefix).items():
            if key in state_dict and state_dict[key].shape != tensor.shape:
                raise ValueError(
                    f"{name} chooses among another number of groups than the model's mlp_groups, {mlp.num_heads}"
                )


def converted_mlp_budgets(
    model: nn.Module, spec: BudgetSpec, groups: int, scope: str
) -> tuple[HeadBudget, ...]:
    """Return the budgets with which `convert` routes the MLPs of a dense model, and note in it what they were made of.

    A plain share is the same in every layer, as that of the heads is. See `new_mlp_budgets`.
    """
    hidden = [mlp.fc1.out_features for mlp in dense_mlps(model)]
    return new_mlp_budgets(model, spec, "uniform", groups, hidden, scope)

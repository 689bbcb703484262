"""How many heads of each layer run: `HeadBudget` for one layer, `resolve_budget` for all layers of a model.

What users write (a `BudgetSpec`) becomes one `HeadBudget` per layer here. These functions handle the budget of a model:

    make a model      default_budget     attention/routers         the head_budget that a router has where a user gives none
                      new_budgets        models/head_budgets.py    resolve and note the budget of a model being built
                      resolve_budget     here                      the budgets of layers that do not exist yet
    read it           head_budget        attention/model_heads.py  the table that users see
                      model_budgets      attention/model_heads.py  the budget of every layer, of attention and MLPs
                      budgets_at         attention/model_heads.py  the budgets that the layers would have at another share
    set it            set_head_budget    models/head_budgets.py    run another share from now on, and record it
    set it for now    running            attention/model_heads.py  run other budgets inside a `with` block
    record it         record_budget      models/head_budgets.py    write it where timm, diffusers or transformers saves it
                      saved_budget       models/head_budgets.py    arguments that make a model with the present budget
    load weights      take_shared_heads  models/head_budgets.py    share the heads that are shared in the weights
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

log = logging.getLogger("moh_vision.attention")
BudgetSpec = float | str | Sequence[Sequence[int]]

NEAR = 0.05  # rounding to whole heads may change a share by this much without a warning

ACTIVE_SHARE = 0.75  # default share of active heads among all heads

# Default share of shared heads among the active ones. Jin 2024, section 4.5 and table 7: accuracy is flat from 14 to 74 %,
# the advice is "greater than 40 %".
SHARED_SHARE = 0.4

SHAPES = ("ramp", "uniform")  # how a share is spread over the layers


class Parts(NamedTuple):
    """What a budget counts, in the words of messages."""

    argument: str
    """The name of the argument that gives the budget."""
    one: str
    many: str


HEADS = Parts("head_budget", "head", "heads")
GROUPS = Parts("mlp_budget", "group", "groups")


class BudgetError(ValueError):
    """Raised for a budget that cannot be parsed, or that the layers cannot run.

    Args and attributes:
        parts: what the budget counts.
        reason: the message without the name of the argument.
        advice: end of the message: what to give instead; "" where the reason already says it.
        layer: index of the layer whose pair is refused; None: the budget as a whole.
    """

    def __init__(self, parts: Parts, reason: str, advice: str = "", layer: int | None = None):
        super().__init__(parts, reason, advice, layer)
        self.parts = parts
        self.reason = reason
        self.advice = advice
        self.layer = layer

    def __str__(self) -> str:
        message = self.parts.argument
        if self.layer is not None:
            message += f", layer {self.layer}:"
        message += f" {self.reason}"
        if self.advice:
            message += f"; {self.advice}"
        return message


class Share(NamedTuple):
    """A budget that the user gives as a share, parsed by `parse_share`."""

    shape: str
    """How the share is spread over the layers: "ramp" or "uniform"."""
    active: float
    """Active heads over all heads."""
    shared: float | None
    """Shared heads over active heads; None: the user does not say."""


@dataclass(frozen=True)
class HeadBudget:
    """The heads of one attention layer.

    Args:
        heads: H, number of all heads of the layer. Heads 0 .. shared - 1 are the shared ones.
        head_dim: D, the width of one head.
        shared: number of heads that run for every token.
        routed: number of heads that a router picks for each token among the other H - shared.

    Raises:
        ValueError: if the numbers do not describe a layer that can run and be trained.
    """

    heads: int
    head_dim: int
    shared: int
    routed: int

    def __post_init__(self):
        if self.heads < 1 or self.head_dim < 1:
            raise ValueError(
                f"a layer needs at least 1 head of width 1, got heads={self.heads}, head_dim={self.head_dim}"
            )
        if self.shared < 0 or self.routed < 0:
            raise ValueError(f"shared={self.shared}, routed={self.routed}: neither may be negative")
        if self.active < 1:
            raise ValueError("shared=0, routed=0: at least 1 must run")
        if self.active > self.heads:
            raise ValueError(
                f"shared={self.shared} + routed={self.routed} = {self.active} of only {self.heads}"
            )
        if self.routed == 0 and self.shared < self.heads:
            raise ValueError(
                f"routed=0 with shared={self.shared} of {self.heads}: the other {self.heads - self.shared} would never run; "
                f"route at least 1, or make all {self.heads} shared"
            )

    @property
    def active(self) -> int:
        """Return K, the number of heads that run for one token."""
        return self.shared + self.routed

    @property
    def candidates(self) -> int:
        """Return E, the number of heads that the router chooses among."""
        return self.heads - self.shared

    @property
    def all_active(self) -> "HeadBudget":
        """Return the budget with which every head runs; the shared heads stay."""
        return replace(self, routed=self.candidates)


def resolve_budget(
    spec: BudgetSpec,
    depth: int,
    heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    group: int = 1,
    shared_share: float = SHARED_SHARE,
    parts: Parts = HEADS,
) -> tuple[HeadBudget, ...]:
    """Turn what a user writes into one `HeadBudget` per layer.

    Args:
        spec: one of
            0.75 or "ramp:0.75": the share of active heads rises linearly with depth, and active heads over all heads of the
                model (the figure that the papers quote) is as near to 75 % as possible. For a share t the first layer
                runs t - d and the last t + d with d = min(1 - t, t / 3), so 0.75 goes from 50 % to 100 %;
            "uniform:0.75": the same number of active heads in all layers with equally many heads, halves rounded up;
            "ramp:0.75:0.6", "uniform:0.75:0.6": the second number is the share of shared heads among the active ones,
                0.4 by default (Jin 2024, section 4.5 and table 7), 0 with router "moa"; "ramp" rounds it over the model,
                "uniform" in each layer;
            [(shared, routed), ...]: one pair per layer, such as `moh_vision.commands.search` writes.
            A layer with routed heads always routes at least one. With few heads per layer a share can leave a layer with
            exactly one, as in the released S/2-75. The renormalised weight of that head is constant, so only the balance
            loss trains the router of that layer.
        depth: number of layers.
        heads: number of heads, one for all layers or one per layer.
        head_dim: width of a head, one for all layers or one per layer.
        group: number of heads that are chosen together (see QueryNormRouter). A share is then rounded to whole groups, and
            pairs must be whole groups.
        shared_share: the share of shared heads among the active ones, if the spec does not give it; see
            `moh_vision.attention.routers.shared_share`.
        parts: HEADS, or the GROUPS of MLPs.

    Raises:
        ValueError: for a spec that the layers cannot run; the message names the layer and the numbers.
    """
    heads = _per_layer("heads", heads, depth)
    head_dim = _per_layer("head_dim", head_dim, depth)
    if group != 1:
        full = [HeadBudget(h, d, h, 0) for h, d in zip(heads, head_dim)]

        def resolve(spec: BudgetSpec, wide: Sequence[HeadBudget]) -> tuple[HeadBudget, ...]:
            counts = [b.heads for b in wide]
            widths = [b.head_dim for b in wide]
            return resolve_budget(spec, depth, counts, widths, 1, shared_share, parts)

        return _in_groups(resolve, spec, full, [group] * depth)
    if isinstance(spec, (list, tuple)):
        pairs = _explicit_pairs(spec, depth, parts)
    else:
        pairs = _pairs_of_share(spec, heads, shared_share, parts)
        active = sum(shared + routed for shared, routed in pairs)
        _warn_once_of_rounding(spec, active, sum(heads), parts)

    budgets = []
    for layer, ((shared, routed), h, d) in enumerate(zip(pairs, heads, head_dim)):
        try:
            budgets.append(HeadBudget(h, d, shared, routed))
        except ValueError as error:
            raise BudgetError(parts, str(error), layer=layer) from None
    return tuple(budgets)


def _pairs_of_share(
    spec: float | str, heads: Sequence[int], shared_share: float, parts: Parts
) -> list[tuple[int, int]]:
    """Return (shared, routed) of each layer for a share of all heads, uniform or a ramp."""
    share = parse_share(spec, parts)
    if share.shared is not None:
        shared_share = share.shared
    # If the active heads suffice for one in every layer, every layer gets at least one.
    enough = math.floor(share.active * sum(heads) + 0.5) >= len(heads)
    active = _active(share, heads, [int(enough)] * len(heads))
    if share.shape == "ramp":
        shared = _shared_of(shared_share, active, heads)
    else:
        shared = [_shared_of(shared_share, [a], [h])[0] for a, h in zip(active, heads)]
    for layer, (a, h) in enumerate(zip(active, heads)):
        if a < 1:
            smallest = _smallest_share(share.shape, heads, [1] * len(heads))
            raise BudgetError(
                parts,
                f"{spec!r}: layer {layer} with {h} {parts.many} would run 0 of them, at least 1 must run; "
                f"the smallest share is {smallest}",
            )
    return [(s, a - s) for s, a in zip(shared, active)]


def full_budget(heads: Sequence[int], shares: bool = True) -> list[list[int]]:
    """Return (shared, routed) pairs with which every head runs; `change_budget` can lower them later.

    A fifth of the heads is shared, but at least one. None is shared with `shares` False (MoA), and in layers of fewer than
    four heads, where a budget of half of the heads would leave no routed head beside a shared one.
    """
    pairs = []
    for h in heads:
        shared = 0
        if shares and h > 3:
            shared = max(h // 5, 1)
        pairs.append([shared, h - shared])
    return pairs


def shape_of(spec: BudgetSpec | None) -> str | None:
    """Return how a budget is spread over the layers, "ramp" or "uniform"; None for a list of pairs, and for no budget."""
    if spec is None or isinstance(spec, (list, tuple)):
        return None
    return parse_share(spec).shape


def shaped(spec: BudgetSpec | None, shape: str | None, parts: Parts = HEADS) -> BudgetSpec | None:
    """Add a shape to a budget that is a share without one: 0.5 and "uniform" make "uniform:0.5". Others stay as they are.

    parts: what the budget counts.
    """
    if shape not in (None, *SHAPES):
        raise ValueError(f"{parts.argument}_shape {shape!r}: expected {' or '.join(SHAPES)}")
    is_share = spec is not None and not isinstance(spec, (list, tuple))
    if shape is None or not is_share or ":" in str(spec):
        return spec
    parse_share(spec, parts)  # raises here, so that the message shows the spec without the shape
    return f"{shape}:{spec}"


def change_budget(
    spec: BudgetSpec,
    budgets: Sequence[HeadBudget],
    groups: Sequence[int] | None = None,
    parts: Parts = HEADS,
) -> tuple[HeadBudget, ...]:
    """Return budgets with other numbers of routed heads for layers that exist; the shared heads stay.

    Args:
        spec: as for `resolve_budget`. A share counts shared and routed heads; pairs must have the layers' shared heads.
        budgets: the present budgets of the layers.
        groups: for each layer the number of heads that are chosen together, see `resolve_budget`; None: 1 in all layers.
        parts: HEADS, or the GROUPS of MLPs.

    Raises:
        BudgetError: for a share that the layers cannot run with their shared heads.
        ValueError: for a list that does not fit the layers, naming the layer and the numbers.
    """
    if groups is not None and any(group != 1 for group in groups):
        return _in_groups(change_budget, spec, budgets, groups)
    if isinstance(spec, (list, tuple)):
        pairs = _explicit_pairs(spec, len(budgets), parts)
        for layer, ((shared, _), b) in enumerate(zip(pairs, budgets)):
            if shared != b.shared:
                raise BudgetError(
                    parts,
                    f"{b.shared} {parts.many} are shared and stay so, not {shared}",
                    layer=layer,
                )
    else:
        pairs = _changed_pairs_of_share(spec, budgets, parts)
    heads = [b.heads for b in budgets]
    widths = [b.head_dim for b in budgets]
    return resolve_budget(pairs, len(budgets), heads, widths, parts=parts)


def _changed_pairs_of_share(
    spec: float | str, budgets: Sequence[HeadBudget], parts: Parts
) -> list[tuple[int, int]]:
    """Return (shared, routed) of each layer for a share of all heads, with the layers' present shared heads."""
    share = parse_share(spec, parts)
    if share.shared is not None:
        raise BudgetError(
            parts,
            f"{spec!r}: the shared {parts.many} of a model stay; leave out {share.shared}",
        )
    heads = [b.heads for b in budgets]
    fixed = [layer for layer, b in enumerate(budgets) if b.candidates == 0]
    if share.active < 1:
        _refuse_fixed_layers(spec, fixed, heads, parts)
    least = _least(budgets)
    active = _active(share, heads, least)
    advice = (
        "give the lower budget when the model is made or converted, "
        f"it then shares fewer {parts.many}"
    )
    for layer, (a, low, b) in enumerate(zip(active, least, budgets)):
        if a < low:
            raise BudgetError(
                parts,
                f"{spec!r}: layer {layer} would run {a} of {b.heads} {parts.many}, "
                f"but {b.shared} are shared and at least 1 is routed; the smallest share is "
                f"{_smallest_share(share.shape, heads, least)}",
                advice,
            )
    if sum(active) > math.floor(share.active * sum(heads) + 0.5) and share.shape == "ramp":
        raise BudgetError(
            parts,
            f"{spec!r}: the shared {parts.many} and one routed {parts.one} per layer are {sum(active)} of "
            f"{sum(heads)} already, and the smallest share is "
            f"{_smallest_share(share.shape, heads, least)}",
            advice,
        )
    return [(b.shared, a - b.shared) for a, b in zip(active, budgets)]


def _refuse_fixed_layers(
    spec: float | str, fixed: Sequence[int], heads: Sequence[int], parts: Parts
) -> None:
    """Raise BudgetError for a share below 1 if some layers have no routed heads; `fixed` has the indices of those layers."""
    if not fixed:
        return
    if len(fixed) == len(heads):
        raise BudgetError(
            parts,
            f"{spec!r}: the model has no routed {parts.many}; moh_vision.convert gives a dense one some",
        )
    layer = fixed[0]
    reason = f"{spec!r}: layer {layer} has no routed {parts.many}, all {heads[layer]} are shared"
    if len(fixed) > 1:
        reason += f" (so have {len(fixed) - 1} other layers)"
    raise BudgetError(parts, reason, f"give a list of pairs with ({heads[layer]}, 0) there")


def _least(budgets: Sequence[HeadBudget]) -> list[int]:
    """Return the fewest heads that each layer can run: the shared ones and, where it routes, one more."""
    return [b.shared + min(b.candidates, 1) for b in budgets]


def check_groups(budget: HeadBudget, group: int) -> None:
    """Raise ValueError if a budget is not made of whole groups of `group` heads."""
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise ValueError(f"group={group!r} is not a number of heads, 1 or more")
    for name in ("heads", "shared", "routed"):
        count = getattr(budget, name)
        if count % group:
            raise ValueError(
                f"{name}={count} is not a multiple of group={group}: heads are chosen in whole groups"
            )


def _in_groups(
    decide: Callable, spec: BudgetSpec, budgets: Sequence[HeadBudget], groups: Sequence[int]
) -> tuple[HeadBudget, ...]:
    """Return the budgets that decide(spec, budgets) returns if every group of heads is taken for one wide head.

    Heads alone are chosen in groups of several; the groups of an MLP are single parts.

    Args:
        decide: `change_budget` or a form of `resolve_budget`; called with a spec and budgets that count groups.
        spec: a share, or pairs that count heads.
        budgets: of the layers, in heads.
        groups: for each layer the number of heads in a group.
    """
    wide = []
    for layer, (b, group) in enumerate(zip(budgets, groups)):
        try:
            check_groups(b, group)
        except ValueError as error:
            raise BudgetError(HEADS, str(error), layer=layer) from None
        wide.append(
            HeadBudget(b.heads // group, b.head_dim * group, b.shared // group, b.routed // group)
        )
    if isinstance(spec, (list, tuple)):
        pairs = _explicit_pairs(spec, len(budgets), HEADS)
        for layer, (pair, group) in enumerate(zip(pairs, groups)):
            if pair[0] % group or pair[1] % group:
                raise BudgetError(
                    HEADS,
                    f"{pair} is not a pair of multiples of group={group}: heads are chosen in whole groups",
                    layer=layer,
                )
        spec = [(shared // group, routed // group) for (shared, routed), group in zip(spec, groups)]
    counted = f" (counted in groups of {', '.join(map(str, sorted(set(groups))))} heads)"
    try:
        decided = decide(spec, wide)
    except BudgetError as error:
        if error.advice:
            raise BudgetError(HEADS, error.reason, error.advice + counted, error.layer) from None
        raise BudgetError(HEADS, error.reason + counted, layer=error.layer) from None
    except ValueError as error:
        raise ValueError(f"{error}{counted}") from None
    return tuple(
        HeadBudget(b.heads, b.head_dim, new.shared * group, new.routed * group)
        for b, new, group in zip(budgets, decided, groups)
    )


def spread(shape: str, total: int, budgets: Sequence[HeadBudget]) -> list[int]:
    """Spread `total` active heads over layers, as near as possible to the papers' "ramp" or to "uniform".

    Every layer keeps its shared heads and at least one routed head; layers without routed heads stay as they are.

    Returns:
        The number of active heads of each layer.
    """
    heads = [b.heads for b in budgets]
    share = total / sum(heads)
    if shape == "ramp":
        wanted = _ramp_wanted(share, heads)
    else:
        wanted = [share * h for h in heads]
    return _round_to_total(wanted, total, _least(budgets), heads)


def _per_layer(name: str, value: int | Sequence[int], depth: int) -> list[int]:
    """Return one value per layer: repeat a single value, check the length of a list."""
    if isinstance(value, int):
        return [value] * depth
    if len(value) != depth:
        raise ValueError(f"{name} has {len(value)} entries for {depth} layers")
    return [int(v) for v in value]


def _explicit_pairs(spec: Sequence, depth: int, parts: Parts) -> list[tuple[int, int]]:
    """Return the (shared, routed) pairs of a list; raise ValueError if it does not hold `depth` pairs of whole numbers."""
    if len(spec) != depth:
        raise BudgetError(parts, f"lists {len(spec)} layers, the model has {depth}")
    pairs = []
    for layer, pair in enumerate(spec):
        if (
            not isinstance(pair, (list, tuple))
            or len(pair) != 2
            or any(isinstance(n, bool) or not isinstance(n, int) for n in pair)
        ):
            raise BudgetError(
                parts, f"{pair!r} is not a pair of whole numbers (shared, routed)", layer=layer
            )
        pairs.append((pair[0], pair[1]))
    return pairs


def parse_share(spec: object, parts: Parts = HEADS) -> Share:
    """Parse a share, such as 0.75, "uniform:0.75" or "ramp:0.75:0.4"."""
    shape = "ramp"
    numbers = [spec]
    if isinstance(spec, str) and ":" in spec:
        shape, *numbers = spec.split(":")
    try:
        if any(isinstance(number, bool) for number in numbers):
            raise TypeError("a truth value is not a share")
        active, *rest = map(float, numbers)
        understood = shape in SHAPES and len(rest) < 2 and 0 < active <= 1
        shared = None
        if rest:
            shared = rest[0]
            understood = understood and 0 <= shared < 1
    except (TypeError, ValueError):
        understood = False
    if not understood:
        raise BudgetError(
            parts,
            f"{spec!r} is not understood: give a share above 0 and up to 1 such as 0.75, 'ramp:0.75' or "
            f"'uniform:0.75', with the share of shared {parts.many} below 1 behind it such as 'ramp:0.75:0.4', or a "
            "list with one (shared, routed) pair per layer",
        )
    return Share(shape, active, shared)


def warn_of_rounding(spec: BudgetSpec, active: int, heads: int, parts: Parts = HEADS) -> None:
    """Warn if rounding to whole heads changes a share by more than 5 points, which is possible for "uniform"."""
    if isinstance(spec, (list, tuple)):
        return
    if abs(active / heads - parse_share(spec).active) > NEAR:
        log.warning(
            f"{parts.argument} {spec!r} runs {active} of {heads} {parts.many}, {100 * active / heads:.1f} %, "
            f"because a layer runs whole {parts.many}"
        )


# Once per process, because opening a run makes its model again.
_warn_once_of_rounding = functools.lru_cache(warn_of_rounding)


def _smallest_share(shape: str, heads: Sequence[int], least: Sequence[int]) -> float:
    """Return the smallest share that whole heads reach and that gives every layer its `least` heads, rounded to 0.001."""
    if shape == "ramp":
        heads = [sum(heads)]
        least = [sum(least)]
    all_heads = sum(heads)
    for total in range(1, all_heads):
        share = round(total / all_heads, 3)
        active = [math.floor(share * h + 0.5) for h in heads]
        if sum(active) == total and all(a >= low for a, low in zip(active, least)):
            return share
    return 1.0


def _ramp_wanted(target: float, heads: Sequence[int]) -> list[float]:
    """Return the active heads of each layer of a ramp, before rounding."""
    depth = len(heads)
    if depth == 1:
        positions = [0.0]
    else:
        positions = [2 * layer / (depth - 1) - 1 for layer in range(depth)]  # -1 .. 1
    # Centre the positions, weighted by heads, so that the total is the target; `middle` is 0 for equal layers.
    middle = sum(p * h for p, h in zip(positions, heads)) / sum(heads)
    positions = [p - middle for p in positions]
    half_range = min((1 - target) / max(1.0, *positions), target / 3)
    return [(target + half_range * p) * h for p, h in zip(positions, heads)]


def _active(share: Share, heads: Sequence[int], least: Sequence[int]) -> list[int]:
    """Return the active heads of each layer. "ramp" rounds over the model and keeps `least`; "uniform" rounds each layer."""
    if share.shape == "uniform":
        return [math.floor(share.active * h + 0.5) for h in heads]
    total = math.floor(share.active * sum(heads) + 0.5)
    return _round_to_total(_ramp_wanted(share.active, heads), total, least, heads)


def _shared_of(share: float, active: Sequence[int], heads: Sequence[int]) -> list[int]:
    """Return the shared heads of each layer, so that over all layers they are `share` of the active heads."""
    most = []
    for a, h in zip(active, heads):
        # Leave at least one active head to the router; a layer with a single head needs none.
        most.append(max(a - 1, 0) if h > 1 else 1)
    wanted = [share * a for a in active]
    total = math.floor(share * sum(active) + 0.5)
    return _round_to_total(wanted, total, [0] * len(most), most)


def _round_to_total(
    wanted: Sequence[float],
    total: int,
    least: Sequence[int],
    most: Sequence[int],
) -> list[int]:
    """Round `wanted` to whole numbers that sum to `total`, by the largest-remainder method.

    Each result lies between `least` and `most`. If these bounds do not allow the total, the sum is the nearest that they do.
    """
    result = [min(max(math.floor(w + 1e-9), low), m) for w, low, m in zip(wanted, least, most)]
    layers = range(len(wanted))
    while sum(result) != total:
        if sum(result) < total:
            step = 1
            free = [layer for layer in layers if result[layer] < most[layer]]
        else:
            step = -1
            free = [layer for layer in layers if result[layer] > least[layer]]
        if not free:
            break
        # Change the layer that is furthest from `wanted`. Among equals a deeper layer is raised first and an earlier one
        # lowered first, so that a ramp never falls with depth.
        distances = [
            (round(step * (wanted[layer] - result[layer]), 9), step * layer) for layer in free
        ]
        result[free[distances.index(max(distances))]] += step
    return result

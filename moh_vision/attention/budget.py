"""How many heads of each layer run: `HeadBudget` for one layer, `resolve_budget` for a model."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger("moh_vision.attention")
BudgetSpec = float | str | Sequence[Sequence[int]]

NEAR = 0.05  # difference between a share and that of whole heads that is not worth a line

# The default. Jin 2024, section 4.5 and table 7: accuracy is flat from 14 to 74 %, the advice is "greater than 40 %".
SHARED_SHARE = 0.4

SHAPES = ("ramp", "uniform")  # of a share over the layers


@dataclass(frozen=True)
class HeadBudget:
    """The heads of one attention layer.

    Args:
        heads: H, all heads of the layer. The shared ones are heads 0 .. shared - 1.
        head_dim: D, the width of one head.
        shared: heads that run for every token.
        routed: heads that a router picks for each token among the other H - shared.

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
            raise ValueError("shared=0, routed=0: at least 1 head must run")
        if self.active > self.heads:
            raise ValueError(
                f"shared={self.shared} + routed={self.routed} = {self.active} of only {self.heads} heads"
            )
        if self.routed == 0 and self.shared < self.heads:
            raise ValueError(
                f"routed=0 with shared={self.shared} of {self.heads} heads: the other {self.heads - self.shared} would never "
                f"run; route at least 1, or make all {self.heads} shared"
            )

    @property
    def active(self) -> int:
        """K, the heads that run for one token."""
        return self.shared + self.routed

    @property
    def candidates(self) -> int:
        """E, the heads that the router chooses among."""
        return self.heads - self.shared


def resolve_budget(
    spec: BudgetSpec,
    depth: int,
    heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    group: int = 1,
    shared_share: float = SHARED_SHARE,
) -> tuple[HeadBudget, ...]:
    """Turn what a user writes into one `HeadBudget` per layer.

    Args:
        spec: one of
            0.75 or "ramp:0.75": the active share rises linearly with depth, and the head-weighted total (which
                is what the papers quote) is the nearest possible to 75 %; it runs from t - d to t + d with
                d = min(1 - t, t / 3), so 0.75 goes from 50 % to 100 %;
            "uniform:0.75": the same number of active heads in every layer of equal width, halves rounded up;
            "ramp:0.75:0.6", "uniform:0.75:0.6": the second number is the share of shared heads among the active ones,
                0.4 by default (Jin 2024, section 4.5 and table 7), 0 with router "moa"; "ramp" rounds it over the model,
                "uniform" in each layer;
            [(shared, routed), ...]: one pair per layer, such as `moh_vision.commands.search` writes.
            A layer with routed heads always routes at least one. With few heads a share leaves layers with exactly one,
            as in the released S/2-75: its renormalised weight is constant, so only the balance loss trains that router.
        depth: layers.
        heads: heads per layer, one number or one per layer.
        head_dim: width of a head, one number or one per layer.
        group: heads that are chosen together (see QueryNormRouter): a share is then rounded to whole groups, and pairs
            must be whole groups.
        shared_share: the share of shared heads among the active ones where the spec does not say; see
            `moh_vision.attention.routers.shared_share`.

    Raises:
        ValueError: naming the layer and the numbers.
    """
    heads = _per_layer("heads", heads, depth)
    head_dim = _per_layer("head_dim", head_dim, depth)
    if group != 1:
        full = [HeadBudget(h, d, h, 0) for h, d in zip(heads, head_dim)]

        def resolve(spec: BudgetSpec, wide: Sequence[HeadBudget]) -> tuple[HeadBudget, ...]:
            return resolve_budget(spec, depth, [b.heads for b in wide], [b.head_dim for b in wide])

        return _in_groups(resolve, spec, full, [group] * depth)
    if isinstance(spec, (list, tuple)):
        pairs = _explicit_pairs(spec, depth)
    else:
        pairs = _pairs_of_share(spec, heads, shared_share)

    budgets = []
    for layer, ((shared, routed), h, d) in enumerate(zip(pairs, heads, head_dim)):
        try:
            budgets.append(HeadBudget(h, d, shared, routed))
        except ValueError as error:
            raise ValueError(f"head_budget, layer {layer}: {error}") from None
    return tuple(budgets)


def _pairs_of_share(
    spec: float | str, heads: Sequence[int], shared_share: float
) -> list[tuple[int, int]]:
    """Return (shared, routed) of each layer for a share of all heads, uniform or a ramp."""
    kind, target, said = parse_share(spec)
    share = shared_share if said is None else said
    least = 1 if math.floor(target * sum(heads) + 0.5) >= len(heads) else 0
    active = _active(kind, target, heads, [least] * len(heads))
    if kind == "ramp":
        shared = _shared_of(share, active, heads)
    else:
        shared = [_shared_of(share, [a], [h])[0] for a, h in zip(active, heads)]
    for layer, (a, h) in enumerate(zip(active, heads)):
        if a < 1:
            raise ValueError(
                f"head_budget {spec!r}: layer {layer} with {h} heads would run 0 of them, at least 1 must run; "
                f"the smallest share is {_smallest_share(kind, heads, [1] * len(heads))}"
            )
    _warn_once_of_rounding(spec, sum(active), sum(heads))
    return [(s, a - s) for s, a in zip(shared, active)]


def all_heads(heads: Sequence[int], shares: bool = True) -> list[list[int]]:
    """(shared, routed) pairs with which every head runs, to be lowered by `change_routed`.

    A fifth of the heads, at least one, is shared, or none: with `shares` False (MoA), and in layers of fewer than four
    heads, where a shared head would leave no routed head at half of them.
    """
    shared = [max(h // 5, 1) if shares and h > 3 else 0 for h in heads]
    return [[s, h - s] for s, h in zip(shared, heads)]


def shape_of(spec: BudgetSpec | None) -> str | None:
    """Return how a share is spread over the layers, "ramp" or "uniform"; None: a list, which does not say it."""
    if spec is None or isinstance(spec, (list, tuple)):
        return None
    return parse_share(spec)[0]


def shaped(spec: BudgetSpec | None, shape: str | None) -> BudgetSpec | None:
    """Return a budget in which a plain share has a shape: 0.5 and "uniform" make "uniform:0.5"."""
    if shape not in (None, *SHAPES):
        raise ValueError(f"head_budget_shape {shape!r}: expected {' or '.join(SHAPES)}")
    plain = not (spec is None or isinstance(spec, (list, tuple)) or ":" in str(spec))
    if not plain or shape is None:
        return spec
    parse_share(spec)  # its message names what was given
    return f"{shape}:{spec}"


def change_routed(
    spec: BudgetSpec, budgets: Sequence[HeadBudget], groups: Sequence[int] | None = None
) -> tuple[HeadBudget, ...]:
    """Other numbers of routed heads for layers that exist: their shared heads stay.

    Args:
        spec: as for `resolve_budget`; a share counts all active heads, a list holds one (shared, routed) pair per layer.
        budgets: what the layers have.
        groups: for each layer how many heads are chosen together, see `resolve_budget`; None: 1 everywhere.
    """
    if groups is not None and any(group != 1 for group in groups):
        return _in_groups(change_routed, spec, budgets, groups)
    heads = [b.heads for b in budgets]
    if isinstance(spec, (list, tuple)):
        pairs = _explicit_pairs(spec, len(budgets))
        for layer, ((shared, _), b) in enumerate(zip(pairs, budgets)):
            if shared != b.shared:
                raise ValueError(
                    f"head_budget, layer {layer}: {b.shared} heads are shared and stay so, not {shared}"
                )
    else:
        kind, target, shared_share = parse_share(spec)
        if shared_share is not None:
            raise ValueError(
                f"head_budget {spec!r}: the shared heads of a model stay; leave out {shared_share}"
            )
        fixed = [layer for layer, b in enumerate(budgets) if b.candidates == 0]
        if len(fixed) == len(budgets) and target < 1:
            raise ValueError(
                f"head_budget {spec!r}: the model has no routed heads; moh_vision.convert gives a dense one some"
            )
        if fixed and target < 1:
            layer = fixed[0]
            raise ValueError(
                f"head_budget {spec!r}: layer {layer} has no routed heads, all {heads[layer]} are shared"
                + (f" (so have {len(fixed) - 1} other layers)" if len(fixed) > 1 else "")
                + f"; give a list of pairs with ({heads[layer]}, 0) there"
            )
        least = [b.shared + (b.candidates > 0) for b in budgets]
        active = _active(kind, target, heads, least)
        advice = (
            "give the lower budget when the model is made or converted, it then shares fewer heads"
        )
        for layer, (a, low, b) in enumerate(zip(active, least, budgets)):
            if a < low:
                raise ValueError(
                    f"head_budget {spec!r}: layer {layer} would run {a} of {b.heads} heads, "
                    f"but {b.shared} are shared and at least 1 is routed; the smallest share is "
                    f"{_smallest_share(kind, heads, least)}; {advice}"
                )
        if sum(active) > math.floor(target * sum(heads) + 0.5) and kind == "ramp":
            raise ValueError(
                f"head_budget {spec!r}: the shared heads and one routed head per layer are {sum(active)} of "
                f"{sum(heads)} already, and the smallest share is {_smallest_share(kind, heads, least)}; {advice}"
            )
        pairs = [(b.shared, a - b.shared) for a, b in zip(active, budgets)]
    return resolve_budget(pairs, len(budgets), heads, [b.head_dim for b in budgets])


def check_groups(budget: HeadBudget, group: int) -> None:
    """Refuse a budget that is not made of whole groups of `group` heads."""
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
    """`decide(spec, budgets)` where every group of heads counts as one wide head."""
    wide = []
    for layer, (b, group) in enumerate(zip(budgets, groups)):
        try:
            check_groups(b, group)
        except ValueError as error:
            raise ValueError(f"head_budget, layer {layer}: {error}") from None
        wide.append(
            HeadBudget(b.heads // group, b.head_dim * group, b.shared // group, b.routed // group)
        )
    if isinstance(spec, (list, tuple)):
        for layer, (pair, group) in enumerate(zip(_explicit_pairs(spec, len(budgets)), groups)):
            if pair[0] % group or pair[1] % group:
                raise ValueError(
                    f"head_budget, layer {layer}: {pair} is not a pair of multiples of group={group}: heads are chosen "
                    "in whole groups"
                )
        spec = [(shared // group, routed // group) for (shared, routed), group in zip(spec, groups)]
    try:
        decided = decide(spec, wide)
    except ValueError as error:
        raise ValueError(
            f"{error} (counted in groups of {', '.join(map(str, sorted(set(groups))))} heads)"
        ) from None
    return tuple(
        HeadBudget(b.heads, b.head_dim, new.shared * group, new.routed * group)
        for b, new, group in zip(budgets, decided, groups)
    )


def spread(kind: str, total: int, budgets: Sequence[HeadBudget]) -> list[int]:
    """Active heads of each layer, `total` in all, as near as can be to the papers' "ramp" or to "uniform".

    Shared heads and one routed head stay in every layer, and layers without routed heads are left as they are.
    """
    heads = [b.heads for b in budgets]
    share = total / sum(heads)
    wanted = _ramp_wanted(share, heads) if kind == "ramp" else [share * h for h in heads]
    least = [b.shared + (b.candidates > 0) for b in budgets]
    return _round_to_total(wanted, total, least, heads)


def _per_layer(name: str, value: int | Sequence[int], depth: int) -> list[int]:
    if isinstance(value, int):
        return [value] * depth
    if len(value) != depth:
        raise ValueError(f"{name} has {len(value)} entries for {depth} layers")
    return [int(v) for v in value]


def _explicit_pairs(spec: Sequence, depth: int) -> list[tuple[int, int]]:
    if len(spec) != depth:
        raise ValueError(f"head_budget lists {len(spec)} layers, the model has {depth}")
    pairs = []
    for layer, pair in enumerate(spec):
        if (
            not isinstance(pair, (list, tuple))
            or len(pair) != 2
            or any(isinstance(n, bool) or not isinstance(n, int) for n in pair)
        ):
            raise ValueError(
                f"head_budget, layer {layer}: {pair!r} is not a pair of whole numbers (shared, routed)"
            )
        pairs.append((pair[0], pair[1]))
    return pairs


def parse_share(spec: object) -> tuple[str, float, float | None]:
    """Read a budget that is not a list: ("ramp" or "uniform", active share, shared share of the active or None)."""
    kind, *numbers = spec.split(":") if isinstance(spec, str) and ":" in spec else ("ramp", spec)
    try:
        target, shared = (
            math.nan if isinstance(n, bool) else float(n) for n in (numbers + [0])[:2]
        )
    except (TypeError, ValueError):
        target = shared = math.nan
    if kind not in SHAPES or len(numbers) > 2 or not (0 < target <= 1 and 0 <= shared < 1):
        raise ValueError(
            f"head_budget {spec!r} is not understood: give a share above 0 and up to 1 such as 0.75, 'ramp:0.75' or "
            "'uniform:0.75', with the share of shared heads below 1 behind it such as 'ramp:0.75:0.4', or a "
            "list with one (shared, routed) pair per layer"
        )
    return kind, target, shared if len(numbers) == 2 else None


def warn_of_rounding(spec: BudgetSpec, active: int, heads: int) -> None:
    """Log, at level WARNING, a share that whole heads miss by more than 5 points; "uniform" rounds in every layer."""
    if not isinstance(spec, (list, tuple)) and abs(active / heads - parse_share(spec)[1]) > NEAR:
        log.warning(
            f"head_budget {spec!r} runs {active} of {heads} heads, {100 * active / heads:.1f} %, because a layer runs whole heads"
        )


_warn_once_of_rounding = functools.lru_cache(
    warn_of_rounding
)  # a run is opened by making its model again


def _smallest_share(kind: str, heads: Sequence[int], least: Sequence[int]) -> float:
    """The smallest share that whole heads reach, in thousandths, with which every layer runs at least so many heads."""
    if kind == "ramp":
        heads, least = [sum(heads)], [sum(least)]
    every = sum(heads)
    for total in range(1, every):
        share = round(total / every, 3)
        active = [math.floor(share * h + 0.5) for h in heads]
        if sum(active) == total and all(a >= low for a, low in zip(active, least)):
            return share
    return 1.0


def _ramp_wanted(target: float, heads: Sequence[int]) -> list[float]:
    """Active heads of each layer, before rounding."""
    depth, total = len(heads), sum(heads)
    position = [
        2 * layer / (depth - 1) - 1 if depth > 1 else 0.0 for layer in range(depth)
    ]  # -1 .. 1
    middle = (
        sum(p * h for p, h in zip(position, heads)) / total
    )  # 0 where all layers have equally many heads
    position = [p - middle for p in position]
    half_range = min((1 - target) / max(1.0, *position), target / 3)
    return [(target + half_range * p) * h for p, h in zip(position, heads)]


def _active(kind: str, target: float, heads: Sequence[int], least: Sequence[int]) -> list[int]:
    """Active heads of each layer; a ramp is rounded over the model, and keeps `least` in every layer."""
    if kind == "uniform":
        return [math.floor(target * h + 0.5) for h in heads]
    total = math.floor(target * sum(heads) + 0.5)
    return _round_to_total(_ramp_wanted(target, heads), total, least, heads)


def _shared_of(share: float, active: Sequence[int], heads: Sequence[int]) -> list[int]:
    # A router needs at least one head to route, unless the layer has a single head.
    most = [max(a - 1, 0) if h > 1 else 1 for a, h in zip(active, heads)]
    return _round_to_total(
        [share * a for a in active], math.floor(share * sum(active) + 0.5), [0] * len(most), most
    )


def _round_to_total(
    wanted: Sequence[float],
    total: int,
    least: Sequence[int],
    most: Sequence[int],
) -> list[int]:
    """Largest-remainder rounding: whole numbers near `wanted`, between `least` and `most`, that sum to `total`.

    If the bounds do not allow the total, the nearest sum that they allow.
    """
    result = [min(max(math.floor(w + 1e-9), low), m) for w, low, m in zip(wanted, least, most)]
    layers = range(len(wanted))
    while sum(result) != total:
        step = 1 if sum(result) < total else -1
        free = [i for i in layers if (result[i] < most[i] if step > 0 else result[i] > least[i])]
        if not free:
            break
        # The layer that is furthest behind (or ahead); deeper ones first, so that a ramp never falls with depth.
        result[max(free, key=lambda i: (round(step * (wanted[i] - result[i]), 9), step * i))] += (
            step
        )
    return result

"""`plan_call` decides which executor runs a call, once for all calls with the same signature.

"auto" skips heads only where that is known to be faster.
"""

import logging
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from moh_vision.attention import kernels
from moh_vision.attention.executors import measurement_table
from moh_vision.attention.executors.executor import Executor
from moh_vision.attention.executors.known import SMALLEST_QUERIES, rule
from moh_vision.attention.executors.signature import Signature, sign, words
from moh_vision.attention.kernels.contract import DTYPES
from moh_vision.attention.kernels.route import (
    PROJECT_AND_ROUTE,
    ROUTE_AND_ATTEND,
    ROUTE_SEQUENCES_AND_ATTEND,
)
from moh_vision.attention.linear import present_mode
from moh_vision.attention.routing import Call, RoutingForm

log = logging.getLogger("moh_vision.attention")

MOST_PLANS = 1024  # plans that a layer keeps; texts of every length have a signature each


class Plan(NamedTuple):
    """How calls of a signature are computed."""

    executor: type[Executor]
    prepared: Any = None  # what `Executor.prepare` made
    reason: str = ""  # why "auto" takes this executor, or why no heads are skipped
    operator: str = ""  # see `operator_of`
    dtype: torch.dtype | None = None  # of the products of this operator


def plan_call(layer: nn.Module, call: Call, form: RoutingForm | None = None) -> Plan:
    """Return the plan of a call of a layer, made at the first call of its signature.

    Args:
        layer: its `executor` is a name in EXECUTORS, or the class itself.
        call: the call.
        form: see `sign`.
    """
    wanted = layer.executor
    if not isinstance(wanted, str):
        return plan_executor(wanted, sign(layer, call, form=form))
    if not layer.fused_attn:
        return Plan(layer.unfused_executor)
    if wanted == "reference":
        return Plan(layer.reference_executor)
    mode = call.mode or present_mode(call.x)
    if mode == "traced" or (wanted == "masked" and form is None):
        return Plan(layer.all_heads_executor)
    signature = sign(layer, call, mode, form)
    if mode == "compiled":
        # The compiled code keeps this plan; sizes may be symbols, which are no keys of a dictionary.
        return make_plan(layer, signature)
    plans = layer.plans
    conditions = (wanted, layer.skipping_executors, measurement_table.generation())
    if plans.conditions != conditions or len(plans) > MOST_PLANS:
        plans.clear()
        plans.conditions = conditions
    plan = plans.get(signature)
    if plan is None:
        failed = kernels.failed_trials()
        plan = make_plan(layer, signature)
        if kernels.failed_trials() == failed:  # else the kernel may work at the next call
            plans[signature] = plan
    return plan


class Plans(dict):
    """The plans of a layer by signature.

    Attributes:
        conditions: the layer's executor and skipping executors, and the state of the measurement table, for which they hold.
    """

    conditions: tuple | None = None


def make_plan(layer: nn.Module, signature: Signature) -> Plan:
    """Choose the executor of calls with a signature, for a layer whose executor is "auto", "packed" or "masked"."""
    if layer.executor == "masked":
        return plan_executor(layer.all_heads_executor, signature)
    executor, reason = first_that_skips(layer, signature)
    if layer.executor == "auto":
        if executor is not layer.all_heads_executor:
            executor, reason = faster(layer, signature, executor)
        announce(executor.__name__, reason)
    return plan_executor(executor, signature, reason)


def plan_executor(executor: type[Executor], signature: Signature, reason: str = "") -> Plan:
    """Return the plan of calls with a signature by an executor; `reason`: see `Plan`."""
    prepared = executor.prepare(signature)
    operator = operator_of(signature, executor.attends_product(prepared))
    if not operator:
        return Plan(executor, prepared, reason)
    return Plan(executor, prepared, reason, operator, signature.dtype)


def operator_of(signature: Signature, attends: bool) -> str:
    """Return the name of the operator that begins calls of a layer, one of three in `kernels.route`; "": there is none.

    Args:
        signature: of the calls.
        attends: whether the executor lets the operator attend too.
    """
    s = signature
    if s.path != "triton" or s.mode == "traced" or s.context or s.cache:
        return ""
    if s.joint not in DTYPES or not kernels.routes(s.device, s.given, s.dtype, s.linear):
        return ""
    if s.choice == "sequence":
        # Other executors do not want the product of all heads.
        return ROUTE_SEQUENCES_AND_ATTEND if attends else ""
    if attends:
        return ROUTE_AND_ATTEND
    return PROJECT_AND_ROUTE


def first_that_skips(layer: nn.Module, signature: Signature) -> tuple[type[Executor], str]:
    """Return the first of the layer's executors that can skip heads of a call, and "" as the reason.

    If none can, return the executor of all heads, and the reason why the last one tried cannot.

    Args:
        layer: has `skipping_executors`.
        signature: of the call.
    """
    reason = ""
    for executor in layer.skipping_executors:
        reason = executor.why_not(signature)
        if not reason:
            return executor, ""
    return layer.all_heads_executor, reason


def faster(
    layer: nn.Module, signature: Signature, executor: type[Executor]
) -> tuple[type[Executor], str]:
    """Return the faster of `executor`, which skips heads, and the layer's executor of all heads; and the reason.

    The measurement table decides, if it has a row for the call; else the rule of `known`.
    """
    s = signature
    call = words(s, executor)
    if not s.cache:
        for row in measurement_table.look_up(call):
            if row.holds_for(s):
                if row.taken != executor.__name__:
                    executor = layer.all_heads_executor
                return executor, "measured on this machine"
    if s.mode == "eager":  # a compiler may not know the sizes
        call += f", {s.batch} x {s.tokens} tokens"
    if s.active < s.heads:
        measurement_table.note_unmeasured(call)
    share = executor.pays_up_to(s)
    if share == 0:
        return layer.all_heads_executor, "not measured on this machine, see moh_vision.measure"
    if s.batch * s.tokens * s.heads * s.head_dim < SMALLEST_QUERIES or s.active / s.heads > share:
        executor = layer.all_heads_executor
    return executor, rule(share)


@torch.compiler.assume_constant_result  # torch.compile calls this while it traces, not when the compiled code runs
def announce(picked: str, reason: str) -> None:
    """Log a decision the first time that it is made, at level INFO under "moh_vision.attention"."""
    if log.isEnabledFor(logging.INFO):
        say(picked, reason)


@lru_cache(maxsize=256)
def say(picked: str, reason: str) -> None:
    log.info("auto picked %s: %s", picked, reason)

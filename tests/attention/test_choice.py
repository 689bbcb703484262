"""Which executor takes a call of a layer, and why."""

import logging

import pytest
import torch

from moh_vision.attention import (
    ContextCache,
    HeadBudget,
    HeadMixtureAttention,
    KeyValueCache,
    kernels,
)
from moh_vision.attention.executors import (
    Executor,
    InPlace,
    Masked,
    Reference,
    Sequences,
    Tokens,
    Unfused,
    WholeSequences,
    known,
    reasons,
)
from moh_vision.attention.executors.plan import Plan, make_plan, say
from moh_vision.attention.executors.signature import sign, words
from moh_vision.attention.routing import Call


def layer_of(budget, heads=12, width=64, **kwargs):
    return HeadMixtureAttention(heads * width, HeadBudget(heads, width, *budget), **kwargs)


def call_of(layer, tokens=197, batch=8, dtype=torch.float32, **call):
    x = torch.randn(batch, tokens, layer.dim, dtype=dtype)
    routing, q = layer.route(x)
    if "cache" in call:
        call["cache"] = call["cache"]()
    return Call(x, routing, q=q, **call)


def planned(budget, tokens=197, batch=8, dtype=torch.float32, training=False, call=None, **kwargs):
    """Return the plan of a call of a new layer."""
    layer = layer_of(budget, dtype=dtype, **kwargs).train(training)
    with torch.set_grad_enabled(training):
        return layer.plan(call_of(layer, tokens, batch, dtype, **(call or {})))


def choice(*args, **kwargs):
    """Return the executor that is planned."""
    return planned(*args, **kwargs).executor


LEARNED = torch.zeros(1, 1, 197, 197, requires_grad=True)  # a mask that learns is left to PyTorch


@pytest.mark.parametrize(
    "kwargs, cpp, torch_",
    [
        (dict(budget=(2, 4)), Tokens, Masked),
        (dict(budget=(2, 4), scope="sample"), WholeSequences, Sequences),
        (dict(budget=(2, 4), scope="sample", dtype=torch.float64), Sequences, Sequences),
        (dict(budget=(2, 4), dtype=torch.float64), Masked, Masked),
        (dict(budget=(2, 4), kv_heads=4, scope="sample"), Tokens, Masked),
        (dict(budget=(2, 4), call=dict(dropout_p=0.1)), Masked, Masked),
        (dict(budget=(2, 4), call=dict(dropout_p=0.1), scope="sample"), Sequences, Sequences),
        (dict(budget=(2, 4), call=dict(attn_mask=LEARNED), training=True), Masked, Masked),
        (dict(budget=(2, 4), router="query_norm"), Tokens, Masked),
        (
            dict(budget=(2, 4), router="query_norm", training=True),
            Masked,
            Masked,
        ),  # its gradient needs all heads
        (dict(budget=(2, 4), router="query_norm", scope="sample"), Sequences, Sequences),
        (dict(budget=(12, 0), router="mae"), Masked, Masked),
        (
            dict(budget=(12, 0), router="mae", router_kwargs=dict(mode="argmax")),
            WholeSequences,
            Sequences,
        ),
        (dict(budget=(2, 4), fused_attn=False), Unfused, Unfused),
        (dict(budget=(2, 4), tokens=0), Masked, Masked),
        (dict(budget=(2, 4), call=dict(cache=ContextCache)), Masked, Masked),
        (dict(budget=(2, 4), call=dict(cache=KeyValueCache)), Tokens, Masked),  # a prompt
        (dict(budget=(2, 4), call=dict(cache=KeyValueCache), training=True), Masked, Masked),
        (dict(budget=(2, 4), call=dict(cache=KeyValueCache), tokens=1), Masked, Masked),
    ],
)
def test_packed(kwargs, cpp, torch_, path):
    assert choice(executor="packed", **kwargs) == (cpp if path == "cpp" else torch_)


# Nothing but the numbers of the call is in the way of operators that are there.
NO_OPERATOR = f"{reasons.NO_OPERATOR} (attention runs on the C++ operators"


# Case -> call on a CPU with operators; executors that cannot take it, and what is in the way.
REFUSED = {
    "per token": (
        dict(budget=(2, 4)),
        {
            WholeSequences: reasons.CHOSEN_PER_TOKEN,
            Sequences: reasons.CHOSEN_PER_TOKEN,
            InPlace: reasons.PRODUCTS_ARE_SKIPPED_TOO,
        },
    ),
    "per sequence": (
        dict(budget=(2, 4), scope="sample"),
        {InPlace: reasons.PRODUCTS_ARE_SKIPPED_TOO},
    ),
    "per sequence, shared keys": (
        dict(budget=(2, 4), scope="sample", kv_heads=4),
        {
            WholeSequences: reasons.KEYS_NOT_PER_HEAD,
            Sequences: reasons.KEYS_NOT_PER_HEAD,
            InPlace: reasons.PRODUCTS_ARE_SKIPPED_TOO,
        },
    ),
    "per sequence, hooked": (
        dict(budget=(2, 4), scope="sample", hooked=True),
        {
            WholeSequences: reasons.HIDDEN_WEIGHTS,
            Sequences: reasons.HIDDEN_WEIGHTS,
            InPlace: reasons.PRODUCTS_ARE_SKIPPED_TOO,
            Tokens: reasons.HIDDEN_WEIGHTS,
        },
    ),
    "per sequence, compiled": (
        dict(budget=(2, 4), scope="sample", mode="compiled"),
        {
            WholeSequences: reasons.QUERIES_ARE_MADE,
            InPlace: reasons.PRODUCTS_ARE_SKIPPED_TOO,
        },
    ),
    "per sequence, 64 bits": (
        dict(budget=(2, 4), scope="sample", dtype=torch.float64),
        dict.fromkeys((WholeSequences, InPlace, Tokens), NO_OPERATOR),
    ),
    "no tokens": (
        dict(budget=(2, 4), tokens=0),
        dict.fromkeys((WholeSequences, Sequences, InPlace, Tokens), reasons.NO_TOKENS),
    ),
    "all heads": (
        dict(budget=(12, 0), router="dense"),
        dict.fromkeys((WholeSequences, Sequences, InPlace, Tokens), reasons.EVERY_HEAD),
    ),
}


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize("case", REFUSED)
def test_every_executor_says_why_it_cannot_run(case, path):
    options, refused = REFUSED[case]
    options = dict(options)
    tokens = options.pop("tokens", 197)
    mode = options.pop("mode", "eager")
    hooked = options.pop("hooked", False)
    layer = layer_of(**options, executor="packed")
    call = call_of(layer, tokens, dtype=options.get("dtype", torch.float32))
    if hooked:
        layer.qkv.register_forward_hook(lambda *_: None)
    signature = sign(layer, call, mode)
    # The order of trial.
    assert layer.skipping_executors == (WholeSequences, Sequences, InPlace, Tokens)
    for executor in layer.skipping_executors:
        said = executor.why_not(signature)
        reason = refused.get(executor, "")
        assert said.startswith(reason) and bool(said) == bool(reason), executor
    for executor in (Reference, Masked, Unfused):
        assert executor.why_not(signature) == ""
    able = [executor for executor in layer.skipping_executors if executor not in refused]
    plan = make_plan(layer, signature)
    if able:
        assert plan.executor is able[0] and plan.reason == ""
    else:
        assert plan.executor is Masked and plan.reason == Tokens.why_not(signature)


def test_a_layer_takes_the_first_of_its_list_that_can_run():
    class Never(Executor):
        @staticmethod
        def why_not(signature):
            return "never"

    class Always(Masked):
        pass

    layer = layer_of((2, 4), executor="packed")
    call = call_of(layer)
    layer.skipping_executors = (Never, Always, *layer.skipping_executors)
    assert type(layer.make_executor(call)) is Always
    layer.skipping_executors = (Never,)
    assert layer.plan(call) == Plan(Masked, None, "never")
    layer.executor = Never  # a class is taken as it is
    assert type(layer.make_executor(call)) is Never


def test_the_words_of_a_signature_name_all_that_changes_its_time():
    layer = layer_of((2, 4)).eval()
    mask = torch.zeros(8, 1, 9, 9, requires_grad=True)
    angles = torch.ones(9, 64), torch.ones(9, 64)
    call = call_of(layer, 9, attn_mask=mask, dropout_p=0.1, rotary=angles)
    of_layer = (
        "12 heads of 64, 12 of keys, 768 wide, torch.float32 in torch.float32 cpu HeadMixtureAttention "
        "MoHRouter per token"
    )
    with torch.no_grad():
        said = words(sign(layer, call, "compiled"), Masked)
    options = "compiled rotary dropout torch.float32 B N learned"
    assert said == f"Masked inference {of_layer} {options}"
    plain = words(sign(layer.train(), call_of(layer, 9)), Masked)
    assert plain == f"Masked training {of_layer}"


# Case -> call and the executor that "auto" takes by the rule, on every processor.
BY_RULE = {
    "half of the heads": (dict(budget=(2, 4)), Tokens),
    "24,576 numbers in the queries": (dict(budget=(2, 4), tokens=4, batch=8), Masked),
    "25,344 numbers in the queries": (dict(budget=(2, 4), tokens=33, batch=1), Tokens),
    "per sequence": (dict(budget=(2, 4), scope="sample"), WholeSequences),
    "not measured": (dict(budget=(2, 4), scope="sample", dtype=torch.float64), Masked),
}


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize("case", BY_RULE)
def test_auto_without_measurements(case, path):
    kwargs, executor = BY_RULE[case]
    assert choice(**kwargs) is executor


def paying(executor, share):
    """Return an executor that is known to be faster up to a share of active heads."""
    return type("Paying", (executor,), dict(pays_up_to=staticmethod(lambda signature: share)))


ARGMAX = dict(budget=(12, 0), router="mae", router_kwargs=dict(mode="argmax"))  # 11 of 12 heads


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize("share, skips", [(1.0, True), (0.9, False), (0.0, False)])
@pytest.mark.parametrize(
    "kwargs, executor",
    [(dict(budget=(2, 9)), Tokens), (ARGMAX, WholeSequences)],
    ids=["per token", "per sequence"],
)
def test_auto_skips_up_to_the_share_that_pays(kwargs, executor, share, skips, path):
    layer = layer_of(**kwargs).eval()
    with torch.no_grad():
        call = call_of(layer)
        assert executor.pays_up_to(sign(layer, call)) == known.share_in_float32(64)
        layer.skipping_executors = (paying(executor, share),)
        plan = layer.plan(call)
    assert (plan.executor is not Masked) == skips
    if share:
        assert plan.reason == known.rule(share)


@pytest.mark.parametrize(
    "zen5, capability, width, share",
    [
        (False, "AVX512", 64, known.MOST),
        (False, "AVX512", 72, known.MOST_OF_UNEVEN_WIDTHS),
        (False, "AVX2", 72, known.MOST),
        (True, "AVX512", 72, 1.0),
    ],
)
def test_what_is_known_depends_on_the_processor(zen5, capability, width, share):
    assert known.share_on(zen5, capability, width) == share
    assert f"up to {share:.0%} of the heads, from 25,000 numbers" in known.rule(share)
    here = known.is_zen5(), torch.backends.cpu.get_cpu_capability()
    assert known.share_in_float32(width) == known.share_on(*here, width)


@pytest.mark.parametrize("path", ["torch", "triton"], indirect=True)
def test_elsewhere_auto_computes_all_heads_without_measurements(path):
    assert choice((3, 3), 33, 1) == choice((3, 3), 33, 1, scope="sample") == Masked
    assert choice((3, 3), 33, 1, executor="packed") == (InPlace if path == "triton" else Masked)
    for other in (
        dict(call=dict(dropout_p=0.1)),
        dict(dtype=torch.float64),
        dict(width=kernels.WIDEST + 8),
    ):
        assert choice((1, 2), 33, 1, heads=4, executor="packed", **other) == Masked
    if path == "torch":
        assert planned((2, 4)).reason.startswith(reasons.NO_OPERATOR)


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_16_bits_are_the_operators_where_the_processor_has_products(path, available, monkeypatch):
    monkeypatch.setattr(
        kernels, "OPS", type("", (), dict(brgemm_available=staticmethod(lambda dtype: available)))
    )
    for budget in ((4, 5), (4, 7)):  # 11 of 12 heads too
        found = choice(budget, tokens=64, dtype=torch.bfloat16)
        assert found == (InPlace if available else Masked)
    for budget, tokens, pays in (((4, 5), 64, True), ((4, 6), 64, False), ((4, 6), 197, True)):
        found = choice(budget, tokens=tokens, dtype=torch.bfloat16, scope="sample")
        assert found == (Sequences if available and pays else Masked)


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_logs_what_it_picked_once(path, caplog):
    say.cache_clear()
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        for _ in range(2):
            plans = [planned((2, 4)), planned((2, 4), tokens=1)]
    assert [plan.executor for plan in plans] == [Tokens, Masked]
    assert [record.message for record in caplog.records] == [
        f"auto picked {plan.executor.__name__}: {plan.reason}" for plan in plans
    ]
    assert {plan.reason for plan in plans} == {known.rule(known.share_in_float32(64))}

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
from moh_vision.attention.executors import Executor, Masked, Reference, Unfused, known
from moh_vision.attention.executors.plan import Plan, first_that_skips, say
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


def choice(budget, tokens=197, batch=8, dtype=torch.float32, training=False, call=None, **kwargs):
    """The name of the executor."""
    layer = layer_of(budget, dtype=dtype, **kwargs).train(training)
    with torch.set_grad_enabled(training):
        return type(
            layer.make_executor(call_of(layer, tokens, batch, dtype, **(call or {})))
        ).__name__


LEARNED = torch.zeros(1, 1, 197, 197, requires_grad=True)  # a mask that learns is left to PyTorch


@pytest.mark.parametrize(
    "kwargs, cpp, torch_",
    [
        (dict(budget=(2, 4)), "Tokens", "Masked"),
        (dict(budget=(2, 4), scope="sample"), "WholeSequences", "Sequences"),
        (dict(budget=(2, 4), scope="sample", dtype=torch.float64), "Sequences", "Sequences"),
        (dict(budget=(2, 4), dtype=torch.float64), "Masked", "Masked"),
        (dict(budget=(2, 4), kv_heads=4, scope="sample"), "Tokens", "Masked"),
        (dict(budget=(2, 4), call=dict(dropout_p=0.1)), "Masked", "Masked"),
        (dict(budget=(2, 4), call=dict(dropout_p=0.1), scope="sample"), "Sequences", "Sequences"),
        (dict(budget=(2, 4), call=dict(attn_mask=LEARNED), training=True), "Masked", "Masked"),
        (dict(budget=(2, 4), router="query_norm"), "Tokens", "Masked"),
        (
            dict(budget=(2, 4), router="query_norm", training=True),
            "Masked",
            "Masked",
        ),  # its gradient needs all heads
        (dict(budget=(2, 4), router="query_norm", scope="sample"), "Sequences", "Sequences"),
        (dict(budget=(12, 0), router="mae"), "Masked", "Masked"),
        (
            dict(budget=(12, 0), router="mae", router_kwargs=dict(mode="argmax")),
            "WholeSequences",
            "Sequences",
        ),
        (dict(budget=(2, 4), fused_attn=False), "Unfused", "Unfused"),
        (dict(budget=(2, 4), tokens=0), "Masked", "Masked"),
        (dict(budget=(2, 4), call=dict(cache=ContextCache)), "Masked", "Masked"),
        (dict(budget=(2, 4), call=dict(cache=KeyValueCache)), "Tokens", "Masked"),  # a prompt
        (dict(budget=(2, 4), call=dict(cache=KeyValueCache), training=True), "Masked", "Masked"),
        (dict(budget=(2, 4), call=dict(cache=KeyValueCache), tokens=1), "Masked", "Masked"),
    ],
)
def test_packed(kwargs, cpp, torch_, path):
    assert choice(executor="packed", **kwargs) == (cpp if path == "cpp" else torch_)


PER_SEQUENCE = "needs heads that are chosen per sequence"
SHARED_KEYS = "keys are cached, or shared by groups of heads"
LESS_THAN_PRODUCTS = "in float32 the C++ operators leave out products too"
NO_OPERATOR = "no compiled operator runs the call (attention runs on the C++ operators"
HOOKED = "the projections carry hooks or are not plain linear layers"


def same(reason):
    return dict.fromkeys(("WholeSequences", "Sequences", "InPlace", "Tokens"), reason)


REASONS = {  # by call on a CPU with operators: why each executor cannot take it
    "per token": (
        dict(budget=(2, 4)),
        dict(
            WholeSequences=PER_SEQUENCE,
            Sequences=PER_SEQUENCE,
            InPlace=LESS_THAN_PRODUCTS,
            Tokens="",
        ),
    ),
    "per sequence": (
        dict(budget=(2, 4), scope="sample"),
        dict(WholeSequences="", Sequences="", InPlace=LESS_THAN_PRODUCTS, Tokens=""),
    ),
    "per sequence, shared keys": (
        dict(budget=(2, 4), scope="sample", kv_heads=4),
        dict(
            WholeSequences=SHARED_KEYS, Sequences=SHARED_KEYS, InPlace=LESS_THAN_PRODUCTS, Tokens=""
        ),
    ),
    "per sequence, hooked": (
        dict(budget=(2, 4), scope="sample", hooked=True),
        dict(WholeSequences=HOOKED, Sequences=HOOKED, InPlace=LESS_THAN_PRODUCTS, Tokens=HOOKED),
    ),
    "per sequence, compiled": (
        dict(budget=(2, 4), scope="sample", compiling=True),
        dict(
            WholeSequences="compiled, or the router has projected the queries",
            Sequences="",
            InPlace=LESS_THAN_PRODUCTS,
            Tokens="",
        ),
    ),
    "per sequence, 64 bits": (
        dict(budget=(2, 4), scope="sample", dtype=torch.float64),
        dict(
            WholeSequences=NO_OPERATOR,
            Sequences="",
            InPlace=NO_OPERATOR,
            Tokens=NO_OPERATOR,
        ),
    ),
    "no tokens": (dict(budget=(2, 4), tokens=0), same("there are no tokens")),
    "all heads": (dict(budget=(12, 0), router="dense"), same("every head may run")),
}


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize("name", REASONS)
def test_every_executor_says_why_it_cannot_run(name, path):
    options, reasons = REASONS[name]
    options = dict(options)
    tokens = options.pop("tokens", 197)
    compiling = options.pop("compiling", False)
    hooked = options.pop("hooked", False)
    layer = layer_of(**options)
    call = call_of(layer, tokens, dtype=options.get("dtype", torch.float32))
    if hooked:
        layer.qkv.register_forward_hook(lambda *_: None)
    signature = sign(layer, call, "compiled" if compiling else "eager")
    said = {e.__name__: e.why_not(signature) for e in layer.skipping_executors}
    assert list(said) == list(reasons)  # the order of trial
    for executor, reason in reasons.items():
        assert said[executor].startswith(reason) and bool(said[executor]) == bool(reason), executor
    for executor in (Reference, Masked, Unfused):
        assert executor.why_not(signature) == ""
    first = next((e for e in layer.skipping_executors if not said[e.__name__]), Masked)
    assert first_that_skips(layer, signature)[0] is first


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


@pytest.mark.parametrize(
    "kwargs, picked",
    [
        (dict(budget=(2, 4)), "Tokens"),
        (dict(budget=(2, 9)), "Masked"),  # 92 % of the heads
        (dict(budget=(2, 4), tokens=4, batch=8), "Masked"),  # 24,576 numbers in the queries
        (dict(budget=(2, 4), tokens=33, batch=1), "Tokens"),
        (dict(budget=(2, 4), scope="sample"), "WholeSequences"),
        (dict(budget=(2, 4), scope="sample", dtype=torch.float64), "Masked"),  # not measured
        (
            dict(budget=(12, 0), router="mae", router_kwargs=dict(mode="argmax")),
            "Masked",
        ),  # 11 of 12 heads
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_auto_without_measurements(kwargs, picked, path, intel):
    assert choice(**kwargs) == picked


@pytest.fixture
def intel(monkeypatch):
    """A processor on which MKL's products are as fast as the operators'."""
    monkeypatch.setattr(known, "_is_zen5", lambda: False)


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize(
    "scope, executor", [("token", "Tokens"), ("sample", "WholeSequences")], ids=str
)
def test_on_zen_5_the_operators_pay_up_to_all_heads(scope, executor, path, monkeypatch):
    monkeypatch.setattr(known, "_is_zen5", lambda: True)
    assert choice((2, 9), scope=scope) == executor


@pytest.mark.parametrize(
    "capability, width, share",
    [
        ("AVX512", 64, known.MOST),
        ("AVX512", 72, known.MOST_OF_UNEVEN_WIDTHS),
        ("AVX2", 72, known.MOST),
    ],
)
def test_what_is_known_depends_on_the_instruction_set(capability, width, share, intel, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert known.share_in_float32(width) == share
    assert f"up to {share:.0%} of the heads, from 25,000 numbers" in known.rule(share)


@pytest.mark.parametrize("path", ["torch", "triton"], indirect=True)
def test_elsewhere_auto_computes_all_heads_without_measurements(path):
    assert choice((3, 3), 33, 1) == choice((3, 3), 33, 1, scope="sample") == "Masked"
    assert choice((3, 3), 33, 1, executor="packed") == ("InPlace" if path == "triton" else "Masked")
    for other in (
        dict(call=dict(dropout_p=0.1)),
        dict(dtype=torch.float64),
        dict(width=kernels.WIDEST + 8),
    ):
        assert choice((1, 2), 33, 1, heads=4, executor="packed", **other) == "Masked"
    if path == "torch":
        layer = layer_of((2, 4))
        reason = first_that_skips(layer, sign(layer, call_of(layer)))[1]
        assert "no compiled operator runs the call" in reason


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_16_bits_are_the_operators_where_the_processor_has_products(path, available, monkeypatch):
    monkeypatch.setattr(
        kernels, "OPS", type("", (), dict(brgemm_available=staticmethod(lambda dtype: available)))
    )
    for budget in ((4, 5), (4, 7)):  # 11 of 12 heads too
        found = choice(budget, tokens=64, dtype=torch.bfloat16)
        assert found == ("InPlace" if available else "Masked")
    for budget, tokens, pays in (((4, 5), 64, True), ((4, 6), 64, False), ((4, 6), 197, True)):
        found = choice(budget, tokens=tokens, dtype=torch.bfloat16, scope="sample")
        assert found == ("Sequences" if available and pays else "Masked")


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_logs_what_it_picked_once(path, caplog, intel):
    say.cache_clear()
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        for _ in range(2):
            choice((2, 4))
            choice((2, 9))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "auto picked Tokens",
        "auto picked Masked",
    ]
    assert all(
        "up to 90% of the heads, from 25,000 numbers" in record.message for record in caplog.records
    )

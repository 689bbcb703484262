"""What `auto` takes and why, on both paths, and the table by which it chooses."""

import copy
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from moh_vision.attention import HeadBudget, HeadMixtureAttention, kernels
from moh_vision.attention.executors import choose, limits
from moh_vision.attention.executors.auto import choose_varlen, say, table, use_table
from moh_vision.attention.routing import Call

SHIPPED = {
    path.stem: json.loads(path.read_text()) for path in sorted(Path(limits.__file__).parent.glob("limits_*.json"))
}


pytestmark = pytest.mark.usefixtures("shipped_limits")


@pytest.fixture
def cache(monkeypatch, tmp_path, shipped_limits):
    """Where a measured table belongs; nothing is there, and nothing was read yet."""
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path))
    use_table(None)
    limits._found.cache_clear()
    yield limits.table_path()
    limits._found.cache_clear()


def layer_of(budget, heads=12, **kwargs):
    return HeadMixtureAttention(heads * 64, HeadBudget(heads, 64, *budget), **kwargs)


def chosen(layer, x, **kwargs):
    return choose(layer, Call(x, layer.route(x)[0], **kwargs))


def choice(tokens, budget, dtype=torch.float32, batch=8, training=False, call=None, **kwargs):
    layer = layer_of(budget, dtype=dtype, **kwargs).train(training)
    with torch.set_grad_enabled(training):
        return chosen(layer, torch.randn(batch, tokens, layer.dim, dtype=dtype), **(call or {}))


def everywhere(rows):
    """A table with the same rows everywhere."""
    return {"about": "a test"} | {
        path: {kind: {bits: {mode: rows for mode in limits.MODES} for bits in limits.BITS} for kind in kinds}
        for path, kinds in limits.KINDS.items()
    }


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize("path", ["torch"], indirect=True)
def test_where_it_pays_in_pytorch(path):
    assert choice(197, (4, 5))[0] == "masked"
    assert choice(197, (3, 3))[0] == "packed"
    assert choice(197, (3, 3), batch=4)[0] == "masked"
    assert choice(1024, (2, 4), batch=1)[0] == "packed"
    assert choice(1024, (4, 7), batch=1)[0] == "masked"
    assert choice(197, (2, 4), scope="sample")[0] == "packed"
    assert choice(197, (4, 7), scope="sample")[0] == "masked"
    assert choice(197, (2, 4), scope="sample", dtype=torch.bfloat16)[0] == "masked"


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_where_it_pays_with_the_operators(path):
    for training in (False, True):
        for scope in ("token", "sample"):
            assert choice(197, (4, 5), scope=scope, training=training)[0] == "packed"
            assert choice(197, (3, 3), scope=scope, training=training, batch=1)[0] == "packed"
            assert choice(17, (3, 3), scope=scope, training=training, batch=1)[0] == "masked"
    assert choice(197, (4, 8))[0] == "masked"  # every head


def test_one_image_by_its_timestep(path):
    """DiT-S at half of its heads, as people sample."""
    assert choice(256, (1, 2), scope="sample", batch=1, heads=6)[0] == "packed"


def test_masks_forbid_packing_in_pytorch_only(path):
    mask = torch.ones(1, 1, 1024, 1024, dtype=torch.bool).tril()
    for call in (dict(attn_mask=mask), dict(is_causal=True)):
        picked, reason = choice(1024, (2, 4), batch=1, training=True, call=call)
        assert picked == ("packed" if path == "cpp" else "masked")
        assert path == "cpp" or reason == "packed would have to write out the mask of every query"


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_what_the_operators_cannot_do_is_judged_as_pytorch(path):
    learned = torch.zeros(1, 1, 256, 256, requires_grad=True)
    for kwargs, where in (
        (dict(), "cpp"),
        (dict(call=dict(dropout_p=0.1)), "torch"),
        (dict(call=dict(attn_mask=learned)), None),
        (dict(call=dict(attn_mask=learned.detach())), "cpp"),
        (dict(dtype=torch.float64), "torch"),
    ):
        reason = choice(256, (3, 3), training=True, **kwargs)[1]
        if where is None:
            assert "the mask of every query" in reason
        else:
            assert f"(token, {where}, " in reason


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_16_bits_are_the_operators_where_the_processor_has_products(path, available, monkeypatch):
    monkeypatch.setattr(kernels, "OPS", type("", (), dict(brgemm_available=staticmethod(lambda dtype: available))))
    picked, reason = choice(197, (4, 5), dtype=torch.bfloat16)
    assert picked == ("packed" if available else "masked")
    assert (", cpp, " if available else ", torch, ") in reason
    layer, x = layer_of((4, 5)), torch.randn(8, 197, 768)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert chosen(layer.eval(), x)[0] == picked


@pytest.mark.parametrize("path", ["torch"], indirect=True)
def test_sees_that_all_samples_chose_the_same_heads(path):
    layer = layer_of((4, 7), scope="sample").eval()
    x, conditions = torch.randn(4, 197, 768), torch.randn(4, 768)
    with torch.no_grad():
        for condition, picked in ((conditions, "masked"), (conditions[:1].expand(4, -1), "packed")):
            routing, _ = layer.route(x, condition=condition)
            assert choose(layer, Call(x, routing))[0] == picked


def test_skips_most_of_moas_experts(path):
    layer = HeadMixtureAttention(64, HeadBudget(64, 64, 0, 8), router="moa", kv_heads=1)
    assert chosen(layer, torch.randn(2, 128, 64))[0] == "packed"


def test_reads_how_many_heads_mae_runs(path):
    """Its budget says all; an expert is all but one, or one."""
    layer = layer_of((12, 0), router="mae", router_kwargs=dict(mode="argmax", dropout=0.0)).eval()
    with torch.no_grad():
        assert "92% of the heads run" in chosen(layer, torch.randn(8, 256, 768))[1]


@pytest.mark.parametrize(
    "path, kwargs, words",
    [
        ("torch", dict(tokens=17, budget=(2, 4), batch=1), r"^too few keys, or numbers .* \(token, torch\)$"),
        ("cpp", dict(tokens=17, budget=(2, 4), batch=1), r"^too few keys, or numbers .* \(token, cpp\)$"),
        (
            "torch",
            dict(tokens=197, budget=(4, 5)),
            r"75% of the heads run, packed pays up to 62% \(token, torch, from 192 keys and 700,000 numbers",
        ),
    ],
    indirect=["path"],
)
def test_says_why(path, kwargs, words):
    picked, reason = choice(**kwargs)
    assert picked == "masked"
    assert re.search(words, reason), reason


def test_a_router_that_does_not_balance(path):
    """In PyTorch all tokens in the same few heads leave nothing to pad away: the longest head counts, not the budget."""
    layer, x = layer_of((1, 2)), torch.randn(8, 197, 768)
    assert chosen(layer, x)[0] == "packed"
    nn.init.zeros_(layer.router.routed.weight)  # ties: the first two heads for every token
    picked, reason = chosen(layer, x)
    if path == "cpp":
        assert picked == "packed"
    else:
        assert picked == "masked" and reason.endswith("but they are spread too unevenly over the tokens")


@pytest.mark.parametrize("path", ["torch"], indirect=True)
def test_the_same_in_both_passes_of_a_reentrant_checkpoint(path):
    """The first runs without gradients; another executor would draw another dropout."""
    layer, x = layer_of((1, 4)), torch.randn(8, 128, 768)
    with torch.no_grad():
        first = chosen(layer, x)
    assert chosen(layer, x) == first and first[0] == "packed"
    with torch.no_grad():
        assert chosen(layer.eval(), x)[0] == "masked"


def test_replaced_projections_are_left_alone(path):
    """An adapter around a projection must be called, not read past."""
    layer, x = layer_of((1, 2)), torch.randn(8, 197, 768)
    layer.proj = nn.Sequential(layer.proj)
    assert chosen(layer, x) == ("masked", "the projections carry hooks or are not plain linear layers")
    assert layer(x)[0].shape == x.shape


def test_logs_what_it_picked_once(path, caplog):
    say.cache_clear()
    layer = layer_of((1, 2))
    with caplog.at_level(logging.INFO, "moh_vision.attention"), torch.no_grad():
        for batch in (8, 7, 8):
            layer(torch.randn(batch, 201, 768))
        layer(torch.randn(1, 17, 768))
    assert [r.message.split(":")[0] for r in caplog.records] == ["auto picked packed", "auto picked masked"]


# ---------------------------------------------------------------- compiled


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="is_exporting() is True under torch.compile: all heads run")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", ["token", "sample"])
def test_compiled_it_chooses_by_shapes_and_table(path, scope, dtype, caplog):
    """`packed` where the router made the list and the operators run; one graph while weights and choices change."""
    say.cache_clear()
    use_table(everywhere([[1, 1, 0.9]]))
    layer = HeadMixtureAttention(64, HeadBudget(4, 16, 1, 1), scope=scope, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        for _ in range(4):
            y, _ = compiled(torch.randn(3, 19, 64, dtype=dtype))
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
        traced = [r.message.split(":")[0] for r in caplog.records]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    skips = path == "cpp" and kernels.native(torch.device("cpu"), dtype, "attend")
    assert traced == [f"auto picked {'packed' if skips else 'masked'}"]


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_compiled_the_budget_says_how_many_heads_run(path):
    say.cache_clear()
    use_table(everywhere([[1, 1, 0.9]]))
    layer = HeadMixtureAttention(
        64, HeadBudget(4, 16, 4, 0), router="mae", router_kwargs=dict(mode="argmax", dropout=0.0)
    ).eval()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.randn(3, 19, 64)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tables(name):
    use_table(SHIPPED[name])
    assert table() == SHIPPED[name] and len(SHIPPED) == 2
    assert not limits.measured("triton")  # on no GPU so far
    for kinds in ("cpp", "torch"):
        for kind in limits.KINDS[kinds]:
            for modes in SHIPPED[name][kinds][kind].values():
                for rows in modes.values():
                    assert rows == sorted(rows)  # the last one that is reached counts


def test_a_given_table_decides(path):
    use_table(everywhere([[1, 1, 0.5]]))
    assert choice(9, (1, 2), batch=1)[0] == "packed" and choice(9, (3, 4), batch=1)[0] == "masked"
    use_table(everywhere([[1, 1, 1.0], [100, 1, 0.1], [100, 1_000_000, 0.8]]))
    assert choice(9, (3, 4), batch=1)[0] == "packed"
    assert choice(100, (3, 3), batch=1)[0] == "masked" and choice(100, (3, 3), batch=16)[0] == "packed"
    use_table(everywhere([]))
    assert choice(1024, (3, 1))[0] == "masked"


@pytest.mark.parametrize(
    "change, picks",
    [
        ({}, True),
        (dict(is_causal=True), False),
        (dict(attn_mask=torch.ones(1, 1, 100, 100, dtype=torch.bool)), False),
        (dict(dropout_p=0.1), False),
        (dict(x=torch.randn(1, 99, 256, dtype=torch.bfloat16)), False),  # too few keys
        (dict(x=torch.randn(1, 100, 256)), False),  # float32
    ],
)
def test_where_varlen_pays(change, picks):
    use_table(everywhere([[100, 1, 0.5]]))
    layer = HeadMixtureAttention(256, HeadBudget(4, 64, 1, 1), dtype=torch.bfloat16).eval()
    x = torch.randn(1, 100, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        call = Call(x, layer.route(x)[0])._replace(**change)
        assert (choose_varlen(layer, call) is not None) == picks
        layer.router.budget = HeadBudget(4, 64, 1, 2)
        assert choose_varlen(layer, call) is None
    use_table({path: part for path, part in everywhere([]).items() if path != "varlen"})
    assert choose_varlen(layer, call) is None  # nothing was measured


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda t: [], "does not say what it is about"),
        (lambda t: t.pop("about"), "does not say what it is about"),
        (lambda t: t.pop("cpp"), "cpp / token / float32 / forward: null is not a list of rows"),
        (lambda t: t["torch"].update({"sample, alike": 1}), "torch / sample, alike / float32 / forward"),
        (lambda t: t["cpp"]["token"]["16 bits"].update(forward=[[1, 2]]), r"16 bits / forward: \[\[1, 2\]\] is not"),
        (lambda t: t["cpp"]["token"]["float32"].update(training=[[1, 2, 1.5]]), "largest share"),
        (lambda t: t["cpp"]["token"]["float32"].update(training=[[1, True, 0.5]]), "largest share"),
        (lambda t: t["cpp"]["token"]["float32"].update(training=[[1, 2, float("nan")]]), "largest share"),
    ],
)
def test_malformed_tables_are_refused(damage, words):
    bad = copy.deepcopy(SHIPPED["limits_amx"])
    result = damage(bad)
    before = table()
    with pytest.raises(ValueError, match=words):
        use_table(result if result == [] else bad)
    assert table() == before


def test_a_measured_table_is_found_and_read_once(cache):
    measured = everywhere([[1, 1, 0.5]])
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps(measured))
    assert table() == measured
    cache.unlink()
    assert table() == measured
    use_table(SHIPPED["limits_avx512"])
    assert table() == SHIPPED["limits_avx512"]
    use_table(None)
    assert table() == measured


def test_without_a_measured_table(cache, caplog):
    assert table() in SHIPPED.values() and not caplog.records


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{}", b"[]"])
def test_a_damaged_measured_table_is_ignored(cache, caplog, content):
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert table() == table() == limits.shipped()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(cache) in record.message and limits.COMMAND in record.message


def test_what_ships_for_which_processor(monkeypatch):
    for capability, amx, name in (
        ("AVX512", True, "amx"),
        ("AVX512", False, "avx512"),
        ("AVX2", False, "amx"),
        ("DEFAULT", False, "amx"),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda a=amx: a)
        assert limits.shipped() == SHIPPED[f"limits_{name}"]


def test_dropout_computes_all_heads_while_compiled():
    """PyTorch's form of attention has shapes that depend on the choice."""
    layer = HeadMixtureAttention(48, HeadBudget(4, 12, 1, 1), attn_drop=0.1, executor="packed")
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert compiled(torch.randn(2, 9, 48))[0].isfinite().all()

"""MACs as executed: the executor that the layers take, and the heads that it computes."""

import contextlib
import copy

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from moh_vision import convert
from moh_vision.analysis import Conditions, count_macs, describe
from moh_vision.analysis.describe import module_table
from moh_vision.attention import HeadBudget, HeadMixtureAttention, kernels
from moh_vision.attention.executors import auto
from moh_vision.attention.executors.limits import BITS, KINDS, MODES, use_table
from moh_vision.attention.model_heads import attention_layers
from moh_vision.language.models.create import create_text_model

TRAIN = Conditions(batch=3, train=True)
SIZES = dict(img_size=4, patch_size=2, in_chans=1, embed_dim=8, depth=2, num_heads=4, num_classes=3)
IMAGE = torch.zeros(1, 1, 4, 4)
N, C, D, H = 5, 8, 2, 4  # tokens with the class token, width, head width, heads


@pytest.fixture(autouse=True)
def plain_pytorch():
    """The path that every machine has, and that torch's counter sees."""
    kernels.use("torch")
    yield
    kernels.use(None)
    use_table(None)


def vit(budget=((1, 1), (1, 1)), **kwargs):
    return timm.create_model("moh_vit_tiny_patch16_224", **SIZES, head_budget=budget, **kwargs)


def table(limit):
    """One by which `packed` pays up to this share of the heads."""
    rows = {bits: {mode: [[1, 1, limit]] for mode in MODES} for bits in BITS}
    return dict({path: {kind: rows for kind in kinds} for path, kinds in KINDS.items()}, about="a test")


@contextlib.contextmanager
def counting():
    """torch's counter, with attention as two products: its operator for CPUs is known there only of late."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def counted(model, *inputs, **named):
    with counting() as counter:
        model(*inputs, **named)
    return counter.get_total_flops() // 2


def tiny_text(preset, **fields):
    sizes = dict(vocab_size=50, hidden_size=24, intermediate_size=40, num_attention_heads=4)
    return create_text_model(preset, **sizes, **fields).eval()


def dense_models():
    ids = torch.zeros(1, 6, dtype=torch.long)
    yield vit(None, router="dense"), (IMAGE,), {}
    dit = timm.create_model("dit_small_patch2", img_size=4, in_chans=2, depth=2, embed_dim=24, num_heads=3)
    yield dit, (torch.zeros(1, 2, 4, 4), torch.zeros(1).long(), torch.zeros(1).long()), {}
    stages = dict(embed_dims=[24, 48, 48, 48], num_heads=[1, 2, 2, 2], depths=[1, 1, 2, 1], mlp_ratios=[2] * 4)
    yield timm.create_model("transnext_micro", img_size=64, **stages), (torch.zeros(1, 3, 64, 64),), {}
    layers = dict(encoder_layers=2, decoder_layers=1)
    yield tiny_text("mt_transformer_base", **layers), (ids[:, :4],), dict(decoder_input_ids=ids)
    yield tiny_text("clm_small", num_key_value_heads=2, num_hidden_layers=2), (ids,), {}


@pytest.mark.parametrize("number", range(5))
def test_a_dense_model_counts_as_in_torch(number):
    model, inputs, named = list(dense_models())[number]
    for train in (False, True):
        macs = count_macs(model, *inputs, conditions=Conditions(train=train), **named)
        total = counted(model.eval(), *inputs, **named)
        assert macs.dense == macs.ideal == macs.executed == macs.every_head == total
        assert macs.parameters == sum(p.numel() for p in model.parameters())
        assert {layer.executor for layer in macs.attention} == {"masked"}


# Heads by (router, scope): queries, keys and values, scores, outputs; and the router's MACs. 2 of 4 heads, 1 shared.
TOKEN, SAMPLE, ALL = (2, 4, 2, 2), (2, 2, 2, 2), (4, 4, 4, 4)
BY_HAND = {
    ("dense", "token"): (ALL, 0),
    ("moh", "token"): (TOKEN, N * C * (3 + 2)),
    ("moh", "sample"): (SAMPLE, C * (3 + 2)),
    ("query_norm", "token"): ((4, 4, 2, 2), 0),
    ("query_norm", "sample"): ((4, 2, 2, 2), 0),
    ("moa", "token"): (TOKEN, N * C * 4),
    ("moa", "sample"): (SAMPLE, C * 4),
    ("mae", "token"): (ALL, C * 256 + 256 * 4),
}
BUDGETS = {"moa": HeadBudget(4, D, 0, 2), "mae": HeadBudget(4, D, 4, 0), "dense": HeadBudget(4, D, 4, 0)}


class OneLayer(torch.nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.attn = HeadMixtureAttention(*args)

    def forward(self, x):
        return self.attn(x)[0]


def macs_of_heads(queries, keys, scores, outputs):
    return C * D * N * (queries + 2 * keys + outputs), 2 * N * N * D * scores


@pytest.mark.parametrize("router, scope", BY_HAND)
@pytest.mark.parametrize("path", ["torch", "cpp"])
def test_one_layer_by_hand(router, scope, path, request):
    if path == "cpp":
        request.getfixturevalue("cpp_operators")
    heads, routing = BY_HAND[router, scope]
    budget = BUDGETS.get(router, HeadBudget(4, D, 1, 1))
    model, x = OneLayer(C, budget, router, scope, "packed"), torch.zeros(1, N, C)
    macs = count_macs(model, x)
    rows = {row.part: row[3:] for row in macs.modules if row.part}  # dense, ideal, executed
    dense, ideal, executed = zip(rows["projections"], rows["scores"])
    assert (dense, ideal) == (macs_of_heads(*ALL), macs_of_heads(*heads)) and executed == ideal
    mixture = 4 * 4 if router == "mae" else 0  # of 4 experts into 4 heads
    assert rows.get("router", (0, 0, 0)) == (0, routing, routing + mixture)
    model.attn.executor = "masked"
    masked = count_macs(model, x)
    assert masked.executed == masked.dense + routing + mixture == masked.every_head
    assert masked.ideal == macs.ideal


@pytest.fixture
def cpp_operators():
    if not kernels.build.load():
        pytest.skip("the C++ operators are not built")
    kernels.use("cpp")


@pytest.mark.parametrize("router, scope", [key for key in BY_HAND if key[0] in ("moh", "moa", "query_norm")])
@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_executes_what_torch_counts_when_it_runs(router, scope, active, dtype):
    """Not the scores of a token's own heads: there packing pads to the head that most tokens chose."""
    torch.manual_seed(0)
    model = vit([(0, active)] * 2, router=router, scope=scope, executor="packed").eval()
    images = torch.randn(3, 1, 4, 4)
    autocast = dict(dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    with counting() as counter, torch.autocast("cpu", **autocast):
        model(images)
    found = {str(op): n // 2 for op, n in counter.get_flop_counts()["Global"].items()}
    scores = sum(n for op, n in found.items() if "bmm" in op)
    conditions = Conditions(batch=3, dtype=dtype if autocast["enabled"] else None)
    macs = count_macs(model, IMAGE, conditions=conditions)
    rows = [row for row in macs.modules if row.part == "scores"]
    assert sum(found.values()) - scores == 3 * (macs.executed - sum(row.executed for row in rows))
    if scope == "sample" or active == 1:
        assert scores >= 3 * sum(row.executed for row in rows)
    assert {layer.executor for layer in macs.attention} == {"packed"}


def test_auto_says_what_a_training_step_picks(monkeypatch):
    model = vit([(1, 1), (2, 2)], scope="sample").train()
    picked = []
    monkeypatch.setattr("moh_vision.attention.layer.announce", lambda name, reason: picked.append((name, reason)))
    for limit in (0.1, 0.6):
        use_table(table(limit))
        picked.clear()
        model.forward_routed(torch.randn(3, 1, 4, 4))
        macs = count_macs(model, IMAGE, conditions=TRAIN)
        assert [layer.executor for layer in macs.attention] == [name for name, _ in picked]
        assert [layer.executor for layer in macs.attention] == ["packed" if limit > 0.5 else "masked", "masked"]
        assert macs.attention[1].reason == picked[1][1]
    first = [row for row in macs.modules if row.name == "blocks.0.attn" and row.part == "projections"]
    assert first[0].executed == first[0].ideal < first[0].dense


def test_conditions_decide(monkeypatch):
    use_table(table(0.9))

    def executors(model, **how):
        return {layer.executor for layer in count_macs(model, IMAGE, conditions=Conditions(**how)).attention}

    norms = vit(router="query_norm")
    assert executors(norms) == {"packed"} and executors(norms, train=True) == {"masked"}  # its gradient needs all heads
    assert executors(vit(), compiled=True) == {"masked"} and executors(vit()) == {"packed"}
    unfused = vit()
    for layer in attention_layers(unfused):
        layer.fused_attn = False
    assert executors(unfused) == {"masked"}
    seen = []
    original = auto.choose_operators
    monkeypatch.setattr(auto, "choose_operators", lambda layer, call: seen.append(call) or original(layer, call))
    count_macs(vit(), IMAGE, conditions=TRAIN._replace(batch=7, dtype=torch.bfloat16))
    assert seen[0].x.shape == (7, N, C) and seen[0].routing.active.shape == (7, N, H)
    assert (seen[0].routing.active.sum(-1) == 2).all() and seen[0].routing.active[..., 0].all()
    assert seen[0].routing.stats.counts.tolist() == [[5, 2, 2, 1], [5, 2, 1, 2], [5, 1, 2, 2]] * 2 + [[5, 2, 2, 1]]


def test_uni_mae_leaves_a_head_out_while_it_trains():
    """It draws one of the experts for every instance, and has no gate; on evaluation all heads run."""
    use_table(table(0.9))
    layer = OneLayer(C, BUDGETS["mae"], "mae", "token", "auto")
    layer.attn.router.set_mode("uniform")
    x = torch.zeros(1, N, C)
    still, train = count_macs(layer, x), count_macs(layer, x, conditions=TRAIN)
    assert still.attention[0].executor == "masked" and train.attention[0].executor == "packed"
    assert train.ideal - train.attention[0].linears == sum(macs_of_heads(3, 3, 3, 3)) - macs_of_heads(3, 3, 3, 3)[0]
    assert still.scores == macs_of_heads(*ALL)[1] and train.scores == macs_of_heads(3, 3, 3, 3)[1]


def test_grouped_heads():
    """All keys and values of LLaMA's groups are projected."""
    model = tiny_text("clm_moh_small_50", num_key_value_heads=2, num_hidden_layers=1)
    model.model.layers[0].self_attn.executor = "packed"
    ids = torch.zeros(1, 6, dtype=torch.long)
    macs = count_macs(model, ids)
    projections, scores = (next(r for r in macs.modules if r.part == part) for part in ("projections", "scores"))
    per_head, active = 6 * 24 * 6, model.model.layers[0].self_attn.budget.active  # 6 tokens, width 24, heads of 6
    assert active == 2 and projections.dense == per_head * (4 + 2 * 2 + 4)
    assert projections.ideal == projections.executed == per_head * (active + 2 * 2 + active)
    assert (scores.dense, scores.executed) == (2 * 6 * 6 * 6 * 4, 2 * 6 * 6 * 6 * 2)

    sizes = dict(hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
    norms = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).eval()
    convert(norms, head_budget="uniform:0.5", executor="packed")
    macs = count_macs(norms, ids)
    projections = next(row for row in macs.modules if row.part == "projections")
    assert macs.attention[0].router == "query_norm"  # looks at the queries of all heads
    assert projections.ideal == projections.executed == per_head * (4 + 2 * 2 + active)

    layer = model.model.layers[0].self_attn
    layer.executor = "auto"
    use_table(table(0.9))
    assert count_macs(model, ids).attention[0].executor == "packed"
    reason = count_macs(model, ids, conditions=TRAIN).attention[0].reason
    assert reason == "packed would have to write out the mask of every query"  # not that a cache needs the keys


def test_transnext_skips_where_it_pays():
    stages = dict(embed_dims=[24, 48, 48, 96], num_heads=[1, 2, 2, 4], depths=[1, 1, 1, 1], mlp_ratios=[2] * 4)
    budget = [(1, 0), (1, 1), (1, 1), (1, 1)]
    model = timm.create_model("transnext_micro", img_size=64, router="moh", head_budget=budget, **stages)
    layers = attention_layers(model)
    macs = count_macs(model, torch.zeros(1, 3, 64, 64))
    assert macs.executed == macs.every_head > macs.dense > macs.ideal
    layers[-1].executor = "packed"
    packed = count_macs(model, torch.zeros(1, 3, 64, 64))
    rows = {row.part: row for row in packed.modules if row.name == "stages.3.blocks.0.attn"}
    T = 4  # a map of 2 x 2
    assert rows["projections"].dense == 4 * T * 96 * 96 and rows["projections"].executed == 3 * T * 96 * 96
    assert rows["scores"].dense == 2 * rows["scores"].executed == 2 * T * T * 96
    assert macs.executed - packed.executed == T * 96 * 96 + T * T * 96
    assert packed.attention[-1].executor == "packed" and rows["other"].dense > 0  # the MLP behind the positions


def test_the_model_is_left_as_it_is():
    model = vit()
    before = copy.deepcopy(model.state_dict())
    count_macs(model, IMAGE, conditions=TRAIN)
    layers = attention_layers(model)
    assert not any("execute" in vars(layer) or layer._forward_hooks for layer in layers)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_table_of_modules():
    model = vit([(1, 1), (2, 2)])
    macs = count_macs(model, IMAGE, conditions=TRAIN)
    lines = module_table(macs)
    assert max(map(len, lines)) <= 100
    rows = {line.split("  ")[0]: line.split() for line in lines[1 : lines.index("")]}
    assert rows["blocks.0-1.attn projections"][2:4] == ["2", "x"]
    assert [rows[key][-3:] for key in ("blocks.0-1.mlp", "patch_embed", "head")] == [
        [f"{n / 1e6:.3f}"] * 3 for n in (2 * 2 * N * C * 4 * C, 4 * 4 * C, C * 3)
    ]
    assert rows["total"][-3:] == [f"{n / 1e6:.3f}" for n in (macs.dense, macs.ideal, macs.executed)]
    parameters = sum(float(row[-4]) for key, row in rows.items() if key != "total")
    assert parameters == pytest.approx(macs.parameters / 1e6, abs=0.003)
    share = f"{100 * macs.ideal / macs.dense:.1f} % of dense ideal, {100 * macs.executed / macs.dense:.1f} % executed"
    assert f"MACs:         {macs.dense:,} dense (every head, no router): {share}" in lines
    text = describe("tiny", model, IMAGE, conditions=TRAIN._replace(dtype=torch.bfloat16))
    assert "executed:     a training step on cpu, batch 3, bfloat16\n" in text
    assert "masked in blocks.0-1.attn: " in text.replace("\n", " ") or "masked in blocks.0.attn" in text

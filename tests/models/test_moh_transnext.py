"""TransNeXt and MoH-ViT against the formulas, computed from files in the official layout."""

import pytest
import timm
import torch
from torch.nn import functional as F

from moh_vision.attention.executors.plan import first_that_skips
from moh_vision.attention.executors.signature import sign
from moh_vision.attention.routing import Call
from moh_vision.models.foveal_attention import AggregatedPairs, CosinePairs, position_tables
from moh_vision.models.transnext import checkpoint_filter_fn
from tests.support.official_dit import official_gates
from tests.support.refusals import refuse
from tests.support.small_transnext import MIXED, SMALL, official_names, scramble, small


@pytest.mark.parametrize(
    "name, tensors", [("small_80", 1145), ("small_75", 1145), ("base_75", 1177), ("base_50", 1197)]
)
def test_published_key_tables(name, tensors):
    """Published files hold no position tables."""
    model = timm.create_model(f"moh_transnext_{name}", device="meta")
    hub_id = f"Chat-UniVi/MoH-ViT-{name[0].upper()}-{name[-2:]}"
    assert model.pretrained_cfg["hf_hub_id"] == hub_id
    assert model.pretrained_cfg["hf_hub_filename"] == f"moh_transnext_{name}.pth"
    assert len(official_names(model)) == tensors


class Official:
    """The published model as plain formulas on a state dict with the published names; slow and direct."""

    def __init__(self, state, heads, pools, budgets, pretrain):
        self.s = state
        self.heads = heads
        self.pools = pools
        self.budgets = budgets or [None] * 4
        self.pretrain = pretrain

    def linear(self, x, name):
        return F.linear(x, self.s[name + ".weight"], self.s.get(name + ".bias"))

    def norm(self, x, name, eps):
        return F.layer_norm(x, x.shape[-1:], self.s[name + ".weight"], self.s[name + ".bias"], eps)

    def bias(self, p, H, W, ph, pw, unit):
        """Position bias [h, H*W, ph*pw], pair by pair."""

        def centre(n, k):
            return F.adaptive_avg_pool1d(torch.arange(n, dtype=torch.float32)[None], k)[0]

        dy = (torch.arange(H)[:, None] - centre(H, ph)[None]) / (unit[0] - 1) * 8  # [H, ph]
        dx = (torch.arange(W)[:, None] - centre(W, pw)[None]) / (unit[1] - 1) * 8
        down = dy[:, None, :, None].expand(H, W, ph, pw)
        right = dx[None, :, None, :].expand(H, W, ph, pw)
        pairs = torch.stack([down, right], -1).reshape(-1, 2)
        pairs = pairs.sign() * (pairs.abs() + 1).log2() / 3
        bias = self.linear(self.linear(pairs, p + "cpb_fc1").relu(), p + "cpb_fc2")
        return bias.t().reshape(-1, H * W, ph * pw)

    def attention(self, x, p, stage, H, W, budget):
        B, N, C = x.shape
        h = self.heads[stage]
        pool = self.pools[stage]
        unit = (self.pretrain // 2 ** (stage + 2),) * 2

        def split(t, n):  # [n, B, h, N, D]
            return t.reshape(B, -1, n, h, C // h).permute(2, 0, 3, 1, 4)

        def window(t):  # [B, h, N, D] -> [B, h, N, 9, D]
            grid = t.transpose(2, 3).reshape(B * h, -1, H, W)
            neighbours = F.unfold(grid, 3, padding=1).reshape(B, h, C // h, 9, N)
            return neighbours.permute(0, 1, 4, 3, 2)

        temperature = F.softplus(self.s[p + "temperature"])
        if pool == 1:
            q, k, v = split(self.linear(x, p + "qkv"), 3)
            q = F.normalize(q, dim=-1) + self.s[p + "query_embedding"]
            q = q * temperature * torch.tensor(float(N)).log()
            a = q @ F.normalize(k, dim=-1).transpose(-2, -1)
            o = (a + self.bias(p, H, W, H, W, unit)).softmax(-1) @ v
        else:
            ph = H // pool
            pw = W // pool
            q = F.normalize(split(self.linear(x, p + "q"), 1)[0], dim=-1)
            k, v = split(self.linear(x, p + "kv"), 2)
            k = F.normalize(k, dim=-1)
            inside = F.unfold(torch.ones(1, 1, H, W), 3, padding=1)[0].t() > 0  # [N, 9]
            length = (inside.sum(-1) + ph * pw).float().log()[:, None]
            scaled = (q + self.s[p + "query_embedding"]) * temperature * length
            near = (window(k) @ scaled.unsqueeze(-1)).squeeze(-1)
            near = near + self.s[p + "relative_pos_bias_local"][:, None]
            near = near.masked_fill(~inside, float("-inf"))
            m = x.transpose(1, 2).reshape(B, C, H, W)
            m = F.conv2d(m, self.s[p + "sr.weight"], self.s[p + "sr.bias"])
            m = F.adaptive_avg_pool2d(F.gelu(m), (ph, pw)).flatten(2).transpose(1, 2)
            kp, vp = split(self.linear(self.norm(m, p + "norm", 1e-5), p + "kv"), 2)
            far = scaled @ F.normalize(kp, dim=-1).transpose(-2, -1)
            far = far + self.bias(p, H, W, ph, pw, unit)
            near, far = torch.cat([near, far], -1).softmax(-1).split([9, ph * pw], -1)
            near = near + q @ self.s[p + "learnable_tokens"] + self.s[p + "learnable_bias"]
            o = (near.unsqueeze(-2) @ window(v)).squeeze(-2) + far @ vp
        o = o.transpose(1, 2)  # [B, N, h, D]
        if budget is not None:
            o = o * official_gates(x, self.s, p, *budget).unsqueeze(-1)
        return self.linear(o.reshape(B, N, C), p + "proj")

    def mlp(self, x, p, H, W):
        B, N, _ = x.shape
        a, v = self.linear(x, p + "fc1").chunk(2, -1)
        a = a.transpose(1, 2).reshape(B, -1, H, W)
        weight = self.s[p + "dwconv.dwconv.weight"]
        bias = self.s[p + "dwconv.dwconv.bias"]
        a = F.conv2d(a, weight, bias, padding=1, groups=a.shape[1])
        return self.linear(F.gelu(a.flatten(2).transpose(1, 2)) * v, p + "fc2")

    def __call__(self, x):
        for stage in range(4):
            i = stage + 1
            name = f"patch_embed{i}."
            stride = 4 if stage == 0 else 2
            weight = self.s[name + "proj.weight"]
            bias = self.s[name + "proj.bias"]
            x = F.conv2d(x, weight, bias, stride, padding=weight.shape[-1] // 2)
            B, C, H, W = x.shape
            x = self.norm(x.flatten(2).transpose(1, 2), name + "norm", 1e-5)
            for j in range(sum(f"block{i}.{j}.norm1.weight" in self.s for j in range(99))):
                p = f"block{i}.{j}."
                tokens = self.norm(x, p + "norm1", 1e-6)
                x = x + self.attention(tokens, p + "attn.", stage, H, W, self.budgets[stage])
                x = x + self.mlp(self.norm(x, p + "norm2", 1e-6), p + "mlp.", H, W)
            x = self.norm(x, f"norm{i}", 1e-6)
            if stage < 3:
                x = x.transpose(1, 2).reshape(B, C, H, W)
        return self.linear(x.mean(1), "head")


@pytest.mark.parametrize(
    "name, budgets", [("moh_transnext_base_50", MIXED), ("transnext_micro", None)]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_official_layout_gives_official_outputs(name, budgets, wrapped):
    model = scramble(small(name))
    state = official_names(model)
    content = state
    if wrapped:
        content = {"model": {f"module.{key}": value for key, value in state.items()}}
    again = small(name).eval()
    again.load_state_dict(checkpoint_filter_fn(content, again))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        want = Official(state, SMALL["num_heads"], (8, 4, 2, 1), budgets, 224)(x)
        torch.testing.assert_close(again(x), want, rtol=0, atol=1e-5)
    assert want.std() > 0.1


@pytest.mark.parametrize("size", [(32, 32), (48, 48), (64, 96), (224, 224)])
@torch.no_grad()
def test_other_sizes(size):
    x = torch.randn(1, 3, *size)
    model = scramble(small(img_size=size))
    want = model(x)
    for dynamic in (False, True):
        other = small(dynamic_img_size=dynamic).eval()
        other.load_state_dict(model.state_dict())
        if not dynamic:
            facts = "img_size set_input_size dynamic_img_size"
            refuse(facts, other, x, error=AssertionError)
            other.set_input_size(size)
        assert torch.equal(other(x), want)


def test_position_tables_name_every_pair():
    length, outside, coordinates, index = position_tables((6, 4), (3, 2), (56, 56), True)
    assert index.shape == (6 * 24,) and len(coordinates) < 6 * 24
    # Query (row 5, column 0) and key 0, whose centre is row 0.5, column 0.5: 4.5 down, 0.5 left.
    down, left = coordinates[index.reshape(6, 24)[0, 20]]
    assert down == pytest.approx(torch.tensor(4.5 / 55 * 8 + 1).log2().item() / 3)
    assert left == pytest.approx(-torch.tensor(0.5 / 55 * 8 + 1).log2().item() / 3)
    # A corner has 4 of 9 neighbours.
    assert length[0] == pytest.approx(torch.tensor(4.0 + 6).log().item())
    assert outside.sum(1).max() == 5


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_16_bits(dtype, tolerance):
    model = scramble(small())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        want = model(x)
        got = model.to(dtype)(x.to(dtype))
    assert got.dtype == dtype
    # A token whose two best heads are nearly equal may choose the other one.
    assert (got.float() - want).abs().mean() < tolerance * want.abs().mean()


def test_long_queries_do_not_overflow_in_float16():
    model = small(dtype=torch.float16).eval()
    for block in (model.stages[0].blocks[0], model.stages[3].blocks[0]):
        block.attn.qkv.weight.data.fill_(200.0)
    assert model(torch.randn(1, 3, 64, 64).half()).isfinite().all()


def layer_of(stage, dtype=torch.float32, **kwargs):
    """Return an attention layer of 4 (stage 2) or 8 heads (stage 3) of width 24, its tokens and positions."""
    sizes = dict(
        img_size=(96, 128),
        embed_dims=(12, 24, 96, 192),
        head_budget=[[2, 0], [0, 2], [1, 2], [2, 3]],
    )
    stage = scramble(small(**{**sizes, **kwargs}, dtype=dtype)).stages[stage]
    x = torch.randn(3, *stage.size, stage.norm.normalized_shape[0], dtype=dtype)
    return stage.blocks[0].attn, x, stage.positions(x)


ROUTERS = [
    dict(),
    dict(scope="sample"),
    dict(router="query_norm"),
    dict(router="moa", head_budget=[[0, 1], [0, 2], [0, 2], [0, 3]]),
]


def assert_packed_equals_masked(attn, x, positions, tolerance):
    outputs = []
    with torch.no_grad():
        for attn.executor in ("masked", "packed"):
            outputs.append(attn(x, positions)[0])
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kwargs", [*ROUTERS, dict(qkv_bias=False)])
def test_packed_equals_masked_in_the_last_stage(dtype, tolerance, kwargs):
    assert_packed_equals_masked(*layer_of(3, dtype, **kwargs), tolerance)


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize("kwargs", [*ROUTERS, dict(img_size=(160, 96))])
def test_packed_equals_masked_with_a_window(kwargs, path, monkeypatch):
    attn, x, positions = layer_of(2, **kwargs)
    calls = []
    make = AggregatedPairs.__init__

    def counted(self, *args):
        calls.append(args)
        make(self, *args)

    monkeypatch.setattr(AggregatedPairs, "__init__", counted)
    assert_packed_equals_masked(attn, x, positions, 1e-5)
    assert calls


@pytest.mark.parametrize("path", ["cpp", "torch", "triton"], indirect=True)
def test_heads_are_skipped_by_cpp_in_inference(path):
    """Triton's kernels know neither unit queries nor a position bias with a gradient."""
    attn, x, positions = layer_of(3)

    def skips(compiling=False):
        tokens = x.flatten(1, 2)
        routing, q = attn.route(tokens)
        mode = "compiled" if compiling else "eager"
        executor, _ = first_that_skips(attn, sign(attn, Call(tokens, routing, q=q), mode))
        return executor is CosinePairs

    assert not skips()
    with torch.no_grad():
        attn.train()
        assert not skips()
        attn.eval()
        assert skips() == (path == "cpp") and not skips(compiling=True)
        attn.qkv.register_forward_hook(lambda *_: None)
        assert not skips()


def test_routers_and_temperatures_in_the_recipe():
    model = small()
    spared = model.no_weight_decay()
    names = {name.split(".")[-1] for name in spared}
    assert {"temperature", "query_embedding", "relative_pos_bias_local"} <= names
    assert not any("router" in name for name in spared)


IMPOSSIBLE = {
    "more heads than there are": (
        dict(head_budget=[[2, 0], [0, 5], [1, 2], [4, 2]]),
        "head_budget layer 1 shared=0 routed=5 4",
    ),
    "three stages": (dict(num_heads=(2, 4, 4)), "num_heads (2, 4, 4) 4 stage"),
    "an odd width": (dict(num_heads=(2, 4, 4, 7)), "stage 3 embed_dim 48 multiple num_heads 7"),
    "global_pool": (dict(global_pool="max"), "global_pool 'max' 'avg' ''"),
    "img_size": (dict(img_size=0), "img_size 0 1"),
}


@pytest.mark.parametrize("options, facts", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_arguments(options, facts):
    refuse(facts, small, **options)

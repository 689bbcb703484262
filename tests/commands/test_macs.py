import pytest
import timm
import torch

from moh_vision.commands.macs import PAPERS, count, report
from moh_vision.language.models.create import create_text_model
from moh_vision.models.counts import count_macs
from moh_vision.models.describe import describe


@pytest.mark.parametrize("preset", PAPERS)
def test_rows_of_the_papers(preset):
    """MoA's masked models are printed with linear layers and twice the scores, the others with linear layers alone."""
    millions, macs = PAPERS[preset]
    found, masked = count(preset), preset.startswith("mlm_")
    assert found.parameters / 1e6 == pytest.approx(millions, rel=0.0005 if masked else 0.01)
    if preset.startswith("clm_") and "wt103" not in preset:  # Jin 2024, table A
        assert round(found.parameters / 1e6) == millions
    if macs and masked and preset != "mlm_base":
        near = 0.0065 if preset == "mlm_moa_8K8E128D" else 0.0025
        assert (found.macs.linears + 2 * found.macs.scores) / 1e6 == pytest.approx(macs, rel=near)
        assert -0.12 < found.macs.linears / (macs * 1e6) - 1 < -0.08
    elif macs:
        assert found.macs.linears / 1e6 == pytest.approx(macs, rel=0.005)


def test_gates_of_mae_are_its_difference_to_base():
    """18 times 512 * 256 + 256 * 8 with biases, and the batch norm; the paper says 2.42M."""
    gates = count("mt_mae_7").parameters - count("mt_transformer_base").parameters
    assert gates == 18 * (512 * 256 + 256 + 256 * 8 + 8 + 2 * 512) and round(gates / 1e6, 2) == 2.42


def tiny(attention, **fields):
    with torch.device("meta"):
        return create_text_model(
            "mt_transformer_base", vocab_size=50, hidden_size=24, intermediate_size=40, num_attention_heads=4,
            encoder_layers=2, decoder_layers=1, attention=attention, **fields,
        )  # fmt: skip


def macs_of(model, sources, targets):
    ids = [torch.zeros(1, length, dtype=torch.long) for length in (sources, targets)]
    return count_macs(model, ids[0], decoder_input_ids=ids[1])


# Linear layers of one attention by the formulas of the papers, for N queries and M keys of width d = 24.
FORMULAS = {
    "dense": (dict(router="dense"), lambda N, M, how: (2 * N + 2 * M) * 24 * 24, 24),
    "moa": (
        dict(router="moa", top_k=3, experts=5, head_dim=8, bias=False),
        lambda N, M, how: 24 * (2 * M * 8 + 2 * N * 3 * 8 + N * 5),  # T d (2D + 2KD + E)
        3 * 8,
    ),
    "moh": (
        dict(router="moh", head_budget=[[1, 1]] * 2),  # 2 of 4 heads of width 6; 3 candidates and 2 gates
        lambda N, M, how: 2 * M * 24 * 24 + 2 * N * 24 * 12 + N * 24 * (3 + 2),
        2 * 6,
    ),
    "mae": (
        dict(router="mae", leave_out=2),  # 6 experts; in the decoder's self-attention one gate a token
        lambda N, M, how: (2 * N + 2 * M) * 24 * 24 + (N if how == "causal" else 1) * (24 * 256 + 256 * 6),
        24,
    ),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_by_hand_with_texts_of_different_length(kind):
    attention, formula, width = FORMULAS[kind]
    fields = {}
    if kind == "moh":
        one = dict(attention, head_budget=[[1, 1]])
        fields = dict(decoder_attention=one, cross_attention=one)
    model = tiny(attention, **fields)
    S, T = 7, 5
    macs = macs_of(model, S, T)
    layers = [(S, S, "encoder")] * 2 + [(T, T, "causal"), (T, S, "cross")]
    assert [(layer.queries, layer.keys) for layer in macs.attention] == [(N, M) for N, M, _ in layers]
    assert [layer.router for layer in macs.attention] == [kind] * 4
    assert [layer.linears for layer in macs.attention] == [formula(*layer) for layer in layers]
    assert [layer.scores for layer in macs.attention] == [2 * N * M * width for N, M, _ in layers]
    assert macs.other == (2 * S + T) * 2 * 24 * 40 + T * 24 * 50
    assert macs.linears == macs.other + sum(formula(*layer) for layer in layers)


def test_nothing_is_left_out_where_every_head_runs():
    moa = dict(router="moa", top_k=5, experts=5, head_dim=8, bias=False)
    for attention in (dict(router="dense"), moa):
        macs = macs_of(tiny(attention), 7, 5)
        assert macs.linears + macs.scores == macs.every_head
    model = tiny(dict(moa, top_k=3)).train()
    fewer = macs_of(model, 7, 5)
    assert model.training and not any(module._forward_hooks for module in model.modules())
    pairs = 2 * 7 * 7 + 5 * 5 + 5 * 7  # of queries and keys
    queries = 2 * 7 + 5 + 5
    assert fewer.every_head == macs.every_head
    assert macs.linears + macs.scores - fewer.linears - fewer.scores == 2 * 8 * (2 * queries * 24 + 2 * pairs)


def vit(**kwargs):
    sizes = dict(img_size=4, patch_size=2, in_chans=1, embed_dim=8, depth=2, num_heads=4, num_classes=3)
    return timm.create_model("moh_vit_tiny_patch16_224", **sizes, **kwargs)


def test_image_models():
    n, c, D = 5, 8, 2  # 4 patches and a class token
    image = torch.zeros(1, 1, 4, 4)
    token = count_macs(vit(head_budget=[(1, 1), (2, 2)]), image)
    router = (n * c * (3 + 2), n * c * (2 + 2 + 2))
    linears = [2 * n * c * c + 2 * n * c * 2 * D + router[0], 4 * n * c * c + router[1]]
    assert [layer.linears for layer in token.attention] == linears
    assert token.linears == sum(linears) + 4 * 4 * c + 2 * 2 * n * c * 4 * c + c * 3  # patches, feed-forward, head
    assert token.scores == 2 * n * n * (2 + 4) * D
    sample = count_macs(vit(head_budget=[(1, 1), (2, 2)], scope="sample"), image)
    linears = [4 * n * c * 2 * D + router[0] // n, 4 * n * c * c + router[1] // n]  # keys and values too, one choice
    assert [layer.linears for layer in sample.attention] == linears
    norms = count_macs(vit(head_budget=[(1, 1), (2, 2)], router="query_norm"), image)
    assert norms.attention[0].linears == 3 * n * c * c + n * c * 2 * D  # it looks at all queries


def test_describe_says_what_the_budget_spares():
    image = torch.zeros(1, 1, 4, 4)
    model = vit(head_budget=[(1, 1), (2, 2)])
    macs = count_macs(model, image)
    assert macs.every_head - macs.linears - macs.scores == 2 * 2 * (2 * 5 * 8 + 2 * 5 * 5)  # 2 heads of width 2
    text = describe("tiny", model, image)
    assert macs.every_head - macs.dense == 5 * 8 * (3 + 2 + 2 + 2 + 2)  # routers
    share = 100 * (macs.linears + macs.scores) / macs.dense
    assert f"MACs:         {macs.dense:,} dense (every head, no router); {share:.1f} % of dense ideal" in text
    assert "; 100.0 % of dense ideal" in describe("dense", vit(router="dense"), image)

    ids = torch.zeros(1, 3, dtype=torch.long)
    named = dict(decoder_input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert "input [1, 3] decoder_input_ids [1, 4]" in describe("text", tiny(dict(router="dense")), ids, **named)


def test_an_adaptive_vocabulary():
    """Words read count as frequent ones (C x C); every word is weighed in the output, rare ones in their own width."""
    with torch.device("meta"):
        model = create_text_model(
            "clm_wt103_base", vocab_size=100, adaptive_cutoffs=[20, 60], hidden_size=32, intermediate_size=40,
            num_attention_heads=4, num_hidden_layers=1,
        )  # fmt: skip
    macs = count_macs(model, torch.zeros(1, 6, dtype=torch.long))
    softmax = 32 * (20 + 2) + (32 * 8 + 8 * 40) + (32 * 2 + 2 * 40)
    assert macs.other == 6 * (32 * 32 + 2 * 32 * 40 + softmax)


def test_dit_spares_what_its_budget_leaves_out():
    found = count("moh_dit_small_patch2_75")
    T, d, D = 256, 384, 64
    idle = sum(6 - active for active in [3] * 2 + [4] * 4 + [5] * 4 + [6] * 2)
    spared = idle * (2 * T * d * D + 2 * T * T * D)
    assert found.macs.every_head - found.macs.linears - found.macs.scores == spared


@pytest.mark.slow
def test_transnext():
    """10.3 G for the small one (Shi 2024, table 1); 9.7 G were it to skip heads everywhere."""
    found = count("moh_transnext_small_80")
    macs = found.macs
    assert macs.every_head / 1e9 == pytest.approx(10.3, rel=0.02)
    idle = [(layer, layer.budget.heads - layer.budget.active) for layer in macs.attention]
    # A head's queries, its part of the output, its scores, and its queries times the tokens of the 3 x 3 window.
    window = lambda layer: 0 if layer.queries == layer.keys else 9  # noqa: E731
    spared = sum(24 * n * layer.queries * (2 * layer.dim + 2 * layer.keys + window(layer)) for layer, n in idle)
    assert macs.every_head - macs.ideal == spared > 0
    assert "stages.2.blocks.0-21.attn scores       22 x" in report("moh_transnext_small_80", found)


def test_command(run_command):
    code, out, err = run_command("macs", "mt_moa_8K32E128D")
    assert code == 0 and err == ""
    lines = {line.strip().split("  ")[0]: line.split() for line in out.splitlines() if line}
    row = lines["MACs of linear layers, 32,000 words"]
    # 18 layers; eq. 18: one product k T^2 D and 2 (k + 1) T D d; eq. 20: (2E + 2) D d
    total = 12 * 10 * 2 * 512 * 2048 + 18 * 10 * 512 * (2 * 128 + 2 * 8 * 128 + 32) + 10 * 512 * 32_000
    assert row[-5:] == [f"{total:,}", "631", "M", f"{100 * (total / 631e6 - 1):+.2f}", "%"]
    size = 37_000 * 512 + 25_227_264 + 18 * (66 * 128 * 512 + 512 * 32)
    assert lines["parameters, 37,000 words"][3] == f"{size:,}"
    ends = [line.index(word) + len(word) for line, word in zip(out.splitlines()[2:5], ("paper", "123 M", "631 M"))]
    assert len(set(ends)) == 1  # columns are aligned
    assert "linear layers and twice the scores" in run_command("macs", "mlm_moa_8K8E128D").out

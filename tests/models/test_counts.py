"""Parameters and MACs: against the papers' and against formulas by hand."""

import functools

import pytest
import timm
import torch
import yaml

from moh_vision.commands.table import PAPER_ROWS
from moh_vision.models.counts import count_macs, count_parameters, least_activations
from moh_vision.models.describe import describe, in_short, module_table
from tests.support.text_tiny import empty

# Rows on data whose words our presets use: parameters and MACs in millions.
ROWS = [
    row
    for row in PAPER_ROWS
    if row["data"] in ("WMT14 EN-DE", "WikiText-103") and "parameters" in row
]


def printed(row, key):
    """Return a number as a paper prints it, in millions, or None."""
    return yaml.safe_load(row.get(key, "").replace(",", ""))


# Parameters and MACs in millions.
PAPERS = {
    **{row["model"]: (printed(row, "parameters"), printed(row, "macs")) for row in ROWS},
    "mt_transformer_base": (61, 604),  # Peng 2020, table 2; Zhang has it with more words
    "clm_small": (186, None),  # Jin 2024, table A
    "clm_moh_small_75": (186, None),
    "clm_moh_small_50": (186, None),
    "clm_base": (881, None),
    "clm_moh_base_75": (882, None),
    "clm_moh_base_50": (882, None),
}


@functools.cache
def counted(preset):
    """Count parameters and MACs of a text preset, for Zhang's input: about 37,000 words in parameters, 32,000 in MACs."""
    task = preset.partition("_")[0]
    ids = torch.zeros(1, dict(mt=10, mlm=128, clm=512)[task], dtype=torch.long)
    model = empty(preset)
    parameters = count_parameters(model)
    if task == "mt":
        fewer_words = empty(preset, vocab_size=32_000)
        return parameters, count_macs(fewer_words, ids, decoder_input_ids=ids)
    return parameters, count_macs(model, ids)


def counted_image(name):
    """MACs of an image model."""
    with torch.device("meta"):
        model = timm.create_model(name)
    inputs = [torch.zeros(1, *model.pretrained_cfg["input_size"])]
    if "dit" in name:
        inputs += [torch.zeros(1, dtype=torch.long)] * 2
    return count_macs(model, *inputs)


@pytest.mark.parametrize("preset", PAPERS)
def test_parameters_of_the_papers(preset):
    millions, _ = PAPERS[preset]
    parameters = count_parameters(empty(preset))
    masked = preset.startswith("mlm_")
    assert parameters / 1e6 == pytest.approx(millions, rel=0.0005 if masked else 0.01)
    if preset.startswith("clm_") and "wt103" not in preset:  # Jin 2024, table A
        assert round(parameters / 1e6) == millions


# One preset of each kind: the others differ in sizes, which their parameters show.
COUNTED = ("mt_transformer_base", "mt_mae_7", "mt_moa_8K32E128D", "mlm_base", "mlm_moa_8K8E128D")


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=() if preset in COUNTED else pytest.mark.slow)
        for preset, (_, macs) in PAPERS.items()
        if macs
    ],
)
def test_macs_of_the_papers(preset):
    """MoA's masked models are printed with linear layers and twice the scores, the others with linear layers alone."""
    _, macs = PAPERS[preset]
    _, found = counted(preset)
    masked = preset.startswith("mlm_")
    if masked and preset != "mlm_base":
        near = 0.0065 if preset == "mlm_moa_8K8E128D" else 0.0025
        assert (found.linears + 2 * found.scores) / 1e6 == pytest.approx(macs, rel=near)
        assert -0.12 < found.linears / (macs * 1e6) - 1 < -0.08
    else:
        assert found.linears / 1e6 == pytest.approx(macs, rel=0.005)


def test_gates_of_mae_are_its_difference_to_base():
    """18 times 512 * 256 + 256 * 8 with biases, and the batch norm; the paper says 2.42M."""
    gates = count_parameters(empty("mt_mae_7")) - count_parameters(empty("mt_transformer_base"))
    assert gates == 18 * (512 * 256 + 256 + 256 * 8 + 8 + 2 * 512) and round(gates / 1e6, 2) == 2.42


def test_moa_by_the_formulas_of_the_paper():
    """18 layers; eq. 18: one product k T^2 D and 2 (k + 1) T D d; eq. 20: (2E + 2) D d."""
    parameters, macs = counted("mt_moa_8K32E128D")
    assert parameters == 37_000 * 512 + 25_227_264 + 18 * (66 * 128 * 512 + 512 * 32)
    layers = 12 * 10 * 2 * 512 * 2048 + 18 * 10 * 512 * (2 * 128 + 2 * 8 * 128 + 32)
    assert macs.linears == layers + 10 * 512 * 32_000


def tiny(attention, **fields):
    sizes = dict(vocab_size=50, hidden_size=24, intermediate_size=40, num_attention_heads=4)
    layers = dict(encoder_layers=2, decoder_layers=1)
    return empty("mt_transformer_base", **sizes, **layers, attention=attention, **fields)


def macs_of(model, sources, targets):
    ids = [torch.zeros(1, length, dtype=torch.long) for length in (sources, targets)]
    return count_macs(model, ids[0], decoder_input_ids=ids[1])


# MACs of the linear layers of one attention by the papers' formulas, for N queries and M keys of width d = 24.


def dense_by_hand(N, M, attention):
    return (2 * N + 2 * M) * 24 * 24


def moa_by_hand(N, M, attention):
    """T d (2D + 2KD + E)"""
    return 24 * (2 * M * 8 + 2 * N * 3 * 8 + N * 5)


def moh_by_hand(N, M, attention):
    """2 of 4 heads of width 6; 3 candidates and 2 gates."""
    return 2 * M * 24 * 24 + 2 * N * 24 * 12 + N * 24 * (3 + 2)


def mae_by_hand(N, M, attention):
    """6 experts; in the decoder's self-attention one gate a token."""
    gates = N if attention == "causal" else 1
    return (2 * N + 2 * M) * 24 * 24 + gates * (24 * 256 + 256 * 6)


def gated_by_hand(N, M, attention):
    """A gate of 4 heads for each token."""
    return dense_by_hand(N, M, attention) + N * 24 * 4


MOA = dict(router="moa", top_k=3, experts=5, head_dim=8, bias=False)
# router: (options, formula, width of the heads that run for a token)
FORMULAS = {
    "dense": (dict(router="dense"), dense_by_hand, 24),
    "moa": (MOA, moa_by_hand, 3 * 8),
    "moh": (dict(router="moh", head_budget=[[1, 1]] * 2), moh_by_hand, 2 * 6),
    "mae": (dict(router="mae", leave_out=2), mae_by_hand, 24),
    "gated": (dict(router="gated"), gated_by_hand, 24),
}


@pytest.mark.parametrize("router", FORMULAS)
def test_by_hand_with_texts_of_different_length(router):
    attention, formula, width = FORMULAS[router]
    fields = {}
    if router == "moh":
        one = dict(attention, head_budget=[[1, 1]])
        fields = dict(decoder_attention=one, cross_attention=one)
    model = tiny(attention, **fields)
    S = 7
    T = 5
    macs = macs_of(model, S, T)
    layers = [(S, S, "encoder")] * 2 + [(T, T, "causal"), (T, S, "cross")]
    lengths = [(N, M) for N, M, _ in layers]
    assert [(layer.queries, layer.keys) for layer in macs.attention] == lengths
    assert [layer.router for layer in macs.attention] == [router] * 4
    assert [layer.linears for layer in macs.attention] == [formula(*layer) for layer in layers]
    assert [layer.scores for layer in macs.attention] == [2 * N * M * width for N, M in lengths]
    assert macs.other == (2 * S + T) * 2 * 24 * 40 + T * 24 * 50
    assert macs.linears == macs.other + sum(formula(*layer) for layer in layers)


def test_nothing_is_left_out_where_every_head_runs():
    for attention in (dict(router="dense"), dict(MOA, top_k=5)):
        macs = macs_of(tiny(attention), 7, 5)
        assert macs.linears + macs.scores == macs.every_head
    model = tiny(MOA).train()
    fewer = macs_of(model, 7, 5)
    assert model.training and not any(module._forward_hooks for module in model.modules())
    pairs = 2 * 7 * 7 + 5 * 5 + 5 * 7  # of queries and keys
    queries = 2 * 7 + 5 + 5
    assert fewer.every_head == macs.every_head
    spared = 2 * 8 * (2 * queries * 24 + 2 * pairs)
    assert macs.linears + macs.scores - fewer.linears - fewer.scores == spared


def vit(**kwargs):
    sizes = dict(
        img_size=4, patch_size=2, in_chans=1, embed_dim=8, depth=2, num_heads=4, num_classes=3
    )
    return timm.create_model("moh_vit_tiny_patch16_224", **sizes, **kwargs)


def test_image_models():
    n = 5  # 4 patches and a class token
    c = 8  # width of the model
    D = 2  # width of a head
    image = torch.zeros(1, 1, 4, 4)
    token = count_macs(vit(head_budget=[(1, 1), (2, 2)]), image)
    router = (n * c * (3 + 2), n * c * (2 + 2 + 2))
    linears = [2 * n * c * c + 2 * n * c * 2 * D + router[0], 4 * n * c * c + router[1]]
    assert [layer.linears for layer in token.attention] == linears
    patches = 4 * 4 * c
    feed_forward = 2 * 2 * n * c * 4 * c
    head = c * 3
    assert token.linears == sum(linears) + patches + feed_forward + head
    assert token.scores == 2 * n * n * (2 + 4) * D
    sample = count_macs(vit(head_budget=[(1, 1), (2, 2)], scope="sample"), image)
    # The heads that run are chosen once, and their keys and values are computed alone.
    linears = [4 * n * c * 2 * D + router[0] // n, 4 * n * c * c + router[1] // n]
    assert [layer.linears for layer in sample.attention] == linears
    norms = count_macs(vit(head_budget=[(1, 1), (2, 2)], router="query_norm"), image)
    assert norms.attention[0].linears == 3 * n * c * c + n * c * 2 * D  # it looks at all queries


def test_describe_says_what_the_budget_spares():
    image = torch.zeros(1, 1, 4, 4)
    model = vit(head_budget=[(1, 1), (2, 2)])
    macs = count_macs(model, image)
    spared = 2 * 2 * (2 * 5 * 8 + 2 * 5 * 5)  # 2 heads of width 2
    assert macs.every_head - macs.linears - macs.scores == spared
    text = describe("tiny", model, image)
    assert macs.every_head - macs.dense == 5 * 8 * (3 + 2 + 2 + 2 + 2)  # routers
    share = 100 * (macs.linears + macs.scores) / macs.dense
    dense = f"{macs.dense:,} dense (every head, no router)"
    assert f"MACs:         {dense}; {share:.1f} % of dense ideal" in text
    assert "; 100.0 % of dense ideal" in describe("dense", vit(router="dense"), image)

    ids = torch.zeros(1, 3, dtype=torch.long)
    targets = torch.zeros(1, 4, dtype=torch.long)
    text = describe("text", tiny(dict(router="dense")), ids, decoder_input_ids=targets)
    assert "input [1, 3] decoder_input_ids [1, 4]" in text


GROUPS = dict(scope="sample", mlp_budget=[(1, 1), (2, 1)], mlp_groups=4)


def test_routed_mlps():
    """Active groups of width 8 in both products, and one choice for all tokens."""
    n = 5  # 4 patches and a class token
    c = 8  # width of the model
    D = 8  # width of a group
    image = torch.zeros(1, 1, 4, 4)
    heads = dict(head_budget=[(1, 1), (2, 2)])
    model = vit(**heads, **GROUPS)
    macs = count_macs(model, image)
    dense_mlps = count_macs(vit(**heads, scope="sample"), image)
    active = (2, 3)
    routers = (c * (3 + 2), c * (2 + 2 + 2))  # as of heads: candidates, shared ones, gates
    for block in range(2):
        rows = {row.part: row for row in macs.modules if row.name == f"blocks.{block}.mlp"}
        both_products = 2 * c * D
        assert rows["groups"].dense == n * both_products * 4
        assert rows["groups"].ideal == n * both_products * active[block]
        assert rows["groups"].parameters == both_products * 4 + 4 * D + c
        assert (rows["router"].dense, rows["router"].ideal) == (0, routers[block])
        assert rows["router"].parameters == routers[block]
        assert len(rows) == 2
    assert macs.dense == dense_mlps.dense
    spared = n * 2 * c * D * (8 - sum(active))
    assert macs.ideal == dense_mlps.ideal - spared + sum(routers)
    assert macs.every_head == dense_mlps.every_head + sum(routers)
    assert macs.scores == dense_mlps.scores
    assert macs.parameters == count_parameters(model)
    assert macs.parameters == dense_mlps.parameters + sum(routers)


def test_all_groups_are_the_macs_of_the_dense_mlp_and_a_router():
    image = torch.zeros(1, 1, 4, 4)
    full = count_macs(vit(scope="sample", mlp_budget=1.0), image)
    dense_mlps = count_macs(vit(scope="sample"), image)
    assert full.dense == dense_mlps.dense
    routers = [row.ideal for row in full.modules if row.name.endswith("mlp") and not row.dense]
    assert len(routers) == 2 and min(routers) > 0
    assert full.ideal == dense_mlps.ideal + sum(routers)


def test_kept_activations_of_routed_mlps():
    """The input, and the hidden channels of the active groups before and after the activation."""
    image = torch.zeros(1, 1, 4, 4)
    n = 5
    hidden = 32
    D = 8
    heads = dict(head_budget=[(1, 1), (2, 2)])
    spared = sum(2 * n * (hidden - active * D) for active in (2, 3))
    dense_mlps = least_activations(vit(**heads, scope="sample"), image)
    assert least_activations(vit(**heads, **GROUPS), image) == dense_mlps - spared


def test_groups_are_shown_beside_heads():
    image = torch.zeros(1, 1, 4, 4)
    model = vit(head_budget=[(1, 1), (2, 2)], **GROUPS)
    text = describe("tiny", model, image)
    assert "\nactive heads: 6 of 8 (75.0 %)\n" in text
    table = "layer  groups  width  shared  routed  active  name\n"
    _, _, below = text.partition(table)
    assert below.splitlines()[1].split() == ["1", "4", "8", "2", "1", "3", "blocks.1.mlp"]
    assert "\nactive groups: 5 of 8 (62.5 %)\n" in below
    assert "one routed head in layers [0] and one routed group in MLPs [0, 1]: only the" in below
    assert "dense (every head and group, no router)" in below
    assert "ideal:        the active heads and groups alone" in below
    line = in_short("tiny", model)
    assert "6 of 8 heads active (75.0 %), 5 of 8 groups of MLPs (62.5 %); one routed head" in line
    dense_mlps = vit(head_budget=[(1, 1), (2, 2)])
    for shown in (describe("tiny", dense_mlps, image), in_short("tiny", dense_mlps)):
        assert "group" not in shown


def test_an_adaptive_vocabulary():
    """Words read count as frequent ones (C x C); every word is weighed in the output, rare ones in their own width."""
    sizes = dict(
        vocab_size=100,
        adaptive_cutoffs=[20, 60],
        hidden_size=32,
        intermediate_size=40,
        num_attention_heads=4,
        num_hidden_layers=1,
    )
    model = empty("clm_wt103_base", **sizes)
    macs = count_macs(model, torch.zeros(1, 6, dtype=torch.long))
    softmax = 32 * (20 + 2) + (32 * 8 + 8 * 40) + (32 * 2 + 2 * 40)
    assert macs.other == 6 * (32 * 32 + 2 * 32 * 40 + softmax)


def test_dit_spares_what_its_budget_leaves_out():
    macs = counted_image("moh_dit_small_patch2_75")
    T = 256  # tokens
    d = 384  # width of the model
    D = 64  # width of a head
    idle = sum(6 - active for active in [3] * 2 + [4] * 4 + [5] * 4 + [6] * 2)
    spared = idle * (2 * T * d * D + 2 * T * T * D)
    assert macs.every_head - macs.linears - macs.scores == spared


@pytest.mark.slow
def test_transnext():
    """10.3 G for the small one (Shi 2024, table 1); 9.7 G were it to skip heads everywhere."""
    macs = counted_image("moh_transnext_small_80")
    assert macs.every_head / 1e9 == pytest.approx(10.3, rel=0.02)
    spared = 0
    for layer in macs.attention:
        idle = layer.budget.heads - layer.budget.active
        window = 0 if layer.queries == layer.keys else 9  # tokens of the 3 x 3 window
        # A head's queries, its part of the output, its scores, and its queries times the window.
        spared += 24 * idle * layer.queries * (2 * layer.dim + 2 * layer.keys + window)
    assert macs.every_head - macs.ideal == spared > 0
    assert "stages.2.blocks.0-21.attn scores       22 x" in "\n".join(module_table(macs))

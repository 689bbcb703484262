"""Head loads, counts of the tokens for which each head ran: counting, files, figures and the command head-load."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import moh_vision
from moh_vision.attention import HeadBudget, HeadMixtureAttention, head_usage
from moh_vision.commands.figures import write_figure
from moh_vision.commands.head_load import draw, most_different, short_names
from moh_vision.models.head_load import HeadLoad
from tests.support.refusals import assert_says, refuse

SIZES = dict(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=6, num_classes=3)


def layer(name, heads, shared, routed, parts="heads"):
    return dict(name=name, heads=heads, shared=shared, routed=routed, parts=parts)


def counts_of(groups=4, layers=((8, 2, 3), (8, 2, 3)), seed=0, by="class", mlps=False):
    """Return random counts of a made-up model: every group has 100 tokens, and a token runs shared + routed heads.

    layers: (heads, shared, routed) of each layer. by: what the groups are, such as "class". mlps: every other layer is a
    routed MLP.
    """
    named = [layer(f"blocks.{i}.attn", *sizes) for i, sizes in enumerate(layers)]
    if mlps:
        named = [
            layer(f"blocks.{i // 2}.{('attn', 'mlp')[i % 2]}", *sizes, ("heads", "groups")[i % 2])
            for i, sizes in enumerate(layers)
        ]
    load = HeadLoad(named, {by: map(str, range(groups))})
    rng = torch.Generator().manual_seed(seed)
    columns = []
    for heads, shared, routed in layers:
        chosen = torch.rand(groups, 100, heads - shared, generator=rng).argsort(-1) < routed
        columns += [
            torch.full((groups, shared), 100.0),
            chosen.sum(1),
            torch.full((groups, 1), 100.0),
        ]
    load.sums = torch.cat(columns, 1).double()
    load.of = dict(model="made up", data="nothing", split="val")
    return load


def test_counts_are_those_of_a_loop():
    model = timm.create_model("moh_vit_tiny_patch16_224", **SIZES).eval()
    load = HeadLoad(moh_vision.head_budget(model)["layers"], {"class": "abc"})
    x = torch.randn(5, 3, 16, 16)
    labels = torch.tensor([0, 2, 2, 0, 2])
    for part in (slice(0, 2), slice(2, 5)):
        load.add(model.forward_routed(x[part])[1], labels[part])
    for number, stats in enumerate(model.forward_routed(x)[1]):
        for group in range(3):
            for head in range(6):
                want = sum(int(stats.counts[i, head]) for i in range(5) if labels[i] == group)
                assert load.runs()[number][group, head] == want
    block = model.blocks[0]
    tokens = model._pos_embed(model.patch_embed(x))
    weights = block.attn.router(block.norm1(tokens)).weights
    torch.testing.assert_close(load.share()[0][2], (weights[labels == 2] > 0).double().mean((0, 1)))
    assert load.share()[0][1].sum() == 0  # no image of class 1
    active = [about["active"] for about in moh_vision.head_budget(model)["layers"]]
    assert load.active() == active and [s[0].sum().item() for s in load.share()] == active


@pytest.mark.parametrize(
    "router, budget", [("moh", (2, 1)), ("moa", (0, 2)), ("query_norm", (1, 2)), ("dense", (4, 0))]
)
def test_padding_is_no_token(router, budget):
    attention = HeadMixtureAttention(16, HeadBudget(4, 4, *budget), router=router).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    stats = attention(torch.randn(2, 5, 16), padding_mask=padding)[1]
    load = HeadLoad([layer("a", 4, *budget)], {"text": ["one", "two"], "all": ["both"]})
    load.add([stats], torch.tensor([0, 1]), 0)
    assert load.runs()[0][:, -1].tolist() == [5, 3] and load.runs("all")[0][:, -1].tolist() == [8]
    torch.testing.assert_close(load.share("all")[0][0].float(), head_usage([stats])[0])
    torch.testing.assert_close(load.share()[0].sum(1), torch.full((2,), sum(budget)).double())


def test_counts_may_be_added_for_one_layer_at_a_time():
    whole, parts = (HeadLoad(counts_of().layers, {"task": ["a"]}) for _ in range(2))
    attentions = [HeadMixtureAttention(32, HeadBudget(8, 4, 2, 3)).eval() for _ in range(2)]
    stats = [attention(torch.randn(3, 5, 32))[1] for attention in attentions]
    whole.add(stats, 0)
    for number, stats_of_one in enumerate(stats):
        parts.add([stats_of_one], 0, first=number)
    assert whole.sums.sum() > 0 and torch.equal(whole.sums, parts.sums)


def test_a_file_comes_back(tmp_path):
    load = HeadLoad(counts_of().layers, {"class": ["a", "<b>"], "timestep": [9, 0]})
    load.sums = counts_of().sums
    load.of = dict(model="m", step=3)
    load.save(tmp_path / "load.json")
    back = HeadLoad.read(tmp_path / "load.json")
    assert (back.layers, back.groups, back.of) == (load.layers, load.groups, load.of)
    assert torch.equal(back.sums, load.sums)
    by = json.loads((tmp_path / "load.json").read_text())["by"]  # the file leaves shared heads out
    assert len(by["class"]["counts"][0]) == 12 and by["timestep"]["tokens"] == [[100, 100]] * 2


@pytest.mark.parametrize("form", ["map", "bars", "curves"])
def test_every_form_is_drawn(tmp_path, form, run_command):
    counts_of().save(tmp_path / "head_load.json")
    for end in ("png", "svg"):
        file = tmp_path / f"figure_{end}.{end}"
        code, out, _ = run_command("head-load", tmp_path, "--output", file, "--kind", form)
        assert code == 0 and out == f"{file}, {file.with_suffix('.json')}: {form} by class\n"
    pixels = np.asarray(Image.open(tmp_path / "figure_png.png").convert("RGB"))
    assert pixels.shape[0] > 200 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 12
    assert "made up" in file.read_text() and "</svg>" in file.read_text()
    numbers = json.loads((tmp_path / "figure_png.json").read_text())
    assert numbers["of"]["run"] == tmp_path.name and numbers["of"]["model"] == "made up"
    assert numbers["by"] == "class"


def test_bars_are_of_the_layer_and_groups_asked_for():
    load = counts_of()
    figure, numbers, *_ = draw(load, "bars", names=["3", "1"], layer=0)
    assert figure.axes[0].get_title(loc="left") == "class 3"
    assert list(numbers["percent_of_tokens"]) == ["3", "1"]
    assert numbers["layer"]["name"] == "blocks.0.attn"
    assert numbers["percent_of_tokens"]["3"] == load.runs()[0][3, :-1].tolist()
    assert draw(load, "bars").numbers["layer"]["name"] == "blocks.1.attn"
    full = counts_of(layers=((8, 2, 3), (8, 2, 6), (8, 8, 0)))  # the last two layers run all heads
    assert draw(full, "bars").numbers["layer"]["name"] == "blocks.0.attn" and full.choosing() == [0]


def test_a_map_has_colours_for_heads_that_are_chosen():
    """Shared heads, and layers that run all heads, are grey. The title names the run and its share of active heads."""
    load = counts_of(layers=((8, 2, 3), (8, 2, 6), (8, 8, 0)))
    load.of["run"] = "$run$ {1}"
    figure = draw(load, "map").figure
    assert figure.axes[0].get_title() == r"\$run\$ {1}, 87.5 % of the heads, made up, nothing, val"
    load.of["data"] = "x" * 30 + ", dpm-solver++"  # the title must not break at the hyphen
    assert "dpm-solver++" in draw(load, "map").figure.axes[0].get_title()
    (image,) = figure.axes[0].images
    figure.canvas.draw()
    shown = image.to_rgba(image.get_array(), bytes=True)  # [groups, 8 + 1 + 8 + 1 + 8, 4]
    coloured = (np.ptp(shown[..., :3].astype(int), axis=-1) > 0).all(0)
    assert coloured.nonzero()[0].tolist() == [2, 3, 4, 5, 6, 7] and (shown[:, 10, :3] == 191).all()


def test_groups_that_differ_most():
    share = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5], [0.1, 0.9], [1.0, 0.0]])
    # The last group differs most, but has no tokens.
    assert most_different(share, torch.tensor([9, 9, 9, 9, 0]), 2) == [1, 3]
    assert most_different(share, torch.tensor([9, 9, 9, 9, 0]), 3) == [0, 1, 3]
    assert most_different(share, torch.tensor([9, 0, 0, 0, 0]), 3) == [0]


def test_curves_descend_and_sum_to_all_choices():
    load = counts_of(layers=((8, 2, 3), (4, 4, 0), (6, 0, 2)))
    layers = draw(load, "curves").numbers["layers"]
    assert list(layers) == ["blocks.0.attn", "blocks.2.attn"]
    for number, found in zip((0, 2), layers.values()):
        assert found["percent"] == sorted(found["percent"], reverse=True)
        assert sum(found["percent"]) == pytest.approx(100, abs=0.01)
        counts = load.runs()[number].sum(0)
        assert counts[found["heads"][0]] == counts[load.layers[number]["shared"] : -1].max()
    refuse("no layer chose loads", lambda: draw(load, "curves", layer=1))


def test_the_largest_map_has_a_bounded_size_and_a_row_for_every_class(tmp_path):
    """MoH-TransNeXt-B on ImageNet has 1,000 classes and 588 heads."""
    layers = [(heads, 1, heads // 2) for heads in [4] * 5 + [8] * 5 + [16] * 23 + [32] * 5]
    load = HeadLoad(
        [layer(f"blocks.{i}.attn", *sizes) for i, sizes in enumerate(layers)],
        {"class": [f"class {i} with a long name" for i in range(1000)]},
    )
    for runs in load.runs():
        runs[:, -1] = 10
    # Every other class runs all routed heads of this layer. Otherwise no routed head runs.
    load.runs()[20][::2, 1:-1] = 10
    path = tmp_path / "usage.png"
    write_figure(draw(load, "map").figure, path, {})
    assert path.stat().st_size < 3e6
    with Image.open(path) as figure:
        assert 2000 < figure.width <= 2600 and 2000 < figure.height <= 2080
        pixels = np.asarray(figure.convert("RGB"))[:, : figure.width * 7 // 8]  # without the scale
        lit = (pixels == (253, 231, 36)).all(-1)  # the colour of 100 %
    assert 850 < 2 * lit.any(1).sum() < 1150 * 2 and lit.any(0).sum() > 15 * 3
    rows = np.flatnonzero(lit.any(1))
    assert rows[-1] - rows[0] + 1 == len(rows)  # similar classes are neighbours


def test_timesteps_stay_in_order():
    """Classes are sorted by similarity."""
    numbers = draw(counts_of(300, by="timestep"), "map", by="timestep").numbers
    assert numbers["groups"] == [str(i) for i in range(300)]
    assert draw(counts_of(300), "map").numbers["groups"] != [str(i) for i in range(300)]


MLPS = dict(layers=((8, 2, 6), (8, 2, 4), (8, 2, 2), (8, 2, 2)), mlps=True)


def test_a_map_tells_groups_of_mlps_from_heads():
    axes, *_ = draw(counts_of(**MLPS), "map").figure.axes
    assert axes.get_title() == (
        "75 % of the heads and 62.5 % of the MLPs' groups, made up, nothing, val"
    )
    assert axes.get_xlabel() == "heads or MLPs' groups (grey: run for every token; s: shared)"
    (above,) = axes.child_axes
    names = [text.get_text() for text in above.get_xticklabels()]
    assert names == ["0 attn", "0 mlp", "1 attn", "1 mlp"]


# Layer -> words below its bars.
OF_LAYERS = {2: "heads (grey", 3: "MLPs' groups (grey"}


@pytest.mark.parametrize("number", OF_LAYERS)
def test_bars_say_whether_they_are_heads_or_groups(number):
    figure, numbers, *_ = draw(counts_of(**MLPS), "bars", layer=number)
    assert figure.axes[-1].get_xlabel().startswith(OF_LAYERS[number])
    assert numbers["layer"]["name"] in figure.get_suptitle()


def test_layers_that_choose_have_the_same_names_as_beside_those_that_do_not():
    """Here only MLPs leave groups out: they would be numbers if they were named alone."""
    load = counts_of(layers=((8, 2, 6), (8, 2, 4), (8, 2, 6), (8, 2, 2)), mlps=True)
    (axes,) = draw(load, "curves").figure.axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend[:2] == ["layer 0 mlp", "layer 1 mlp"]
    assert axes.get_xlabel() == "routed MLPs' groups of a layer, from the most loaded one"
    assert axes.get_title().startswith("100 % of the heads and 62.5 % of the MLPs' groups, ")


def test_names_of_layers():
    names = [f"encoder.layers.{i}.self_attn" for i in range(2)]
    assert short_names(names, [4, 5]) == ["4", "5"]
    names += ["decoder.layers.0.self_attn", "decoder.layers.0.cross_attn"]
    assert short_names(names, range(4))[1:] == [
        "encoder 1 self_attn",
        "decoder 0 self_attn",
        "decoder 0 cross_attn",
    ]


def test_the_numbers_do_not_overwrite_a_file_of_their_name(tmp_path, run_command, refused):
    """The numbers of load.png would go to load.json, which is the input here."""
    counts_of().save(tmp_path / "load.json")
    before = (tmp_path / "load.json").read_bytes()
    out = run_command("head-load", tmp_path / "load.json", "--output", tmp_path / "load.png").out
    assert out == f"{tmp_path}/load.png, {tmp_path}/load.png.json: map by class\n"
    assert json.loads((tmp_path / "load.png.json").read_text())["by"] == "class"
    assert (tmp_path / "load.json").read_bytes() == before
    (tmp_path / "load.png").unlink()
    error = refused("head-load", tmp_path / "load.json", "--output", tmp_path / "load.png")
    assert_says(error, f"--output {tmp_path}/load.png.json exists")
    counts_of(layers=((8, 8, 0), (8, 2, 6))).save(tmp_path / "dense.json")
    error = refused("head-load", tmp_path / "dense.json", "--output", tmp_path / "new.png")
    assert_says(error, f"{tmp_path}/dense.json every head")


# Case -> (keys that lead to a value of the file, what replaces it, what the error says).
DAMAGES = {
    "too few groups": ("by class counts", [[0] * 12] * 3, "[4, 12] 36"),
    "too few heads": ("by class counts 0", [0] * 11, "11 12"),
    "more runs than tokens": ("by class counts 0 0", 101, "blocks.0.attn 0"),
    "text for a count": ("by class counts 0 0", "many", "'str'"),
    "nan for tokens": ("by class tokens 0", [float("nan")] * 2, "blocks.0.attn 0"),
    "no tokens": ("by class", {"groups": ["a"], "counts": [[0] * 12]}, "'tokens'"),
    "no groups": ("by", {}, "nothing"),
    "text for heads": ("layers 0 heads", "8", "str"),
    "null for routed": ("layers 0 routed", None, "'NoneType'"),
    "unknown parts": ("layers 0 parts", "experts", "'experts' heads groups"),
    "a number for of": ("of", 3, "'int'"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_files(tmp_path, case):
    keys, value, facts = DAMAGES[case]
    counts_of().save(tmp_path / "load.json")
    tree = inner = json.loads((tmp_path / "load.json").read_text())
    *above, last = [int(key) if key.isdecimal() else key for key in keys.split()]
    for key in above:
        inner = inner[key]
    inner[last] = value
    (tmp_path / "load.json").write_text(json.dumps(tree))
    refuse(f"{tmp_path}/load.json {facts}", HeadLoad.read, tmp_path / "load.json")

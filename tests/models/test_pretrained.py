"""model.pretrained and model.convert of image runs: described, loaded, calibrated, trained, resumed without the source."""

import json
import logging
import socket

import pytest
import timm
import torch
from PIL import Image

import moh_vision
from moh_vision.__main__ import main as command
from moh_vision.attention import attention_layers
from moh_vision.classification import train as train_cls
from moh_vision.classification import validate
from moh_vision.common.io import write_tensors
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.diffusion import train as train_dit
from moh_vision.diffusion.config import DitConfig
from moh_vision.engine.command_line import parse_config
from moh_vision.models.creation import create
from moh_vision.models.pretrained import is_dense, name_and_arguments
from moh_vision.models.weight_files import read_safetensors
from tests.support.official_dit import diffusers_dit
from tests.support.pictures import write_folder
from tests.support.refusals import assert_says, refused
from tests.support.small_runs import logged
from tests.support.weights import init_from

VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5)
RUN = "--data.root digits --data.workers 0 --optim.batch_size 8 --save-every 2 --log-every 1 --optim.schedule constant --model.name pretrained"


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", **VIT)
    timm.models.save_for_hf(model, folder, safe_serialization=False)
    assert (folder / "pytorch_model.bin").is_file() and not list(folder.glob("*.safetensors"))
    return folder, model.eval()


@pytest.fixture(scope="module")
def dit(tmp_path_factory):
    model = diffusers_dit(
        in_channels=1, out_channels=2, num_layers=2, num_embeds_ada_norm=10, norm_num_groups=1
    )
    folder = tmp_path_factory.mktemp("dit")
    model.save_pretrained(folder / "transformer")
    return folder, model


def run(main, output, *argv, steps=2):
    main([*RUN.split(), "--output", str(output), "--max-steps", str(steps), *map(str, argv)])
    return [entry["loss"] for entry in logged(output)]


def test_a_folder_of_timm_becomes_moh(vit, tmp_path, capsys):
    source, dense = vit
    options = (
        "--model.convert.router moh --model.head_budget uniform:0.5 --calibrate-images 16".split()
    )
    run(train_cls.main, tmp_path / "run", "--model.pretrained", source, *options)
    said = capsys.readouterr().out
    assert (
        "model.pretrained: patch_embed.proj.weight is resized, [32, 3, 8, 8] -> [32, 1, 8, 8]"
        in said
    )
    assert "model.pretrained: pos_embed is resized, [1, 17, 32] -> [1, 2, 32]" in said
    assert "model.pretrained: head.weight is made anew, [5, 32] -> [10, 32]" in said
    assert (
        "4 of 8 heads active (50.0 %); one routed head in layers [0, 1]: only the balance loss trains"
        in said
    )
    model = moh_vision.load_run(tmp_path / "run")
    assert moh_vision.head_budget(model)["share"] == 0.5 and model(
        torch.zeros(1, 1, 8, 8)
    ).shape == (1, 10)
    # Two small steps from the weights: fc1 is not reordered.
    assert (model.blocks[0].mlp.fc1.weight - dense.blocks[0].mlp.fc1.weight).abs().max() < 0.01

    # timm's tag of a folder of one's own is that of its default weights, which these are not.
    assert read_safetensors(tmp_path / "run" / "model.safetensors")[1]["arguments"]["base"].count(
        "."
    )
    assert command(["publish", str(tmp_path / "run"), "--output", str(tmp_path / "card")]) == 0
    saved = json.loads((tmp_path / "card" / "config.json").read_text())["model_args"]
    assert saved["base"] == "vit_small_patch16_224"

    at_once = run(
        train_cls.main, tmp_path / "whole", "--model.pretrained", source, *options, steps=3
    )
    source.rename(tmp_path / "moved")  # a resumed run does not need its source
    try:
        resumed = run(
            train_cls.main, tmp_path / "run", "--model.pretrained", source, *options, steps=3
        )
    finally:
        (tmp_path / "moved").rename(source)
    assert len(resumed) == 3 and resumed == at_once


@pytest.mark.parametrize("names", [["cat", "dog"], ["dog", "cat"], ["cow", "hen"], None])
def test_a_head_is_kept_only_for_the_same_classes(names, vit, tmp_path, capsys):
    """By name, of what timm has saved and of a run; weights that name none keep theirs, and it is said."""
    torch.manual_seed(0)
    data = write_folder(tmp_path / "d", size=(32, 32), train=4, val=2)
    sizes = {**VIT, "num_classes": 2}
    dense = timm.create_model("vit_small_patch16_224", **sizes)
    torch.nn.init.normal_(dense.head.weight)
    timm.models.save_for_hf(
        dense, tmp_path / "t", model_config=dict(label_names=names), safe_serialization=True
    )
    given = ["--data.root", data, "--data.img_size", 32, "--optim.lr", 1e-9]
    run(
        train_cls.main,
        tmp_path / "run",
        *given,
        "--model.pretrained",
        f"local-dir:{tmp_path}/t",
        steps=1,
    )
    said = capsys.readouterr().out
    ours = moh_vision.load_run(tmp_path / "run").head.weight
    turned = names == ["dog", "cat"]
    theirs = dense.head.weight.flip(0) if turned else dense.head.weight
    kept = torch.allclose(ours, theirs, atol=1e-6)
    assert kept == (names != ["cow", "hen"])
    assert ("the head is put into the order of the data" in said) == turned
    odd = "the head is made anew: class 'cat' is not in the same place in local-dir:"
    assert (f"model.pretrained: {odd}" in said) != kept
    assert ("t does not name its 2 classes" in said) == (names is None)
    if names == ["dog", "cat"]:  # a run of classes in this order, as of others' shards
        state, record = read_safetensors(tmp_path / "run" / "model.safetensors")
        write_tensors(tmp_path / "w.safetensors", state, dict(record, classes=names))
        other = create("moh_vit", "classification", **record["arguments"])
        init_from(other, str(tmp_path / "w.safetensors"), print, classes=["cat", "dog"])
        assert torch.equal(other.head.weight, state["head.weight"].flip(0))
        assert torch.equal(other.head.bias, state["head.bias"].flip(0))
        assert "init_from: the head is put into the order" in capsys.readouterr().out


def test_a_label_table_is_kept_only_for_the_same_classes(tmp_path):
    sizes = dict(embed_dim=16, depth=1, num_heads=2, img_size=8, in_chans=1, num_classes=2)
    first, second = (create("dit_small_patch2", "diffusion", **sizes) for _ in range(2))
    names = {0: "cat", 1: "dog"}
    MoHDiTPipeline(first, make_scheduler("ddim", 5, False, True), None, names, 0.1).save_pretrained(
        tmp_path
    )
    rows = first.y_embedder.embedding_table.weight
    fresh = second.y_embedder.embedding_table.weight.clone()
    said = []
    init_from(second, str(tmp_path), said.append, classes=["cat", "cow"])
    assert torch.equal(second.y_embedder.embedding_table.weight, fresh)
    assert any("the label table is made anew: class 'cow'" in line for line in said)
    # "No class" stays the last row.
    for classes, order in ((["dog", "cat"], [1, 0, 2]), (["cat", "dog"], [0, 1, 2])):
        init_from(second, str(tmp_path), said.append, classes=classes)
        assert torch.equal(second.y_embedder.embedding_table.weight, rows[order])


def test_patches_cover_the_whole_image(vit, tmp_path, capsys):
    """timm leaves the last pixels out, or fails in the first batch where sizes are dynamic."""
    facts = "data.img_size 50 multiple 8 patch"
    argv = [
        *RUN.split(),
        "--model.pretrained",
        vit[0],
        "--data.img_size",
        "50",
        "--output",
        tmp_path / "no",
    ]
    for more in ([], ["--model.kwargs.dynamic_img_size=true"]):
        assert_says(refused(capsys, train_cls.main, *argv, *more), facts)
        assert not (tmp_path / "no").exists()
    saved = ["--checkpoint", vit[0], "--data.root", "digits", "--data.img_size"]
    assert_says(refused(capsys, validate.main, *saved, "50"), facts)
    small = dict(embed_dim=32, depth=1, num_heads=2)  # of SigLIP, which was trained so
    model = timm.create_model("vit_so400m_patch14_siglip_384", num_classes=5, **small)
    timm.models.save_for_hf(model, tmp_path / "siglip", model_args=small, safe_serialization=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    argv = ["predict", str(tmp_path / "siglip"), str(tmp_path / "a.png"), "--data.img_size"]
    assert (command([*argv, "384"]), command([*argv, "385"])) == (0, 2)


@pytest.mark.parametrize(
    "name", ["eva02_tiny_patch14_224", "deit_tiny_distilled_patch16_224", "diffusers"]
)
def test_models_of_others_become_moh(name, dit, tmp_path, capsys):
    torch.manual_seed(0)
    main = train_dit.main
    source, dense = dit
    x = [torch.randn(2, 1, 8, 8)]
    if name == "diffusers":
        x += [torch.tensor([7, 800]), torch.tensor([1, 2])]
    else:
        main = train_cls.main
        source = tmp_path / "vit"
        sizes = dict(VIT, img_size=8, patch_size=2, num_classes=10)
        dense = timm.create_model(name, **sizes, in_chans=1).eval()
        for p in dense.parameters():  # Eva's head starts near 0
            p.data += 0.1 * torch.randn_like(p)
        timm.models.save_for_hf(dense, source, safe_serialization=True)
    still = (
        "--optim.lr 1e-12 --optim.weight-decay 0 --balance_weight 0 --calibrate-images 16".split()
    )
    convert = "--model.convert", "{router: moh, head_budget: 1.0}"
    run(main, tmp_path / "run", "--model.pretrained", source, *still, *convert, steps=1)
    model = moh_vision.load_run(tmp_path / "run")
    with torch.no_grad():  # the heads in another order
        got, want = (getattr(output, "sample", output) for output in (model(*x), dense(*x)))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    if name == "diffusers":
        assert model.config.compat == "diffusers" and model.config.router == "moh"
        moved = (
            model.blocks[0].attn.proj.weight - dense.transformer_blocks[0].attn1.to_out[0].weight
        )
        assert moved.abs().max() > 1e-3
    else:
        assert isinstance(model, type(dense)) and hasattr(model, "forward_routed")
        validate.main(["--checkpoint", str(tmp_path / "run"), "--model.head_budget", "0.7"])
        assert "% of all)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "main, name, x",
    [
        (train_cls.main, "moh_vit_tiny_patch16_224", [torch.ones(2, 1, 8, 8)]),
        pytest.param(
            train_dit.main,
            "dit_small_patch2",
            [torch.ones(2, 1, 8, 8), torch.tensor([7, 800]), torch.tensor([1, 2])],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dense_run_of_ours_becomes_moh(main, name, x, tmp_path, capsys):
    """Its folder, its file, and the folder published of it; a routed one goes on as it is, and is not converted."""
    argv = f"--data.root digits --data.workers 0 --optim.batch_size 8 --max-steps 1 --output {tmp_path}/dense --model.name {name}"
    argv += " --model.embed_dim 32 --model.num_heads 4 --model.depth 1 --model.patch_size 4 --model.router dense"
    main(argv.split())
    assert command(["publish", f"{tmp_path}/dense", "--output", f"{tmp_path}/card"]) == 0
    dense = moh_vision.load_run(tmp_path / "dense")
    options = "--model.convert.head_budget 1.0 --model.convert.scope sample --calibrate-images 16 --optim.lr 1e-12 --optim.weight-decay 0"
    for i, source in enumerate(("dense", "dense/model.safetensors", "card")):
        run(
            main,
            tmp_path / str(i),
            "--model.pretrained",
            tmp_path / source,
            *options.split(),
            steps=1,
        )
        model = moh_vision.load_run(tmp_path / str(i))
        assert attention_layers(model)[0].scope == "sample" and not is_dense(model)
        torch.testing.assert_close(
            model.forward_routed(*x)[0], dense.forward_routed(*x)[0], atol=1e-5, rtol=1e-5
        )
    run(main, tmp_path / "as it is", "--model.pretrained", f"local-dir:{tmp_path}/dense", steps=1)
    assert is_dense(moh_vision.load_run(tmp_path / "as it is"))
    run(
        main,
        tmp_path / "on",
        "--model.pretrained",
        tmp_path / "0",
        "--model.head_budget",
        0.75,
        steps=1,
    )
    assert moh_vision.head_budget(moh_vision.load_run(tmp_path / "on"))["share"] == 0.75
    argv = (
        f"{RUN} --output {tmp_path}/no --model.pretrained {tmp_path}/0 --model.convert.scope token"
    )
    facts = f"model.convert model.pretrained {tmp_path}/0 routed already"
    assert_says(refused(capsys, main, *argv.split()), facts)


def test_a_dense_source_gets_groups_and_one_with_groups_goes_on(vit, tmp_path, capsys):
    """As `convert` makes them: the dense model while all groups run, and the share in every layer."""
    source, dense = vit
    sized = "--data.img_size 32 --optim.lr 1e-12 --optim.weight-decay 0".split()
    convert = "--model.convert", "{router: dense, scope: sample, mlp_budget: 0.5, mlp_groups: 4}"
    run(train_cls.main, tmp_path / "0", "--model.pretrained", source, *sized, *convert, steps=1)
    model = moh_vision.load_run(tmp_path / "0")
    groups = moh_vision.head_budget(model)["mlp"]
    assert [(row["heads"], row["active"]) for row in groups["layers"]] == [(4, 2)] * 2
    moh_vision.set_head_budget(model, mlp=1.0)
    x = torch.randn(2, 1, 32, 32)  # the first kernel is summed over the colours of the source
    with torch.no_grad():
        got = model.forward_features(x)
        want = dense.forward_features(x.expand(-1, 3, -1, -1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    # The source's shape stays where a number sets another share, and needs no model.convert.
    share = "--model.mlp_budget", "0.75"
    run(
        train_cls.main,
        tmp_path / "1",
        "--model.pretrained",
        tmp_path / "0",
        *sized,
        *share,
        steps=1,
    )
    again = moh_vision.head_budget(moh_vision.load_run(tmp_path / "1"))["mlp"]
    assert [row["active"] for row in again["layers"]] == [3, 3]
    argv = (
        f"{RUN} --output {tmp_path}/no --model.pretrained {tmp_path}/0 --model.convert.scope sample"
    )
    facts = f"model.convert model.pretrained {tmp_path}/0 routed already"
    assert_says(refused(capsys, train_cls.main, *argv.split()), facts)


ASKED = {
    "model.mlp_budget": "--model.mlp_budget 0.5 --model.convert.scope sample",
    "model.convert": "--model.convert.mlp_budget 0.5 --model.convert.scope sample",
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_share_of_groups_is_the_same_in_every_converted_layer(asked):
    """As `convert` spreads it; a new DiT has a ramp."""
    options = f"{RUN} --model.pretrained dit_small_patch2 {ASKED[asked]} --output none"
    config = parse_config(DitConfig, options.split(), "test")
    name, arguments = name_and_arguments(config, "diffusion")
    with torch.device("meta"):
        converted = create(name, "diffusion", **arguments)
        new = create(name, "diffusion", mlp_budget=0.5, scope="sample")
    active = {layer["active"] for layer in moh_vision.head_budget(converted)["mlp"]["layers"]}
    assert active == {4}
    assert len({layer["active"] for layer in moh_vision.head_budget(new)["mlp"]["layers"]}) > 1


@pytest.mark.parametrize(
    "main, argv, facts",
    [
        (train_cls, "--model.pretrained swin_tiny_patch4_window7_224", "model.pretrained swin_tiny_patch4_window7_224 VisionTransformer SwinTransformer windows"),
        (train_cls, "--model.pretrained nix", "model.pretrained nix timm hf-hub:OWNER/NAME folder config.json"),
        (train_cls, "--model.pretrained {here}/rum", "model.pretrained {here}/rum file folder {here}/run?"),
        (train_cls, "--model.pretrained local-dir:{here}/rum", "model.pretrained {here}/rum file folder {here}/run?"),
        (train_cls, "--model.pretrained ./nix", "model.pretrained ./nix file folder"),
        (train_cls, "--model.pretrained nix.safetensors", "model.pretrained nix.safetensors file folder"),
        (train_cls, "--model.pretrained {vit} --distill.teacher {here}/rum", "distill.teacher {here}/rum file folder {here}/run?"),
        (train_cls, "--model.pretrained {here}", "model.pretrained {here} config.json"),
        (train_cls, "--model.pretrained vit_tiny_patch16_224.augrg_in21k", "model.pretrained vit_tiny_patch16_224.augrg_in21k vit_tiny_patch16_224.augreg_in21k"),
        (train_cls, "--model.pretrained {vit}/config.json", "model.pretrained {vit}/config.json --init-from --model.name timm.models.save_for_hf"),
        (train_cls, "--model.pretrained {vit} --model.convert.rooter moh", "model.convert 'rooter' router"),
        (train_cls, "--model.pretrained {vit} --model.head_budget 1 --model.convert.head_budget 1", "model.head_budget model.convert.head_budget one"),
        (train_dit, "--model.pretrained {vit} --model.mlp_budget 1 --model.convert.mlp_budget 1", "model.mlp_budget model.convert.mlp_budget one"),
        (train_cls, "--model.pretrained {vit} --model.mlp_budget 0.5", "model.mlp_budget 0.5 model.convert.scope sample"),
        (train_cls, "--model.pretrained {vit} --model.convert.scope sample --model.convert.mlp_groups 4", "model.convert.mlp_groups 4 model.mlp_budget"),
        (train_cls, "--model.pretrained {vit} --init-from x", "init_from model.pretrained both weights"),
        (train_cls, "--model.pretrained {vit} --calibrate-images 4", "calibrate_images 4 heads MLPs model.convert"),
        (train_cls, "--seed 1", "model.name pretrained model.pretrained"),
        (train_cls, "--model.pretrained moh_vit_tiny_patch16_224 --model.convert.router moh", "model.convert model.pretrained moh_vit_tiny_patch16_224 routed already"),
        (train_dit, "--model.pretrained {vit}/config.json", "model.pretrained {vit}/config.json --init-from --model.name save_pretrained diffusers"),
        (train_dit, "--model.pretrained {vit}", "model.pretrained {vit} classifier train_dit.py"),
        (train_dit, "--model.pretrained {run}", "model.pretrained {run} classifier moh_vit train_dit.py"),
        (train_dit, "--model.pretrained {here}/rum", "model.pretrained {here}/rum file folder {here}/run?"),
        (train_dit, "--model.pretrained facebook/DiT-XL-2-256", "model.pretrained facebook/DiT-XL-2-256 folder hf download"),
        (train_dit, "--model.pretrained vit_tiny_patch16_224", "model.pretrained vit_tiny_patch16_224 routing"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(main, argv, facts, vit, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    if "{run}" in argv:
        run(train_cls.main, tmp_path / "run", "--model.pretrained", vit[0], steps=1)
    places = dict(vit=vit[0], here=tmp_path, run=tmp_path / "run")
    argv = argv.format(**places).split()
    error = refused(capsys, main.main, *RUN.split(), "--output", tmp_path / "no", *argv)
    assert_says(error, facts.format(**places))
    assert not (tmp_path / "no").exists()


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path, capsys, monkeypatch):
    """huggingface_hub tries again five times, and would log each."""

    def unreachable(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    logged = logging.Handler()
    logged.emit = lambda record: pytest.fail(record.getMessage())
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [logged])
    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    argv = [*RUN.split(), "--output", tmp_path / "no", "--model.pretrained", "hf-hub:nobody/none"]
    assert_says(refused(capsys, train_cls.main, *argv), "model.pretrained hf-hub:nobody/none")

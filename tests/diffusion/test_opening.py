"""sample.py on what is no run: published files under a model's name, and folders of pipelines."""

import json

import numpy as np
import pytest
import timm
import torch
from diffusers import DDIMScheduler, DiTPipeline
from safetensors.torch import load_file

from moh_vision.diffusion import MoHDiTPipeline, make_scheduler, sample
from moh_vision.models import dit
from moh_vision.models.creation import create
from moh_vision.models.weights import load_checkpoint
from tests.support import refusals
from tests.support.official_dit import diffusers_dit
from tests.support.refusals import assert_says, one_line
from tests.support.sampling import by_pipeline
from tests.support.tiny_vae import no_longer_zero, save_tiny_vae, tiny_vae

FEW = "--num-images 3 --batch-size 3 --sampler ddim --steps 2 --cfg-scale 2".split()
THEIRS = {"routed": "wg", "balance": "wg_0", "shared": "wg_1"}


# Sizes of the models below; those of the released ones are in tests/models/test_every_family.py.
SMALL = dict(embed_dim=32, depth=2, num_heads=8)
SMALLER = {
    "dit_small_patch2": SMALL,
    "dit_small_patch8": SMALL,
    "moh_dit_small_patch2_75": dict(SMALL, head_budget=[(2, 2), (8, 0)]),
    "moh_dit_small_patch2_90": dict(SMALL, head_budget=[(3, 4), (8, 0)]),
    "moh_dit_xlarge_patch2_90": dict(SMALL, head_budget=[(1, 2)] * 2),
}


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    """The names stand for smaller models."""
    for name, sizes in SMALLER.items():
        for key, value in sizes.items():
            monkeypatch.setitem(dit.VARIANTS[name], key, value)


def published(folder, name, **sizes):
    """Random weights in a .pt as the official MoH-DiT's, for images of 64 pixels: under the names of its code, the EMA beside the model."""
    torch.manual_seed(2)
    model = create(name, "diffusion", **{"img_size": 8, **sizes})
    state = {}
    for key, value in model.state_dict().items():
        for ours, theirs in THEIRS.items():
            key = key.replace(f".attn.router.{ours}.", f".attn.{theirs}.")
            if key != "pos_embed":
                value = value + 0.1 * torch.randn_like(value)
            state[key] = value
    file = folder / "0400000.pt"
    torch.save(dict(model={}, ema=state), file)
    return file


@pytest.fixture
def draw(tmp_path):
    """draw(*argv): the images that sample.py draws, uint8 [N, h, w, channels], and their labels."""

    def run(*argv):
        sample.main([*FEW, *map(str, argv), "--out", f"{tmp_path}/drawn.npz", "--overwrite"])
        with np.load(tmp_path / "drawn.npz") as archive:
            return archive["arr_0"], archive["arr_1"]

    return run


def refused(capsys, *argv):
    return refusals.refused(capsys, sample.main, *FEW, "--grid", "never.png", *argv)


@pytest.mark.parametrize("options", [[], ["--model", "moh_dit_xlarge_patch2_90"]])
def test_published_weights_are_fetched_by_their_name(tmp_path, monkeypatch, capsys, draw, options):
    """As from the hub."""
    name = "moh_dit_xlarge_patch2_90"
    vae = tmp_path / "vae"
    save_tiny_vae(vae, seed=5)
    argv = ["--checkpoint", name, *options]
    file = published(tmp_path, name, img_size=32)
    fetched = []

    def fetch(*repository_and_file, **_):
        fetched.append(repository_and_file)
        return file

    monkeypatch.setattr(dit, "hf_hub_download", fetch)
    images, _ = draw(*argv, "--vae", vae)
    assert images.shape[0] == 3 and fetched
    assert_says(refused(capsys, *argv), f"--vae stabilityai/sd-vae-ft-ema {name} latents 4")

    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(dit, "hf_hub_download", offline)
    facts = f"--checkpoint {name} fetched no route to host FILE --model"
    assert_says(refused(capsys, *argv), facts)


def test_names_without_published_weights_are_refused(capsys):
    name = "moh_dit_small_patch2_75"
    error = refused(capsys, "--checkpoint", name)
    assert_says(error, f"--checkpoint {name} file folder published FILE --model")
    error = refused(capsys, "--checkpoint", name, "--model", "moh_dit_xlarge_patch2_90")
    assert_says(error, f"--checkpoint {name} file folder")
    error = refused(capsys, "--checkpoint", "moh_vit_tiny_patch16_224")
    assert_says(error, "--checkpoint 'moh_vit_tiny_patch16_224' classifier diffusion")


def test_a_published_file_is_sampled_under_its_name(tmp_path, capsys, draw):
    name = "moh_dit_small_patch2_75"
    file = published(tmp_path, name)
    vae = tmp_path / "vae"
    save_tiny_vae(vae, seed=5)
    images, _ = draw(
        "--checkpoint", file, "--model", name, "--vae", vae, "--save-pipeline", tmp_path / "pipe"
    )
    assert images.shape[0] == 3 and images.std() > 10
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    loaded = load_checkpoint(timm.create_model(name, img_size=8), file)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, pipe.transformer.state_dict()[key])
    # ImageNet's, as the classes of runs are named, and their words.
    ids = pipe.get_label_ids(["n02007558", "flamingo", "golden retriever", "tench"])
    assert ids == [130, 130, 207, 0]
    some = "golden retriever", 130, "Tinca tinca"
    assert draw("--checkpoint", tmp_path / "pipe", "--classes", *some)[1].tolist() == [207, 130, 0]
    # A bird and a machine.
    with one_line("class_labels crane 134 517 number"):
        pipe.get_label_ids("crane")
    assert np.abs(by_pipeline(pipe, [0, 1, 2], 2) - images).max() <= 1
    capsys.readouterr()
    for more, facts in (
        (("--model", name), f"--vae stabilityai/sd-vae-ft-ema {name} latents 4"),
        (
            ("--model", "moh_dit_small_patch2_90", "--vae", vae),
            f"{file} head_budget 0 2 shared 3 --model {name}",
        ),
        (
            ("--model", "dit_smal_patch2", "--vae", vae),
            "--model 'dit_smal_patch2' dit_small_patch2",
        ),
        (("--model", name, "--vae", vae, "--score", "digits"), f"--score-file {file} run"),
        (("--model", name, "--vae", vae, "--classes", "crane"), "--classes crane 134 517 number"),
        (
            ("--model", name, "--vae", vae, "--classes", "golden retreiver"),
            "--classes retreiver 1000 golden retriever 0 999",
        ),
        ((), f"{file} --model moh_dit_xlarge_patch2_90"),
    ):
        assert_says(refused(capsys, "--checkpoint", file, *more), facts)
    gone = tmp_path / "no.pt"
    error = refused(capsys, "--checkpoint", gone, "--model", name)
    assert_says(error, f"--checkpoint {gone} file folder")


def test_the_weights_say_how_many_classes_and_channels_there_are(tmp_path, capsys, draw):
    """A released-form file of a model on grey pixels, without a learned variance."""
    name = "moh_dit_small_patch2_75"
    sizes = dict(img_size=8, in_chans=1, num_classes=12, learn_sigma=False)
    file = published(tmp_path, name, **sizes)
    images, labels = draw("--checkpoint", file, "--model", name, "--classes", 11)
    assert images.shape == (3, 8, 8, 1) and (labels == 11).all()
    state = torch.load(file)["ema"]
    state["y_embedder.embedding_table.weight"] = torch.zeros(200_000, 1)
    torch.save(state, tmp_path / "vast.pt")
    error = refused(capsys, "--checkpoint", tmp_path / "vast.pt", "--model", name)
    assert_says(error, f"{tmp_path}/vast.pt num_classes 199999 1 100000")


def test_the_weights_say_how_large_images_are(tmp_path, capsys, draw):
    """A file for images of 512 pixels, and the same weights as a folder of diffusers' transformer: the same images."""
    sizes = dict(num_layers=2, sample_size=64, patch_size=8, out_channels=8, num_embeds_ada_norm=5)
    theirs = diffusers_dit(num_attention_heads=8, attention_head_dim=4, **sizes)
    folder = tmp_path / "transformer"
    vae = tmp_path / "vae"
    name = "dit_small_patch8"
    theirs.save_pretrained(folder)
    save_tiny_vae(vae, seed=5)
    ours = load_checkpoint(create(name, "diffusion", img_size=64, num_classes=5), folder)
    torch.save(ours.state_dict(), tmp_path / "DiT-S-8-512x512.pt")
    options = (
        "--model",
        name,
        "--vae",
        vae,
        *"--num-images 1 --batch-size 1 --cfg-scale 1".split(),
    )
    of_file, _ = draw("--checkpoint", tmp_path / "DiT-S-8-512x512.pt", *options)
    of_folder, _ = draw("--checkpoint", folder, *options)
    assert of_file.shape == (1, 128, 128, 3)
    assert (of_file == of_folder).all() and of_file.std() > 10
    settings = json.loads((folder / "config.json").read_text())
    for text, facts in (
        (json.dumps(dict(settings, sample_size=99999)), "img_size 99999 1 1024"),
        ("[", "JSON"),
    ):
        (folder / "config.json").write_text(text)
        error = refused(capsys, "--checkpoint", folder, "--model", name, "--vae", vae)
        assert_says(error, f"{folder}/config.json {facts}")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_folder_of_diffusers_dit(tmp_path, capsys, draw):
    """Loaded and drawn from, it gives the images of diffusers' pipeline; sample.py those of ours with its noise."""
    sizes = dict(in_channels=4, out_channels=8, num_layers=2, sample_size=4, norm_num_groups=4)
    theirs = diffusers_dit(num_attention_heads=2, **sizes)
    other = DiTPipeline(
        theirs, tiny_vae(2), DDIMScheduler(beta_start=1e-4, beta_end=0.02, clip_sample=False)
    )
    folder = tmp_path / "dit"
    other.save_pretrained(folder)
    index_file = folder / "model_index.json"  # published ones have names in it
    index = json.loads(index_file.read_text())
    index_file.write_text(json.dumps(dict(index, id2label={"0": "tench", "7": "cock"})))
    pipe = MoHDiTPipeline.from_pretrained(folder)
    options = dict(guidance_scale=1.5, num_inference_steps=4, output_type="np")
    want = other([7], generator=torch.Generator().manual_seed(2), **options).images
    generator = [torch.Generator().manual_seed(2)]
    got = pipe("cock", generator=generator, guide_channels="all", **options).images
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert want.std() > 0.01

    images, labels = draw(
        "--checkpoint", folder, "--labels", "random", "--grid", tmp_path / "grid.png"
    )
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, timestep_spacing="leading")
    assert np.abs(by_pipeline(pipe, labels.tolist(), 2) - images).max() <= 1
    capsys.readouterr()
    index_file.write_text("{")
    for more, facts in (
        (("--weights", "model"), f"weights model {folder} pipeline one kind"),
        ((), f"{folder} pipeline {index_file}"),
    ):
        assert_says(refused(capsys, "--checkpoint", folder, *more), facts)


def test_the_weights_that_are_asked_for_are_drawn_with(tmp_path, capsys):
    """A file may hold the model and its EMA; one that does not say that it holds the model is refused."""
    name = "dit_small_patch8"
    vae = save_tiny_vae(tmp_path / "vae", seed=5)
    pipe = tmp_path / "pipe"
    ema = torch.load(published(tmp_path, name))["ema"]
    model = {key: 0.9 * value for key, value in ema.items()}
    model["pos_embed"] = ema["pos_embed"]
    file = tmp_path / "both.pt"
    torch.save(dict(model=model, ema=ema), file)
    options = ("--model", name, "--vae", vae, "--weights", "model")
    outputs = ("--save-pipeline", pipe, "--num-images", 1, "--grid", tmp_path / "grid.png")
    argv = ("--checkpoint", file, *options, *outputs)
    sample.main([*FEW, *map(str, argv)])
    said = capsys.readouterr().out
    assert f"pipeline: {pipe}, weights of {file} (model)\n" in said
    assert f"labels, {file} (model)\n" in said
    (saved,) = (pipe / "transformer").glob("*.safetensors")
    assert all(torch.equal(value, model[key]) for key, value in load_file(saved).items())
    for held, content in {"ema": dict(ema=ema), "one kind of weights": model}.items():
        torch.save(content, file)
        facts = f"{file} weights model {held} state_dict"
        assert_says(refused(capsys, "--checkpoint", file, *options), facts)
    error = refused(capsys, "--checkpoint", pipe / "transformer", *options)
    assert_says(error, f"weights model {saved.parent} one kind")


def test_label_tables_without_no_class(tmp_path, capsys):
    """The official DiT has no row for "no class" after class_dropout_prob 0; nothing in the file says so."""
    name = "dit_small_patch2"
    sizes = dict(img_size=8, in_chans=3, learn_sigma=False)
    torch.manual_seed(0)
    model = create(name, "diffusion", num_classes=3, **sizes)
    table = no_longer_zero(model, 0.2).y_embedder.embedding_table.weight.detach()
    state = model.state_dict()
    file = tmp_path / "dit.pt"

    def draw(*more):
        argv = f"--checkpoint {file} --model {name} --num-images 3 --steps 2 --batch-size 3"
        sample.main([*argv.split(), "--out", f"{tmp_path}/drawn.npz", "--overwrite", *more])
        return np.load(tmp_path / "drawn.npz")["arr_0"]

    torch.save(state, file)
    expected = draw()
    assert_says(capsys.readouterr().out, "label table 4 rows 3 classes")
    torch.save({**state, "y_embedder.embedding_table.weight": table[:3]}, file)
    assert set(np.load(tmp_path / "drawn.npz")["arr_1"]) == {0, 1, 2}
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert (draw() == expected).all()
    with pytest.raises(SystemExit):
        draw("--cfg-scale", "2")
    assert_says(capsys.readouterr().err, "--cfg-scale 2 label_drop above 0")
    (tmp_path / "classes.txt").unlink()
    torch.save({**state, "y_embedder.embedding_table.weight": table[:1]}, file)
    with pytest.raises(SystemExit):
        draw()
    assert_says(capsys.readouterr().err, "label table one row class")
    (tmp_path / "classes.txt").write_text("ant\n")
    assert (draw()[0] == expected[0]).all()


def test_classes_of_one_name_are_asked_for_by_number(tmp_path):
    model = create("dit_small_patch2", "diffusion", num_classes=3, img_size=8, in_chans=3, depth=1)
    names = {0: "crane", 1: "ant", 2: "crane"}
    pipe = MoHDiTPipeline(model, make_scheduler("ddim", 2, True, True), None, names, 0.1)
    assert pipe.get_label_ids("ant") == [1]
    with one_line("class_labels crane 0 2 number"):
        pipe.get_label_ids("crane")

"""sample.py on what is no run: published files under a model's name, and folders of pipelines."""

import numpy as np
import refusals
import timm
import torch
from diffusers import DDIMScheduler, DiTPipeline
from diffusers.models import DiTTransformer2DModel
from tiny_vae import save_tiny_vae, tiny_vae

from moh_vision.diffusion import MoHDiTPipeline, sample
from moh_vision.engine.seeds import derive_seed
from moh_vision.models.weights import create, load_checkpoint

FEW = "--num-images 3 --batch-size 3 --sampler ddim --steps 2 --cfg-scale 2".split()
THEIRS = {"routed": "wg", "balance": "wg_0", "shared": "wg_1"}


def published(folder, name):
    """Random weights in a .pt as the official MoH-DiT's, for images of 64 pixels: under the names of its code, the EMA beside the model."""
    torch.manual_seed(2)
    model = create(name, "diffusion", img_size=8)
    state = {}
    for key, value in model.state_dict().items():
        for ours, theirs in THEIRS.items():
            key = key.replace(f".attn.router.{ours}.", f".attn.{theirs}.")
        state[key] = value if key == "pos_embed" else value + 0.1 * torch.randn_like(value)
    file = folder / "0400000.pt"
    torch.save(dict(model={}, ema=state), file)
    return file


def draw(*argv):
    sample.main([str(a) for a in (*FEW, *argv)])


def refused(capsys, *argv):
    return refusals.refused(capsys, lambda more: draw(*more), *argv)


def test_a_published_file_is_sampled_under_its_name(tmp_path, capsys):
    name = "moh_dit_small_patch2_75"
    file, vae, out = published(tmp_path, name), tmp_path / "vae", tmp_path / "a.npz"
    save_tiny_vae(vae, seed=5)
    draw("--checkpoint", file, "--model", name, "--vae", vae, "--out", out, "--save-pipeline", tmp_path / "pipe")
    images = np.load(out)["arr_0"]
    assert images.shape[0] == 3 and images.std() > 10
    pipe = MoHDiTPipeline.from_pretrained(tmp_path / "pipe")
    for key, value in load_checkpoint(timm.create_model(name, img_size=8), file).state_dict().items():
        assert torch.equal(value, pipe.transformer.state_dict()[key])
    assert pipe.get_label_ids("n02007558") == [130]  # ImageNet's, as the classes of runs are named
    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(3)]
    drawn = pipe([0, 1, 2], 2.0, num_inference_steps=2, generator=generators).images
    assert np.abs(np.stack([np.array(i) for i in drawn]).astype(int) - images).max() <= 1
    # The pipeline, given as a checkpoint, draws the same bytes.
    draw("--checkpoint", tmp_path / "pipe", "--out", tmp_path / "b.npz")
    assert (np.load(tmp_path / "b.npz")["arr_0"] == images).all()
    capsys.readouterr()
    for more, words in (
        (("--model", name), "--vae is needed"),
        (
            ("--model", "moh_dit_small_patch2_90", "--vae", vae),
            f"2 heads are shared and stay so, not 3; --model {name} fits",
        ),
        (("--model", "dit_smal_patch2", "--vae", vae), "--model 'dit_smal_patch2' is not a registered model"),
        (("--model", name, "--vae", vae, "--score", "digits"), "--score-file is needed"),
        ((), "does not say of which model it is: give --model"),
    ):
        assert words in refused(capsys, "--checkpoint", file, "--out", tmp_path / "c.npz", *more)
    missing = ("--checkpoint", tmp_path / "no.pt", "--model", name, "--out", tmp_path / "c.npz")
    assert "--checkpoint" in refused(capsys, *missing)


def test_the_weights_say_how_large_images_are(tmp_path, capsys):
    """A file for images of 512 pixels, and the same weights as a folder of diffusers' transformer: the same images."""
    torch.manual_seed(4)
    theirs = DiTTransformer2DModel(num_attention_heads=6, attention_head_dim=64, num_layers=12, sample_size=64,
                                   patch_size=8, out_channels=8)  # fmt: skip
    emb = theirs.transformer_blocks[0].norm1.emb.state_dict()
    for block in theirs.transformer_blocks:
        block.norm1.emb.load_state_dict(emb)
    folder, vae, name = tmp_path / "transformer", tmp_path / "vae", "dit_small_patch8"
    theirs.save_pretrained(folder)
    save_tiny_vae(vae, seed=5)
    ours = load_checkpoint(create(name, "diffusion", img_size=64), folder)
    torch.save(ours.state_dict(), tmp_path / "DiT-S-8-512x512.pt")
    how = "--num-images 1 --batch-size 1 --cfg-scale 1".split()
    for file, out in (("DiT-S-8-512x512.pt", "a.npz"), ("transformer", "b.npz")):
        draw("--checkpoint", tmp_path / file, "--model", name, "--vae", vae, "--out", tmp_path / out, *how)
    a, b = (np.load(tmp_path / out)["arr_0"] for out in ("a.npz", "b.npz"))
    assert a.shape == (1, 128, 128, 3) and (a == b).all() and a.std() > 10
    assert "does not say of which model it is: give --model" in refused(
        capsys, "--checkpoint", folder, "--out", tmp_path / "c.npz"
    )
    for text, words in (
        ('{"sample_size": 99999}', "a side of 99999 is out of range: 1 to 1024"),
        ("[", "no sample_size can be read"),
    ):
        (folder / "config.json").write_text(text)
        more = ("--checkpoint", folder, "--model", name, "--vae", vae, "--out", tmp_path / "c.npz")
        assert f"{folder}/config.json: " in (error := refused(capsys, *more)) and words in error


def test_a_folder_of_diffusers_dit(tmp_path, capsys):
    torch.manual_seed(3)
    theirs = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, sample_size=4,
        norm_num_groups=4,
    )  # fmt: skip
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.1)
    folder = tmp_path / "dit"
    DiTPipeline(theirs, tiny_vae(2), DDIMScheduler(beta_start=1e-4, beta_end=0.02)).save_pretrained(folder)
    draw("--checkpoint", folder, "--labels", "random", "--grid", tmp_path / "grid.png", "--out", tmp_path / "a.npz")
    about = np.load(tmp_path / "a.npz")
    pipe = MoHDiTPipeline.from_pretrained(folder)
    generators = [torch.Generator().manual_seed(derive_seed(0, i)) for i in range(3)]
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False, timestep_spacing="leading")
    drawn = pipe(about["arr_1"].tolist(), 2.0, num_inference_steps=2, generator=generators).images
    assert np.abs(np.stack([np.array(i) for i in drawn]).astype(int) - about["arr_0"]).max() <= 1
    capsys.readouterr()
    (folder / "model_index.json").write_text("{")
    for more, words in ((("--weights", "model"), "--weights model has no effect"), ((), f"{folder}: not a pipeline")):
        assert words in refused(capsys, "--checkpoint", folder, "--out", tmp_path / "c.npz", *more)

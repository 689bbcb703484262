"""Sample from a diffusion run, draw a grid, score.   python sample.py --checkpoint RUN --num-images 500 --grid grid.png

See `python sample.py --help` for every option.
"""

import json
import sys
from pathlib import Path
from typing import Optional

import torch
from tqdm import tqdm

import moh_vision  # noqa: F401  registers the models
from moh_vision.analysis import HeadLoad
from moh_vision.analysis.figures import as_pil, draw_head_usage, draw_image_grid, write_images
from moh_vision.attention import head_budget
from moh_vision.command_line import parse_config
from moh_vision.config import SampleConfig
from moh_vision.data.batches import LabelledImages, evaluation_batches, image_transform
from moh_vision.data.latents.vae import load_vae, vae_fingerprint
from moh_vision.data.order import derive_seed, rank_slice
from moh_vision.data.splits import open_source
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.diffusion.sampling import to_uint8
from moh_vision.engine.logging import peak_memory_mib
from moh_vision.engine.script import claim_outputs, index_dir, user_errors
from moh_vision.evaluation.classifier_scores import score_with_classifier
from moh_vision.models.weights import from_run

SAMPLING = ("sampler", "steps", "cfg_scale", "guide_channels", "cfg_interval", "seed")  # what scores depend on


def main(argv) -> None:
    # ---------------------------------------------------------------- set-up
    with user_errors("sample.py"):
        config, _ = parse_config(SampleConfig, argv, "sample.py")
        model, about = from_run(config.checkpoint, "diffusion", config.weights)
        classes = about["classes"]
        if config.vae and not about.get("vae"):
            raise ValueError(f"--vae {config.vae}: {config.checkpoint} was trained on pixels")
        vae = open_vae(config.vae, about.get("vae"))
        # A prediction is clipped to the range of pixels; latents have none.
        scheduler = make_scheduler(config.sampler, config.steps, model.config.learn_sigma, clip=vae is None)
        label_drop = about["config"]["label_drop"]
        pipe = MoHDiTPipeline(model, scheduler, vae, dict(enumerate(classes)), label_drop)
        if config.cfg_scale != 1 and label_drop == 0:
            raise ValueError(f"--cfg-scale {config.cfg_scale:g} needs a run trained with label_drop above 0")
        scores_path = (
            Path(config.score_file or Path(about["weights"]).with_name("scores.json")) if config.score else None
        )
        if config.save_pipeline and Path(config.save_pipeline).is_file():
            raise ValueError(f"--save-pipeline {config.save_pipeline} is a file, expected a folder")
        claim_outputs([config.out, config.grid, config.head_usage, config.save_pipeline, scores_path], config.overwrite)
        if config.score:
            reference = open_source(config.score, "val", index_dir(config.checkpoint))
            classifier, judge = from_run(config.extractor, "classifier")
            if judge["classes"] != classes or reference.classes != classes:
                raise ValueError(
                    f"--extractor {config.extractor} and --score {config.score} need the classes of {config.checkpoint}: {classes}"
                )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipe.to(device).set_progress_bar_config(disable=True)
    if config.save_pipeline:
        pipe.save_pretrained(config.save_pipeline)
        print(f"pipeline: {config.save_pipeline}")
    if not config.num_images:
        return

    # ---------------------------------------------------------------- sample
    labels = torch.arange(config.num_images) % len(classes)
    budget = head_budget(model)["layers"]
    load = HeadLoad([layer["heads"] for layer in budget], len(classes) + 1)  # the last row: "no class"

    images = []
    batches = labels.split(config.batch_size)
    with tqdm(
        total=len(batches) * len(scheduler.timesteps), desc="sampling", unit="step", disable=not sys.stderr.isatty()
    ) as bar:

        def advance(*_):
            bar.update()

        for number, batch in enumerate(batches):
            first = number * config.batch_size
            seeds = [derive_seed(config.seed, first + i) for i in range(len(batch))]
            latents = pipe(
                batch,
                config.cfg_scale,
                None if config.guide_channels == "all" else config.guide_channels,
                config.cfg_interval,
                config.steps,
                [torch.Generator().manual_seed(seed) for seed in seeds],
                output_type="latent",
                callback_on_step_end=advance,
                on_routing=load.add if config.head_usage else None,
            ).images
            images.append(to_uint8(pipe.decode(latents)).cpu())
            bar.set_postfix_str(f"{first + len(batch)} of {config.num_images} images, peak {peak_memory_mib():.0f} MiB")
    images = torch.cat(images)  # [n, C, h, w] uint8
    how = f"{config.sampler} {len(scheduler.timesteps)} steps, guidance {config.cfg_scale:g}"
    if config.cfg_scale != 1 and config.cfg_interval != (0, 1):
        how += " between {:g} and {:g} of the timesteps".format(*config.cfg_interval)
    print(f"{len(images)} images, {how}, {about['weights']}")

    # ---------------------------------------------------------------- write
    if config.out:
        write_images(images, labels, Path(config.out))
        print(f"images: {config.out}")
    if config.grid:
        columns = max(1, min(config.grid_columns, config.num_images // len(classes)))
        rows = [torch.nonzero(labels == c).flatten()[:columns] for c in range(min(len(classes), 10))]
        draw_image_grid(images[torch.cat(rows)], columns, config.grid)
        print(f"grid, one class a row: {config.grid}")
    if config.head_usage:
        title = f"{about['architecture']}: head usage by class while sampling"
        rows = [*classes, "none"] if config.cfg_scale != 1 else classes
        draw_head_usage(
            [s[: len(rows)] for s in load.share()],
            [layer["shared"] for layer in budget],
            rows,
            config.head_usage,
            title,
        )
        print(f"head usage: {config.head_usage}")

    # ---------------------------------------------------------------- score
    if config.score:
        mean, std = (classifier.pretrained_cfg[k][: reference.channels] for k in ("mean", "std"))
        transform = image_transform("none", judge["arguments"]["img_size"], reference.channels, mean, std)
        slices = rank_slice(len(reference), 0, 1, 256)
        real = evaluation_batches(LabelledImages(reference, transform, 0), slices, 0)
        fake = torch.stack([transform(as_pil(image)) for image in images])
        scores = score_with_classifier(classifier.to(device), fake, labels, real, device)
        scores.update(
            feature_space=f"penultimate layer of {judge['weights']} ({judge['architecture']}); not Inception, not FID",
            reference=f"{config.score}, test split",
            weights=about["weights"],
            sampling={k: getattr(config, k) for k in SAMPLING},
        )
        scores_path.write_text(json.dumps(scores, indent=1) + "\n")
        recognised, on_real = (100 * scores[k] for k in ("recognised", "recognised_real"))
        print(f"recognised as the class asked for: {recognised:.1f} % (real test images: {on_real:.1f} %)")
        distance = scores["frechet_distance"]
        shown = "needs more images than features" if distance is None else f"{distance:.2f}"
        print(f"Frechet distance: {shown}; {scores['num_features']} features, {scores['feature_space']}")
        print(f"scores: {scores_path}")


def open_vae(override: Optional[str], recorded: Optional[dict]):
    """The VAE that --vae names, or that the run records as a `LatentSpace`; None on pixels.

    Raises:
        ValueError: if it cannot be loaded, or the recorded name means another VAE by now.
    """
    if recorded is None:
        return None
    vae = load_vae(override or recorded["name"])
    if not override and vae_fingerprint(vae) != recorded["sha256"]:
        raise ValueError(
            f"the VAE {recorded['name']} is not the one of the run (sha256 {recorded['sha256'][:12]}); --vae takes another on purpose"
        )
    # Latents were scaled by the factor of the training, whatever this decoder's own is.
    vae.register_to_config(scaling_factor=recorded["scaling_factor"])
    vae.enable_slicing()  # one image at a time, so that memory does not grow with the batch
    return vae


if __name__ == "__main__":
    main(sys.argv[1:])

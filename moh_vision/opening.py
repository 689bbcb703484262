"""Open a model that training or others have made, of any wing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from moh_vision.common.errors import closest
from moh_vision.common.wings import CLASSIFICATION, DIFFUSION, WINGS
from moh_vision.engine.command_line import SavedConfig, named_options, saved_config
from moh_vision.engine.opened import Opened
from moh_vision.models.creation import image_models
from moh_vision.models.weights import Weights, find_weights


def open_run(
    path: str | Path,
    weights: str | None = None,
    device: Any = None,
    options: Sequence[str] = (),
    *,
    name: str | None = None,
) -> Opened:
    """Open a run, or a model that others have saved.

        opened = moh_vision.open_run("runs/cls")
        opened.model, opened.config, opened.metadata, opened.scores()

    Args:
        path: folder of a run, a checkpoint of it (RUN/checkpoints/step_N), or a .safetensors file in either; a timm,
            diffusers or transformers folder, such as publish writes; a weights file, with a `name`.
        weights: "ema" or "model"; None: the weights that the run's results.json is of, else the EMA, if there is one. Of a
            file of JiT's training script also "ema2", its second EMA.
        device: of the model; None: the CPU, and the accelerator once something is computed; "meta": a model without values.
        options: keys to change, as on a command line: ["--data.root", "imagenet"].
        name: of the model, for weights that do not say it.

    Raises:
        ValueError, FileNotFoundError: in one line, naming the file or key.
    """
    return open_weights(find_weights(path, name, weights), options, device)


def open_weights(
    found: Weights,
    options: Sequence[str] = (),
    device: Any = None,
    *,
    split: str | None = None,
    scores: bool = False,
    command: str = "open_run",
    saved: SavedConfig | None = None,
) -> Opened:
    """Open the model of weights that `find_weights` found, see `open_run`.

    Args:
        split: the first split that a classifier opens.
        scores: whether the options of a diffusion model are those of `scores()`.
        command: its name in messages.
        saved: the run's config.yaml, if it has been read.
    """
    if saved is None and found.run:
        saved = saved_config(found.run)
    wing = wing_of(found, options)
    if saved and wing_said(saved) != wing:
        raise ValueError(f"{saved.file}: kind {wing_said(saved)!r}, and {found.file} is of {wing}")
    if wing == CLASSIFICATION.name:
        from moh_vision.classification.opening import open_weights as open_classifier

        return open_classifier(found, options, device, split=split, command=command, saved=saved)
    if wing == DIFFUSION.name:
        from moh_vision.diffusion.opening import open_weights as open_diffusion

        return open_diffusion(found, options, device, scores=scores, command=command, saved=saved)
    from moh_vision.language.opening import open_weights as open_text

    return open_text(found, options, device, command=command, saved=saved)


def load_run(path: str | Path, weights: str | None = None) -> nn.Module:
    """Return the model of `open_run`, in eval mode on the CPU.

    The pretrained_cfg of a classifier has the run's preprocessing in validation, for
    `timm.data.resolve_model_data_config`, and the class names as label_names.

    Args:
        path, weights: see `open_run`; without an EMA, "ema" means "model".
    """
    return open_run(path, weights).model


def wing_of(found: Weights, options: Sequence[str] = ()) -> str:
    """Return the wing of weights, or else that of the model which --model.name or --model names in options."""
    if found.wing:
        return found.wing
    name = found.file.name
    for option, texts in named_options(options):
        if option in ("model.name", "model") and texts:
            name = texts[0]  # of several options the last counts
    return image_models().get(name.split(".")[0], CLASSIFICATION.name)


def wing_said(saved: SavedConfig) -> str:
    """Return the name of the wing that a run's config.yaml says, or refuse the file."""
    wing = None
    if isinstance(saved.values, dict):
        wing = saved.values.get("kind")
    if wing not in WINGS:
        raise ValueError(f"{saved.file}: kind {wing!r}: {closest(str(wing), WINGS)}")
    return wing

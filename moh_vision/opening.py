"""Open a model that training or others have made, of any wing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from moh_vision.common.errors import closest
from moh_vision.common.io import run_of
from moh_vision.common.wings import WINGS
from moh_vision.engine.command_line import SavedConfig, load_as, named_options, saved_config
from moh_vision.engine.opened import Opened
from moh_vision.models.weight_files import read_metadata
from moh_vision.models.weights import image_models


def open_run(  # noqa: PLR0913
    path: str | Path,
    weights: str | None = None,
    device: Any = None,
    options: Sequence[str] = (),
    *,
    name: str | None = None,
    split: str | None = None,
    scores: bool = False,
    command: str = "open_run",
    saved: SavedConfig | None = None,
) -> Opened:
    """Open a run, or a model that others have saved.

        opened = moh_vision.open_run("runs/cls")
        opened.model, opened.config, opened.metadata, opened.scores()

    Args:
        path: folder of a run, a checkpoint of it (RUN/checkpoints/step_N), or a .safetensors file in either; a timm,
            diffusers or transformers folder, such as publish writes; a weights file, with a `name`.
        weights: "ema" or "model"; None: the weights that the run's results.json is of, else the EMA, if there is one. Of a
            file of JiT's training script also "ema2", its second EMA.
        device: of the model; None: the CPU, and the accelerator once something is computed.
        options: keys to change, as on a command line: ["--data.root", "imagenet"].
        name: of the model, for weights that do not say it.
        split: for commands: the first split that a classifier opens.
        scores: for commands: whether the options of a diffusion model are those of `scores()`.
        command: for commands: their name in messages.
        saved: for commands: the run's config.yaml, if they have read it.

    Raises:
        ValueError, FileNotFoundError: in one line, naming the file or key.
    """
    saved = saved or saved_config(run_of(path))
    named = list(options)
    if name:
        named += ["--model.name", name]
    wing = _wing_of(path, named, saved)
    asked = (str(path), weights, device, options)
    if wing == "classification":
        from moh_vision.classification.opening import open_run as open_classifier

        return open_classifier(*asked, name=name, split=split, command=command, saved=saved)
    if wing == "diffusion":
        from moh_vision.diffusion.opening import open_run as open_diffusion

        return open_diffusion(*asked, name=name, scores=scores, command=command, saved=saved)
    from moh_vision.language.opening import open_run as open_text

    if name:
        raise ValueError(f"name {name!r} has no effect: {path} is a text model, which says its own")
    return open_text(*asked, command=command, saved=saved)


def load_run(path: str | Path, weights: str | None = None) -> nn.Module:
    """Return the model of `open_run`, in eval mode on the CPU.

    The pretrained_cfg of a classifier has the run's preprocessing in validation, for
    `timm.data.resolve_model_data_config`, and the class names as label_names.

    Args:
        path, weights: see `open_run`; without an EMA, "ema" means "model".
    """
    return open_run(path, weights).model


def kind_of(path: str | Path, options: Sequence[str] = ()) -> str:
    """Return the name of the wing that a path belongs to, or else the model named by --model.name in options."""
    return _wing_of(path, options, saved_config(run_of(path)))


def wing_said(saved: SavedConfig) -> str:
    """Return the name of the wing that a run's config.yaml says."""
    return _said(saved.file, saved.values)


def _wing_of(path: str | Path, options: Sequence[str], saved: SavedConfig | None) -> str:
    if saved:
        return wing_said(saved)
    path = Path(path)
    if (path / "model_index.json").is_file():
        return "diffusion"
    if (path / "config.json").is_file():
        keys = _read(path / "config.json")
        if "model_type" in keys:  # transformers
            return "text"
        if "_class_name" in keys:  # diffusers
            return "diffusion"
        return "classification"  # timm
    if path.is_file() and path.suffix == ".safetensors":
        config = read_metadata(path).get("config")
        if config is not None:
            return _said(path, config)
    name = path.name
    for option, texts in named_options(options):
        if option == "model.name" and texts:
            name = texts[0]  # of several options the last counts
    return image_models().get(name.split(".")[0], "classification")


def _read(file: Path) -> dict:
    """Return what a config.json says; foreign files may hold anything."""
    tree = load_as(file, file.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(tree, dict):
        return {}
    return tree


def _said(file: Path, config: Any) -> str:
    """Return the wing that a configuration in a file says, or refuse the file."""
    wing = None
    if isinstance(config, dict):
        wing = config.get("kind")
    if wing not in WINGS:
        raise ValueError(f"{file}: kind {wing!r}: {closest(str(wing), WINGS)}")
    return wing

"""The door for weights: find them, say what they are of, make their model, or load them into another.

    found = find_weights("runs/cls")
    model = found.build()

It stands in models/, because what names of models, folders of timm and diffusers, and names of tensors mean is known here.
It knows a wing by the word in the metadata of weights, and language models by no more than that: their wing builds them.
"""

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import timm
import torch
from torch import Tensor, nn

from moh_vision.attention import ROUTERS
from moh_vision.common.cli import refuse_missing_source
from moh_vision.common.errors import closest, reason_of
from moh_vision.common.imports import trained_with
from moh_vision.common.io import RUN_CONFIG, run_of, sha256_of, step_of, tensor_files
from moh_vision.common.wings import CLASSIFICATION, DIFFUSION, TEXT, WINGS
from moh_vision.models.class_names import listed, saved_with
from moh_vision.models.creation import (
    FAMILIES,
    arguments_of,
    check_name,
    create,
    image_models,
    near_model,
    refuse_fetch,
)
from moh_vision.models.fitting import (
    OtherModel,
    TakenWeights,
    load_npz,
    load_tensors,
    other_heads,
    refuse_other_shapes,
    start_from,
)
from moh_vision.models.head_budgets import take_shared_heads
from moh_vision.models.layouts import (
    Described,
    arguments_of_jit,
    dit_sizes,
    is_timms_own,
    label_table,
    of_diffusers,
    of_timm,
    with_no_class,
)
from moh_vision.models.outline import without_values
from moh_vision.models.prediction import Prediction, other_training
from moh_vision.models.weight_files import (
    kind_in,
    read_metadata,
    read_settings,
    read_tensors,
    said_of_first_weights,
    scored_weights,
    shapes_in,
    weights_file,
    weights_said,
)


class Form(StrEnum):
    """What a source of weights is."""

    RUN = "a run"
    CHECKPOINT = "a checkpoint of a run"
    FILE = "a file of a run"
    TIMM = "a folder of timm"
    PIPELINE = "a pipeline"
    DIFFUSERS = "a folder of diffusers"
    TRANSFORMERS = "a folder of transformers"
    FOREIGN = "a file of weights"
    NAME = "the name of a published model"


# Forms whose weights are written by a run: their metadata say everything.
OF_RUNS = (Form.RUN, Form.CHECKPOINT, Form.FILE)
# Forms that hold one kind of weights, and do not say which.
OF_ONE_KIND = (Form.TIMM, Form.PIPELINE, Form.DIFFUSERS, Form.TRANSFORMERS, Form.NAME)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights that `find_weights` found, and what is known of their model. Their tensors have not been read.

    Attributes:
        source: path or name, as given.
        key: the option or configuration key that gave the source, for messages; "" for a call from Python.
        form: what the source is.
        file: file of the weights; of a published model that is fetched, its name.
        asked: which weights were asked for: "ema", "ema2", "model", or None.
        wing: "classification", "diffusion", "text", or None: the source does not say it.
        architecture: name with which `timm.create_model` makes the model, or a text model's; None: the source does not
            say it, see `named`.
        arguments: the architecture's.
        metadata: those of a run's file, as `read_metadata` returns them; else {}.
        pretrained_cfg: timm's; {} for weights that timm has not saved.
    """

    source: str
    key: str = ""
    form: Form
    file: Path
    asked: str | None = None
    wing: str | None = None
    architecture: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    pretrained_cfg: dict[str, Any] = field(default_factory=dict)

    # ---------------------------------------------------------------- what is known
    @property
    def title(self) -> str:
        """The key and the source, with which a message begins."""
        return f"{self.key} {self.source}".strip()

    @property
    def path(self) -> Path:
        """The source as a path, which does not exist for the name of a published model."""
        return Path(self.source.removeprefix("local-dir:"))

    @property
    def said(self) -> str:
        """The file, and which weights of it, as scripts print it."""
        if self.form == Form.NAME:
            return self.source
        return weights_said(self.file, self.asked)

    @property
    def brings_model(self) -> bool:
        """Whether the source itself says of which model it is."""
        return self.form not in (Form.FOREIGN, Form.NAME)

    @property
    def run(self) -> Path | None:
        """The folder of the run that the file is in, or None."""
        folder = run_of(self.file)
        if (folder / RUN_CONFIG).is_file():
            return folder
        return None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the run that wrote the weights; {} for others."""
        return self.metadata.get("config") or {}

    @cached_property
    def held(self) -> str | None:
        """Which weights they are: "ema", "ema2", "model", or None: the source does not say it."""
        if self.form in OF_RUNS:
            return {"ema": "ema", "model": "model"}.get(self.file.stem)
        return kind_in(self.file, self.asked)

    @property
    def is_scored(self) -> bool:
        """Whether the results of the run are of these weights."""
        return self.run is not None and scored_weights(self.run) == self.file

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file; of a sharded run's parts that of the list of their sums."""
        sums = [sha256_of(part) for part in tensor_files(self.file)]
        if len(sums) == 1:
            return sums[0]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in the file by name."""
        return shapes_in(self.file, self.asked)

    @cached_property
    def classes(self) -> list[str] | None:
        """Class names in the model's order; None: the source does not name them."""
        if self.form == Form.NAME:
            return self._classes_of_name()
        named = listed(self.metadata.get("classes"), f"{self.file}: classes in its metadata")
        return named or saved_with(self.file)

    def _classes_of_name(self) -> list[str] | None:
        """`classes` of a published model: those in timm's registry or in its config.json on the hub."""
        if self.source.startswith("hf-hub:"):
            return of_timm(self.source).pretrained_cfg["label_names"]
        registered = timm.get_pretrained_cfg(self.source)
        if registered is None:
            return None
        return listed(registered.label_names, "label_names")

    @property
    def prediction(self) -> Prediction | None:
        """What a diffusion model was trained to predict; None: the weights do not say it."""
        arguments = self.trained_arguments
        if arguments is None:
            return None
        return Prediction.of(arguments.get("prediction"))

    @property
    def trained_arguments(self) -> dict[str, Any] | None:
        """All arguments of the model that a diffusion model's weights were trained in; None: the weights do not say them."""
        if self.form != Form.FOREIGN:
            return arguments_of(str(self.architecture), self.arguments)
        return arguments_of_jit(self.shapes) or None

    # ---------------------------------------------------------------- of another model, or none
    def refuse_other(self, wing: str) -> None:
        """Refuse weights of another wing than the one needed."""
        if self.wing in (None, wing):
            return
        if self.form == Form.NAME:
            check_name(self.source, wing, self.key)
        theirs = WINGS[self.wing]
        needed = WINGS[wing]
        subject = self.title
        if self.form in OF_RUNS:
            subject = f"{self.key} {self.file}".strip()
        raise ValueError(
            f"{subject} is of a {theirs.title} model, {self.architecture}, of {theirs.script}; "
            f"give a run of {needed.script}"
        )

    def named(self, name: str, arguments: dict | None = None, key: str = "name") -> Self:
        """Return the weights as those of the registered model `name`, which they do not say themselves.

        Folders of diffusers say it, but their weights also fit the model of the official code.

        Args:
            arguments: the model's; None: those that the tensors of a released DiT say.
            key: option that gave the name, for messages.
        """
        if self.form == Form.NAME and name == self.source:
            return self
        if self.form not in (Form.FOREIGN, Form.PIPELINE, Form.DIFFUSERS, Form.NAME):
            theirs = f"its {WINGS[self.wing].title} model" if self.wing else "its model"
            raise ValueError(
                f"{key} {name!r} has no effect: {self.title} brings {theirs}, {self.architecture}"
            )
        check_name(name, self.wing, key)
        wing = image_models().get(name.split(".")[0], CLASSIFICATION.name)
        form = self.form
        if form != Form.NAME:
            form = Form.FOREIGN
        given = replace(
            self, form=form, wing=wing, architecture=name, arguments=dict(arguments or {})
        )
        if arguments is None and wing == DIFFUSION.name and form == Form.FOREIGN:
            return replace(given, arguments=given.released_sizes)
        return given

    @property
    def released_sizes(self) -> dict[str, Any]:
        """The arguments of a released DiT that the tensors in its file say."""
        sizes = dit_sizes(self.file, self.shapes)
        if arguments_of(str(self.architecture), {}).get("compat") == "sit":
            # SiT's files have the channels of a variance, which loading leaves out.
            sizes["learn_sigma"] = False
        sizes["num_classes"] = len(label_table(self.file, self.shapes).classes)
        return sizes

    def with_routing(self) -> Self:
        """Return the weights as those of a model with head routing: a ViT of timm's as those of a dense "moh_vit"."""
        if self.wing != CLASSIFICATION.name or self.form not in (Form.TIMM, Form.NAME):
            return self
        name, arguments, cfg = of_timm(self._timm_source)
        if is_timms_own(name):
            arguments = {"base": name, "router": "dense", **arguments}
            name = "moh_vit"
            try:
                with without_values():
                    timm.create_model(name, **arguments)
            except Exception as error:  # a model that cannot be converted may fail anywhere
                raise ValueError(f"{self.title}: {reason_of(error)}") from None
        else:
            check_name(name, CLASSIFICATION.name)
        return replace(self, architecture=name, arguments=arguments, pretrained_cfg=cfg)

    @property
    def _timm_source(self) -> str:
        """The source as `timm.create_model` takes it."""
        if self.form == Form.TIMM:
            return f"local-dir:{self.path}"
        return self.source

    # ---------------------------------------------------------------- the tensors
    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors, by name."""
        if self.form == Form.NAME:
            return self._fetched({}).state_dict()
        return read_tensors(self.file, self.asked)

    def outline(self) -> nn.Module | None:
        """Return the model of the weights without values; None: the source does not say which, or none can be made."""
        try:
            described = self.with_routing()
            if not described.brings_model and described.form != Form.NAME:
                return None
            return described._outline({})
        except Exception:  # files of others may hold anything
            return None

    def _outline(self, changes: dict[str, Any]) -> nn.Module:
        """Make the model without values."""
        with without_values():
            model = create(self.architecture, self.wing, **{**self.arguments, **changes})
            if self.form in OF_RUNS:
                shapes = {name: torch.empty(shape) for name, shape in self.shapes.items()}
                take_shared_heads(model, shapes)
        return model

    def build(self, device: Any = None, **changes: Any) -> nn.Module:
        """Return the model with the weights, in eval mode.

        A model of timm's own is returned as timm makes it, see `with_routing`.

        Args:
            device: where the model goes; None: the CPU; "meta": a model without values, for which no tensor is read.
            changes: arguments of the model that replace those of the weights, such as `img_size`, to whose grid position
                tables are resized.
        """
        if self.wing == TEXT.name:
            raise ValueError(
                f"{self.title} is a language model; expected a classifier or a diffusion model"
            )
        with said_with(self.key):
            if str(device) == "meta":
                return self._outline(changes).eval()
            return self._with_values(changes).to(device or "cpu").eval()

    def _with_values(self, changes: dict[str, Any]) -> nn.Module:
        """`build` for a device that has memory."""
        is_timms = self.form == Form.TIMM and is_timms_own(str(self.architecture))
        is_its_own = self.form == Form.NAME and self.architecture in (None, self.source)
        if is_timms or is_its_own:
            return self._fetched(changes)
        if self.form in OF_RUNS:
            return self._of_run(changes)
        if self.architecture is None:
            raise ValueError(f"{self.title} does not say of which model it is: give its name")
        if self.wing == DIFFUSION.name and self.form == Form.FOREIGN:
            return self._released_dit()
        state = self.tensors()
        arguments = {**self.arguments, **changes}
        if self.form in (Form.TIMM, Form.PIPELINE, Form.DIFFUSERS):
            refuse_sizes(self.file, state, self.arguments)
            model = self._of_library(arguments)
        else:
            model = create(self.architecture, self.wing, **arguments)
        self._fill(model, state)
        return model

    def _of_library(self, arguments: dict[str, Any]) -> nn.Module:
        """Make the model that a config.json describes; a user may have no part in its arguments."""
        try:
            return create(self.architecture, self.wing, **arguments)
        except Exception as error:  # arguments of wrong types fail anywhere
            config = self.path / "config.json"
            if self.wing == DIFFUSION.name:
                config = _diffusers_config(self.path)
            raise ValueError(f"{config}: no model can be made of it ({reason_of(error)})") from None

    def _fill(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Load a state dict into a model that was made for it; every tensor is needed."""
        taken = start_from(model, state, f"{self.key} {self.file}".strip())
        if taken.changed:
            raise ValueError(
                f"{self.file} does not hold all of {self.architecture}: {'; '.join(taken.changed)}"
            )

    def _of_run(self, changes: dict[str, Any]) -> nn.Module:
        warning = said_of_first_weights(self.file, self.metadata)
        if warning:
            logging.getLogger(__name__).warning(warning)
        state = self.tensors()
        self._refuse_other_tensors(state)
        model = create(self.architecture, self.wing, **{**self.arguments, **changes})
        self._fill(model, state)
        return model

    def _refuse_other_tensors(self, state: dict[str, Tensor]) -> None:
        """Refuse a run's file whose tensors are not those of the model in its metadata.

        The model is made without values first: anyone can write metadata, so metadata alone must not decide how much
        memory is allocated.
        """
        refuse_sizes(self.file, state, self.arguments)
        try:
            with without_values():
                outline = create(self.architecture, self.wing, **self.arguments)
                take_shared_heads(outline, state)
        except ValueError as error:
            hint = ""
            if self.arguments.get("router") not in (None, *ROUTERS):
                hint = trained_with(self.config)
            raise ValueError(f"{self.file}: {reason_of(error)}{hint}") from None
        except Exception as error:  # arguments of wrong types fail anywhere
            reason = f"{self.architecture} cannot be made of the arguments in its metadata ({reason_of(error)})"
            raise ValueError(f"{self.file}: {reason}") from None
        try:
            refuse_other_shapes(self.file, state, outline)
        except OtherModel as error:
            # A plain ValueError, to which `advise_on_model_name` adds no advice.
            raise ValueError(str(error)) from None

    def _released_dit(self) -> nn.Module:
        """Make the model of a released DiT, SiT or JiT, whose file says its sizes."""
        table = label_table(self.file, self.shapes)
        state = self.tensors()
        if not table.has_no_class:
            state = with_no_class(state)
        try:
            model = create(self.architecture, DIFFUSION.name, **self.arguments)
            return load_tensors(model, state, self.file)
        except ValueError as error:
            problem = str(error)
            fitting = self._dits_that_fit(state)
            if fitting:
                problem += f"; --model {fitting[0]} fits"
            raise ValueError(problem) from None

    def _dits_that_fit(self, state: dict[str, Tensor]) -> list[str]:
        """Return the other registered models of the same size that the weights fit."""
        size = self.architecture.rpartition("_")[0]
        fitting = []
        for module in FAMILIES[DIFFUSION.name]:
            for candidate in timm.list_models(f"{size}_*", module=module):
                if candidate == self.architecture:
                    continue
                with contextlib.suppress(ValueError):
                    load_tensors(
                        create(candidate, DIFFUSION.name, **self.arguments), state, self.file
                    )
                    fitting.append(candidate)
        return fitting

    def _fetched(self, changes: dict[str, Any]) -> nn.Module:
        """Return the model that timm makes of the source, with its weights, which it may download."""
        try:
            return timm.create_model(self._timm_source, pretrained=True, **changes)
        except Exception as error:
            # There are no pretrained weights, or no network, or a file that may hold anything.
            problem = f"{self.title}: its weights cannot be fetched ({reason_of(error)}){near_model(self.source)}"
            if self.wing == DIFFUSION.name:
                problem += f"; for a file of them: --checkpoint FILE --model {self.source}"
            raise ValueError(problem) from None

    def into(self, model: nn.Module) -> nn.Module:
        """Load all weights into a model that exists, see `load_checkpoint`; return the model."""
        if self.file.suffix == ".npz" and hasattr(model, "load_pretrained") and self.file.is_file():
            load_npz(model, self.file)
        else:
            load_tensors(model, self.tensors(), self.file)
        for line in self.differences(model):
            logging.getLogger(__name__).warning(line)
        return model

    def start(self, model: nn.Module, classes: Sequence[str] | None = None) -> TakenWeights:
        """Load the weights into a new model, whose training starts from them, see `start_from`.

        The lines of `differences` are among those that it returns.
        """
        theirs = None
        if classes:
            theirs = self.classes
        taken = start_from(model, self.tensors(), self.title, classes, self.source, theirs)
        return taken._replace(changed=[*taken.changed, *self.differences(model)])

    def differences(self, model: nn.Module) -> list[str]:
        """Return a line for each way in which a model differs from the one of the weights, and that shapes do not show.

        model: has the weights.
        """
        lines = []
        trained = self.outline()
        if trained is not None:
            lines += other_heads(model, trained, self.source)
        if hasattr(model, "prediction"):
            lines += other_training(
                model, self.prediction, self.trained_arguments or {}, self.source
            )
        return lines


def find_weights(
    source: str | Path,
    name: str | None = None,
    prefer: str | None = None,
    *,
    wing: str | None = None,
    key: str = "",
) -> Weights:
    """Find weights, and read what they are of. No tensor is read: of a foreign file, its names and shapes when they are asked for.

    Args:
        source: a run, its checkpoint RUN/checkpoints/step_N, or a file in either; a folder that timm, diffusers or
            transformers has saved, such as publish writes; a file of weights; NAME or hf-hub:OWNER/NAME of a model whose
            weights timm fetches; local-dir:FOLDER.
        name: name of the model, for weights that do not say it.
        prefer: "ema" (the last weights, if there is no EMA), "model", "ema2" (the second EMA in a file of JiT's training
            script); None: the weights that the run's results are of, else as "ema".
        wing: "classification", "diffusion" or "text"; weights of another are refused. None: any.
        key: option or configuration key that gave the source, for messages.

    Raises:
        ValueError, FileNotFoundError: in one line, naming the source.
    """
    with said_with(key):
        found = _find(str(source), prefer)
    found = replace(found, key=key)
    if name:
        found = found.named(name)
    if wing:
        found.refuse_other(wing)
    return found


@contextlib.contextmanager
def said_with(key: str) -> Iterator[None]:
    """Begin the messages of a user's mistakes with a key, unless they do so already."""

    def with_key(error: Exception) -> str:
        text = str(error)
        if text.startswith(key):
            return text
        return f"{key} {text}"

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(with_key(error)) from None
    except OtherModel as error:
        raise OtherModel(with_key(error)) from None
    except ValueError as error:
        raise ValueError(with_key(error)) from None


def _find(source: str, prefer: str | None) -> Weights:
    path = Path(source.removeprefix("local-dir:"))
    if tensor_files(path):
        return _on_disk(source, path, prefer)
    return _published(source, prefer)


def _on_disk(source: str, path: Path, prefer: str | None) -> Weights:
    """`find_weights` for a path that exists."""
    form, settings = _form_of(path)
    _refuse_idle_choice(path, form, prefer)
    found = Weights(source=source, form=form, file=path, asked=prefer)
    if form == Form.TRANSFORMERS:
        return _of_transformers(found, str(settings.get("model_type")))
    if form in (Form.PIPELINE, Form.DIFFUSERS):
        config = _diffusers_config(path)
        found = _of_library(found, DIFFUSION.name, config, lambda: of_diffusers(config))
    elif form == Form.TIMM:
        local = f"local-dir:{path}"
        config = path / "config.json"
        found = _of_library(found, CLASSIFICATION.name, config, lambda: of_timm(local))
    found = replace(found, file=_file_of(path, prefer, form))
    if form in OF_ONE_KIND:
        return found
    if found.file.suffix == ".safetensors":
        metadata = read_metadata(found.file)
        if "architecture" in metadata:
            return _of_run(found, metadata)
    if form in OF_RUNS:
        raise ValueError(f"{found.file} was not written by a run (no architecture in its metadata)")
    return found


def _of_transformers(found: Weights, model_type: str) -> Weights:
    """Add to weights what a folder of transformers says; its weights may be in several files, which transformers reads."""
    file = found.path / "model.safetensors"
    metadata: dict = {}
    if file.is_file():
        metadata = read_metadata(file)
        found = replace(found, file=file)
    return replace(found, wing=TEXT.name, architecture=model_type, metadata=metadata)


def _refuse_idle_choice(path: Path, form: Form, prefer: str | None) -> None:
    """Refuse a choice between EMA and last weights of a source that holds one kind."""
    if prefer not in ("ema", "model"):
        return  # `weights_file` refuses other words, and knows who has a second EMA
    choice = f"weights {prefer}"
    if form in OF_ONE_KIND:
        raise ValueError(
            f"{path}: {choice} has no effect: it is {form}, which holds one kind of weights"
        )
    if path.suffix == ".safetensors" and path.stem == "ema" and prefer == "model":
        raise ValueError(
            f"{path}: {choice}: it holds the EMA; give its folder, or model.safetensors in it"
        )
    if path.suffix in (".safetensors", ".npz") and path.stem != prefer:
        raise ValueError(f"{path}: {choice} has no effect: it holds one kind of weights")


def _file_of(path: Path, prefer: str | None, form: Form) -> Path:
    """Call `weights_file`, and say of a folder without weights what else it lacks."""
    try:
        return weights_file(str(path), prefer)
    except FileNotFoundError as error:
        if form != Form.FOREIGN:
            raise
        problem = "nor is there a config.json of timm, diffusers or transformers"
        raise FileNotFoundError(f"{error}; {problem}") from None


def _form_of(path: Path) -> tuple[Form, dict]:
    """Return what an existing path is, and the settings in a folder's config.json, {} if there is none."""
    if not path.is_dir():
        return Form.FOREIGN, {}  # the metadata of a run's file say that it is one
    if (path / RUN_CONFIG).is_file():
        return Form.RUN, {}
    if step_of(path) is not None:
        return Form.CHECKPOINT, {}
    if (path / "model_index.json").is_file():
        return Form.PIPELINE, {}
    settings = read_settings(path / "config.json")
    if "model_type" in settings:
        return Form.TRANSFORMERS, settings
    if "_class_name" in settings or (path / "transformer" / "config.json").is_file():
        return Form.DIFFUSERS, settings
    if (path / "config.json").is_file():
        return Form.TIMM, settings
    return Form.FOREIGN, {}


def _diffusers_config(path: Path) -> Path:
    """Return the config.json of the transformer in a folder of diffusers."""
    direct = path / "config.json"
    if direct.is_file() and not (path / "model_index.json").is_file():
        return direct
    return path / "transformer" / "config.json"


def _of_library(
    found: Weights, wing: str, config: Path, describe: Callable[[], Described]
) -> Weights:
    """Add to weights what a library's config.json says: `describe` reads it."""
    try:
        described = describe()
    except Exception as error:  # foreign files may hold anything
        reason = reason_of(error)
        if isinstance(error, KeyError):
            reason = f"no {error} in it"
        raise ValueError(
            f"{config}: of no {WINGS[wing].title} model that is taken ({reason})"
        ) from None
    return replace(
        found,
        wing=wing,
        architecture=described.architecture,
        arguments=described.arguments,
        pretrained_cfg=described.pretrained_cfg,
    )


def _of_run(found: Weights, metadata: dict) -> Weights:
    """Add to weights the metadata of a run's file, after checking their types."""
    file = found.file
    name = metadata["architecture"]
    arguments = metadata.get("arguments")
    classes = metadata.get("classes", [])
    config = metadata.get("config", {})
    if not isinstance(name, str) or not isinstance(arguments, dict) or not isinstance(config, dict):
        raise ValueError(
            f"{file}: architecture, arguments and config in its metadata are not a name and two mappings"
        )
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"{file}: classes in its metadata are not a list of names")
    if "kind" in config and config["kind"] not in WINGS:
        raise ValueError(f"{file}: kind {config['kind']!r}: {closest(str(config['kind']), WINGS)}")
    if "vocabularies" in metadata:
        wing = TEXT.name
    else:
        wing = image_models().get(name.split(".")[0]) or config.get("kind")
    # Language models do not fetch: their `pretrained` names what a converted one began with.
    if wing != TEXT.name:
        refuse_fetch(arguments, f"the metadata of {file}")
    form = found.form
    if form not in OF_RUNS:
        form = Form.FILE
    return replace(
        found, form=form, wing=wing, architecture=name, arguments=arguments, metadata=metadata
    )


def _published(source: str, prefer: str | None) -> Weights:
    """`find_weights` for what is no path: the name of a model whose weights timm fetches."""
    base = source.split(".")[0]
    is_hub = source.startswith("hf-hub:")
    if not is_hub and not timm.is_model(base):
        refuse_missing_source("", source)
        problem = (
            "neither a run, a file of weights, a folder with a config.json, hf-hub:OWNER/NAME, nor the name of a model "
            f"registered with timm{near_model(source)}"
        )
        if source.count("/") == 1:
            problem += f"; of a model on the hub: hf download {source} --local-dir FOLDER"
        raise FileNotFoundError(f"{source}: {problem}")
    if prefer is not None:
        raise ValueError(f"{source}: weights {prefer} has no effect: timm fetches one kind")
    return Weights(
        source=source,
        form=Form.NAME,
        file=Path(source),
        wing=image_models().get(base, CLASSIFICATION.name),
        architecture=None if is_hub else source,
    )


def refuse_sizes(file: Path, state: dict[str, Tensor], arguments: dict) -> None:
    """Refuse numbers in a file's arguments that are too large for the file's tensors."""
    largest = max((tensor.numel() for tensor in state.values()), default=0)
    # Every layer has a tensor of its own; the position table bounds the patches of a side, here of up to 64 pixels.
    limits = {"depth": len(state), "depths": len(state), "img_size": 64 * math.isqrt(largest)}
    for key, number in _numbers(arguments):
        if not abs(number) <= limits.get(key, largest):  # also true for NaN
            size = f"the largest of its {len(state)} tensors has {largest} numbers"
            raise ValueError(f"{file}: {key} {number} of its model cannot be; {size}")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield (argument, number) for all numbers in arguments, nested ones too."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _numbers(v, k)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _numbers(v, key)
    elif isinstance(value, (int, float)):
        yield key, value


def load_checkpoint(model: nn.Module, path: str | Path, weights: str | None = None) -> nn.Module:
    """Load weights of any known layout, published or ours, into a model; return the model.

    Reads .safetensors, PyTorch's .pt, .pth and .bin (no pickled objects but tensors and argparse.Namespace),
    the original ViTs' .npz, and folders of a run, timm, diffusers model or pipeline. Layouts: ours, timm's ViTs,
    official TransNeXt, MoH-ViT, DiT and MoH-DiT, SiT (into a sit_*: the layout is the DiT's), JiT (into a jit_*), and
    diffusers' DiT (whose outputs are the same in a model with compat="diffusers"). With dense weights, routers that can start
    as plain attention do, see `Router.become_dense`. From weights with routers the model takes the shared heads, but keeps
    its number of active heads. What shapes do not show is a warning of `logging`: other numbers of heads, rotary positions,
    another prediction.

    Args:
        path: a file or folder as above.
        weights: see `find_weights`.
    """
    return find_weights(path, prefer=weights).into(model)

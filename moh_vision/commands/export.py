"""Write a model for other runtimes: ONNX, or torch.export's .pt2.

python -m moh_vision export RUN --format onnx --output model.onnx
python -m moh_vision export NAME --checkpoint FILE --format torch-export --output model.pt2

RUN: a run of train_cls.py or train_dit.py (its EMA, if any), a checkpoint or file of it, or a folder
saved by publish, timm or a pipeline. NAME: a registered model, with the weights of --checkpoint or
its published ones. The file is compared with the model on random inputs. If it differs, it is not
kept, and the exit code is 2.
"""

import contextlib
import io
import json
import logging
import shlex
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from moh_vision.attention import attention_layers, head_budget
from moh_vision.commands.predict import class_names
from moh_vision.common.cli import refuse_missing, refuse_output
from moh_vision.common.errors import reason_of
from moh_vision.common.io import fsync, give_name
from moh_vision.common.progress import say
from moh_vision.common.wings import TEXT
from moh_vision.engine.opened import Opened
from moh_vision.models.creation import name_problem
from moh_vision.models.fixed_heads import busiest, computed_groups, gather_heads, keep_heads
from moh_vision.models.head_budgets import set_head_budget
from moh_vision.models.head_load import HeadLoad
from moh_vision.models.weights import find_weights
from moh_vision.opening import open_weights, wing_of

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# Keys of timm's configuration that say how images are preprocessed.
PREPARED = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
TOLERANCE = 1e-4  # of the largest difference divided by the largest output; rounding in float32 gives about 1e-6
# Where two heads of a token tie, the exported file may choose the other head, by rounding. This is unlikely to happen
# again with other inputs.
TRIES = 2
RunFile = Callable[
    [dict[str, Tensor]], Tensor
]  # a function that runs a file: inputs by name -> output


class Classifier(nn.Module):
    """A classifier for export: images [B, C, h, w] -> logits [B, classes]."""

    output = "logits"

    def __init__(self, model: nn.Module, size: list[int]):
        super().__init__()
        self.model = model
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def draw(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        return dict(images=torch.randn(batch, *self.size, generator=generator))


class Denoiser(nn.Module):
    """A DiT for export: hidden_states [B, C, h, w], timestep [B] float, class_labels [B] int64 -> sample.

    It makes one forward pass, without guidance. Label num_classes means "no class".
    """

    output = "sample"

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, hidden_states: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        return self.model(hidden_states, timestep, class_labels, return_dict=False)[0]

    def draw(self, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
        config = self.model.config
        size = (batch, config.in_channels, config.sample_size, config.sample_size)
        return dict(
            hidden_states=torch.randn(size, generator=generator),
            timestep=torch.randint(1000, (batch,), generator=generator).float(),
            class_labels=torch.randint(config.num_classes + 1, (batch,), generator=generator),
        )


@torch.no_grad()
def export(
    module: nn.Module,
    file: Path,
    form: str,
    batch: int | None = None,
    metadata: dict | None = None,
) -> RunFile:
    """Write a module on the CPU; return a function that runs the file.

    Args:
        module: a `Classifier` or `Denoiser`.
        file: the new file.
        form: "onnx" or "torch-export".
        batch: the only batch size of the file; None: any.
        metadata: values by key, for an ONNX file's metadata_props or a .pt2's metadata.json. Strings are written as they
            are, other values as JSON.
    """
    # Not 1 where any batch size is allowed: torch.export takes a size of 1 for a constant.
    inputs = module.draw(batch or 2, torch.Generator().manual_seed(0))
    texts = {}
    for key, value in (metadata or {}).items():
        texts[key] = value if isinstance(value, str) else json.dumps(value)
    if form == "torch-export":
        return _export_program(module, inputs, file, batch is None, texts)
    return _export_onnx(module, inputs, file, batch is None, texts)


def _export_program(
    module: nn.Module,
    inputs: dict[str, Tensor],
    file: Path,
    any_batch: bool,
    metadata: dict[str, str],
) -> RunFile:
    """Write a .pt2 file, see `export`; return a function that runs the file.

    Args:
        module: see `export`.
        inputs: example arguments of the module, by name.
        file: the new file.
        any_batch: True: the file takes batches of any size; False: only batches of the size of `inputs`.
        metadata: texts for metadata.json.
    """
    dims = dict.fromkeys(inputs)
    if any_batch:
        dims = {name: {0: torch.export.Dim("batch", min=1)} for name in inputs}
    program = torch.export.export(module, (), inputs, dynamic_shapes=dims)
    torch.export.save(program, file, extra_files={"metadata.json": json.dumps(metadata)})
    loaded = torch.export.load(file).module()
    return lambda inputs: loaded(**inputs)


def _export_onnx(
    module: nn.Module,
    inputs: dict[str, Tensor],
    file: Path,
    any_batch: bool,
    metadata: dict[str, str],
) -> RunFile:
    """Write an ONNX file, with `metadata` in its metadata_props; see `_export_program`."""
    import onnxruntime

    dims = dict.fromkeys(inputs)
    if any_batch:
        dims = {name: {0: "batch"} for name in inputs}
    names = dict(input_names=list(inputs), output_names=[module.output])
    program = torch.onnx.export(module, kwargs=inputs, dynamic_shapes=dims, **names, verbose=False)
    program.model.metadata_props.update(metadata)
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # the properties contain paths of this machine
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, Tensor]) -> Tensor:
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        return torch.from_numpy(session.run(None, arrays)[0])

    return run


@torch.no_grad()
def cases_of(
    module: nn.Module, batch: int | None, seed: int
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return (inputs, output of the module) for batches of 1 and 3 random inputs, or for one batch of size `batch`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [batch] if batch else [1, 3]
    drawn = [module.draw(size, generator) for size in sizes]
    return [(inputs, module(**inputs)) for inputs in drawn]


def open_source(source: str, checkpoint: str | None) -> Opened:
    """Open what is exported.

    Args:
        source: a run, one of its files, a published folder, or the name of a registered model.
        checkpoint: weights for a registered model; None: its published ones.
    """
    path = Path(source)
    name = None
    if not path.exists():
        name = source
        problem = name_problem(name, None)
        if problem:
            raise ValueError(f"{source} is no file or folder, and {problem}")
    elif checkpoint:
        raise ValueError(f"--checkpoint {checkpoint} has no effect: {source} brings its weights")
    elif path.suffix in (".pt", ".pth", ".bin", ".npz"):
        raise ValueError(
            f"{source} does not say of which model it is: give NAME --checkpoint {shlex.quote(str(source))}"
        )
    weights = checkpoint or source
    found = find_weights(weights, name)
    if wing_of(found) == TEXT.name:
        raise ValueError(
            f"{weights} is a language model; allowed are classifiers and diffusion models"
        )
    return open_weights(found, command="export")


def fix_heads(model: nn.Module, file: str) -> None:
    """Keep in each layer, of K active heads, the K that ran most according to a head load file; remove the others."""
    option = f"--static-heads {file}"
    try:
        load = HeadLoad.read(Path(file))
    except ValueError as error:
        raise ValueError(f"--static-heads {error}") from None
    layers = attention_layers(model)
    # Routed MLPs are counted too: every image goes on to choose their groups.
    mlps = {row["name"] for row in head_budget(model).get("mlp", {}).get("layers", ())}
    of_attention = [n for n, layer in enumerate(load.layers) if layer["name"] not in mlps]
    counted = [(load.layers[n]["heads"], load.layers[n]["shared"]) for n in of_attention]
    of_model = [(layer.num_heads, layer.budget.shared) for layer in layers]
    if counted != of_model:
        raise ValueError(
            f"{option} counts (all, shared) heads {counted}; expected those of the model, {of_model}"
        )
    runs = load.runs()
    # The last column counts all tokens.
    counts = [runs[n][:, :-1].sum(0) for n in of_attention]
    kept = [
        busiest(count, layer.budget.shared, layer.budget.active)
        for count, layer in zip(counts, layers)
    ]
    try:
        keep_heads(model, kept)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def heads_text(model: nn.Module, heads: int, computed: int) -> str:
    """Return a line on how many heads an export computes.

    Args:
        model: the exported model.
        heads: number of heads before any were removed.
        computed: number of heads that the graph computes.
    """
    kept = sum(layer.num_heads for layer in attention_layers(model))
    if kept < heads:
        return f"heads: {kept} of {heads} are in the graph, the others left it with their weights"
    if computed < heads:
        return f"heads: the graph computes {computed} of {heads}, which each image chooses, and has the weights of all"
    text = f"heads: the graph computes all {heads} and skips none"
    active = head_budget(model)["active"]
    if active < heads:
        text += f": each token chooses its own {active}"
    return text


def groups_text(model: nn.Module) -> str:
    """Say in one line how many groups of routed MLPs an export computes; "" where the MLPs are dense."""
    computed, groups = computed_groups(model)
    if groups == 0:
        return ""
    text = f"groups of MLPs: the graph computes {computed} of {groups}"
    if computed < groups:
        text += ", which each image chooses, and has the weights of all"
    return text


def innermost(error: BaseException) -> BaseException:
    """Return the exception with which a chain of `raise ... from ...` began.

    torch's ONNX exporter wraps an error several times, in texts that say which step failed and not why.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@torch.no_grad()
def write(
    module: nn.Module,
    output: Path,
    form: str,
    batch: int | None,
    metadata: dict,
    cases: list[list],
) -> None:
    """Write a module to `output` if the file gives the outputs of one list in `cases`; else raise ValueError.

    Args:
        module, form, batch, metadata: see `export`.
        output: the new file.
        cases: lists of (inputs, expected output). Where the outputs of one list differ, the next list is tried.
    """
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        file = Path(folder) / output.name
        with contextlib.ExitStack() as quiet:  # hides torch's messages for developers
            quiet.enter_context(warnings.catch_warnings(action="ignore"))
            quiet.callback(
                logging.disable, logging.root.manager.disable
            )  # restores the present level
            logging.disable(logging.ERROR)
            # torch prints the whole graph there if it cannot be traced to its end.
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            try:
                run = export(module, file, form, batch, metadata)
            except Exception as error:  # torch and ONNX raise many kinds
                cause = innermost(error)
                raise ValueError(
                    f"{metadata['architecture']} cannot be exported: {type(cause).__name__}: {reason_of(cause)}"
                ) from None
        errors = []
        for batches in cases:
            errors_and_sizes = []
            for inputs, expected in batches:
                difference = (run(inputs) - expected).abs().max()
                errors_and_sizes.append((difference, expected.abs().max()))
            # amax returns NaN if there is one, and NaN fails the comparison below.
            error, largest = torch.tensor(errors_and_sizes).amax(0).tolist()
            errors.append(f"{error:.1e}")
            if error <= TOLERANCE * largest:
                break
        else:
            raise ValueError(
                f"{output} is not written: it differs from PyTorch by {error:.1e} where the largest output is {largest:.3g}; "
                f"allowed is {TOLERANCE:g} of it"
            )
        weights = [path for path in Path(folder).iterdir() if path != file]
        # Rename the file last: where it exists, its weights exist too.
        for path in (*weights, file):
            fsync(path)
            give_name(path, output.with_name(path.name))
    runtime = f"torch {torch.__version__}"
    if form == "onnx":
        runtime = f"onnxruntime {version('onnxruntime')}"
    tie = ""
    if len(errors) > 1:
        tie = f"; another input differed by {errors[0]}, as where two heads are at a tie"
    say(
        f"{runtime} differs from PyTorch by at most {errors[-1]} (largest output {largest:.3g}, float32){tie}"
    )


def options(add) -> None:
    add(
        "source",
        metavar="RUN|NAME",
        help="a run, one of its files, a published folder; or the name of a model",
    )
    add("--format", choices=sorted(SUFFIXES), required=True, help="what to write")
    add("--output", required=True, metavar="FILE", help="a new .onnx or .pt2 file")
    add(
        "--checkpoint",
        metavar="FILE",
        help="weights for NAME; left out: those it is published with",
    )
    add("--batch", type=int, metavar="N", help="the only batch the file takes; left out: any")
    add(
        "--head-budget",
        metavar="S",
        help="share of heads that run, such as 0.5; left out: the model's",
    )
    add("--mlp-budget", metavar="S", help="share of groups of routed MLPs, likewise")
    add(
        "--static-heads",
        metavar="FILE",
        help="a head_load.json: only the heads that ran most; other outputs",
    )


def work(options) -> None:
    form = options.format
    output = Path(options.output)
    if output.suffix != SUFFIXES[form]:
        raise ValueError(
            f"--output {output}: expected a name that ends in {SUFFIXES[form]} for --format {form}"
        )
    refuse_output(
        "--output", f"{output}.data"
    )  # where ONNX puts large weights; the command checks `output` itself
    if form == "onnx":
        for name in PACKAGES:
            import_module(name)  # a missing package fails before the work
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch {options.batch}: expected 1 or more")
    if options.static_heads:
        refuse_missing("--static-heads", options.static_heads)
    opened = open_source(options.source, options.checkpoint)
    model = opened.model
    metadata = {key: opened.metadata[key] for key in ("architecture", "classes")}
    if options.head_budget is not None or options.mlp_budget is not None:
        set_head_budget(model, options.head_budget, mlp=options.mlp_budget)
    heads = sum(layer.num_heads for layer in attention_layers(model))
    if options.static_heads:
        fix_heads(model, options.static_heads)
        metadata["heads"] = "fixed"
    if opened.kind == "classification":
        prepared = model.pretrained_cfg
        metadata["classes"] = class_names(metadata["classes"], model.num_classes)
        metadata.update({key: prepared[key] for key in PREPARED})
        module = Classifier(model, prepared["input_size"])
    else:
        metadata.update(
            path=model.prediction.path,
            output=model.prediction.output,
            learn_sigma=model.config.learn_sigma,
            noise_scale=model.prediction.noise_scale,
            null_label=model.config.num_classes,
        )
        module = Denoiser(model)
    cases = [cases_of(module, options.batch, seed) for seed in range(TRIES)]
    say(f"{opened.metadata['weights']} ({metadata['architecture']})")
    computed = gather_heads(model)  # changes the model
    say(heads_text(model, heads, computed))
    if text := groups_text(model):
        say(text)
    write(module, output, form, options.batch, metadata, cases)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{output}: {parameters:,} parameters, {output.stat().st_size:,} bytes")

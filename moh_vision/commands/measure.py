"""How much time a model saves on this machine when it skips heads.

    python -m moh_vision measure vit_base_patch16_224
    python -m moh_vision measure vit_base_patch16_224 --img-size 1024 --batch-size 1 --shares 0.5
    python -m moh_vision measure dit_small_patch2 --groups
    python -m moh_vision measure vit_small_patch16_224 --training --mixed-precision bf16

NAME: a dense ViT of timm that moh_vision.convert takes, or a dense DiT, SiT or JiT. It is timed with random
weights, then converted to each share of its heads: a ViT's are chosen for every token, a DiT's by the
timestep, which sampling has in common for all images. With --groups as large a share of the groups of every
MLP runs too, and a ViT chooses for every image. A GPU is taken where there is one. All models take turns;
printed are medians and, in brackets, quartiles over the rounds, and in how many kinds of calls heads or
groups are skipped, because that was measured to be faster.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import timm
import torch
from torch import Tensor, nn

from moh_vision.attention import model_budgets
from moh_vision.attention.executors.measurement_table import current_table, device_name
from moh_vision.attention.measure import collect, rows_of_calls
from moh_vision.attention.routed_layer import routed_layers
from moh_vision.commands.timing import Timed, take_turns
from moh_vision.common.errors import nearest
from moh_vision.common.progress import say
from moh_vision.common.wings import DIFFUSION
from moh_vision.models.convert import convert
from moh_vision.models.creation import image_models
from moh_vision.models.describe import aligned
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel

SHARES = (0.75, 0.5)
ROUNDS = 15
PATIENCE = 60.0  # seconds that finding the calls in which skipping pays may take
LOGITS = 1.5  # standard deviation of a new router's logits
PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def options(add) -> None:
    add("name", metavar="NAME", help="a dense model in timm's registry")
    add(
        "--shares",
        nargs="+",
        type=float,
        default=SHARES,
        metavar="S",
        help="of active heads, the same in all layers (0.75 0.5)",
    )
    add("--groups", action="store_true", help="also as large a share of every MLP's groups")
    add("--training", action="store_true", help="time forward and backward, not forward alone")
    add("--batch-size", type=int, default=8, metavar="N", help="images (%(default)s)")
    add("--img-size", type=int, metavar="PIXELS", help="side of an image or of a latent")
    add("--mixed-precision", choices=PRECISIONS, default="no", help="autocast (%(default)s)")
    add("--rounds", type=int, default=ROUNDS, metavar="N", help="of timing (%(default)s)")


def work(options) -> None:
    for key in ("batch_size", "rounds", "img_size"):
        value = getattr(options, key)
        if value is not None and value < 1:
            raise ValueError(f"--{key.replace('_', '-')} {value}: expected 1 or more")
    for share in options.shares:
        if not 0 < share < 1:
            raise ValueError(f"--shares {share:g}: expected above 0 and below 1")
    models = models_of(options.name, options.shares, options.groups, options.img_size)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    for row in timed_rows(models, device, options):
        say(row)


def models_of(name: str, shares, groups: bool, img_size: int | None) -> dict[str, nn.Module]:
    """Make a dense model and its conversions: {what its row says: model}; ValueError if there can be none."""
    arguments = {} if img_size is None else dict(img_size=img_size)
    if not timm.is_model(name):
        problem = f"{name} is not a model in timm's registry"
        near = nearest(name, timm.list_models(), 3)
        if near:
            problem += f", did you mean {' or '.join(near)}?"
        raise ValueError(problem)
    is_dit = image_models().get(name.split(".")[0]) == DIFFUSION.name
    if is_dit:
        arguments |= dict(scope="sample", route_by="timestep")
    try:
        dense = timm.create_model(name, **arguments)
        convert(deepcopy(dense))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    # A choice of groups is one of an image.
    scope = "sample" if is_dit or groups else "token"
    models = {"dense model": dense}
    for share in shares:
        budget = f"uniform:{share:g}"
        mlp_budget = budget if groups else None
        try:
            converted = convert(
                deepcopy(dense), head_budget=budget, scope=scope, mlp_budget=mlp_budget
            )
        except ValueError as error:
            raise ValueError(f"--shares {share:g}: {error}") from None
        for layer in routed_layers(converted):
            draw_weights(layer.router)
        # Whole heads run: two shares may be one, which is timed once.
        models[str(model_budgets(converted))] = converted
    return models


def draw_weights(module: nn.Module) -> None:
    """Draw a new router's weights, which are zero, so that all tokens would take the same heads."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=LOGITS * parameter.shape[-1] ** -0.5)


def inputs_of(model: nn.Module, batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw the arguments of a model's forward.

    A DiT gets them as a sampler gives them, with one timestep for all images; in training mode each image has its own.
    """
    if isinstance(model, MoHDiTTransformer2DModel):
        config = model.config
        size = (batch, config.in_channels, config.sample_size, config.sample_size)
        latents = torch.randn(size, device=device)
        labels = torch.arange(batch, device=device) % config.num_classes
        timesteps = torch.tensor([500], device=device)
        if model.training:
            timesteps = torch.randint(1000, (batch,), device=device)
        return latents, timesteps, labels
    channels, *sides = model.pretrained_cfg["input_size"]
    if hasattr(model, "patch_embed"):
        sides = model.patch_embed.img_size
    return (torch.randn(batch, channels, *sides, device=device),)


def pass_of(model: nn.Module, inputs: tuple[Tensor, ...], options) -> Callable[[], None]:
    """Return a function that runs a model once, in training mode with gradients also backward."""
    dtype = PRECISIONS[options.mixed_precision]
    weights = [p for p in model.parameters() if p.requires_grad]

    def run() -> None:
        with torch.autocast(inputs[0].device.type, dtype, enabled=dtype != torch.float32):
            output = model(*inputs)
        if model.training and torch.is_grad_enabled():
            output = getattr(output, "sample", output)
            torch.autograd.grad(output.float().square().mean(), weights, allow_unused=True)

    return run


@contextmanager
def sizes_that_fit(options) -> Iterator[None]:
    """Name the sizes, in a ValueError, where a model cannot take images of this size, or so many."""
    try:
        yield
    except RuntimeError as error:  # also what an allocator raises
        sizes = f"--batch-size {options.batch_size}"
        if options.img_size:
            sizes = f"--img-size {options.img_size}, {sizes}"
        raise ValueError(f"{options.name} with {sizes}: {error}") from None


def timed_rows(models: dict[str, nn.Module], device: torch.device, options) -> list[str]:
    """Time the models; return the lines of the table."""
    timed = []
    skipping = []
    context = nullcontext if options.training else torch.no_grad
    for model in models.values():
        model.to(device).train(options.training)
        with sizes_that_fit(options), context():
            inputs = inputs_of(model, options.batch_size, device)
            run = pass_of(model, inputs, options)
            if not timed:  # the dense model
                run()
        skipping.append("")
        if routed_layers(model):
            calls: dict = {}
            collect(calls, model, run, training=options.training)
            rows = rows_of_calls(calls, PATIENCE)
            current_table().add(rows)
            skips = sum(row.taken != "Masked" for row in rows)
            skipping[-1] = f"{skips} of {len(calls)}"
            if not calls:
                skipping[-1] = "not measured"
        timed.append(Timed([], run, context))
    take_turns(timed, options.rounds)
    size = "x".join(map(str, inputs[0].shape))
    mode = "forward and backward" if options.training else "forward"
    precision = "float32" if options.mixed_precision == "no" else options.mixed_precision
    title = f"{options.name}, {mode}, {size}, {precision}, {device_name(device)}"
    rows = [("", "ms", "", "over dense", "calls that skip")]
    dense = timed[0].milliseconds[1]
    for name, (milliseconds, *_), skips in zip(models, timed, skipping):
        low, middle, high = milliseconds
        quartiles = f"[{low:.4g} {high:.4g}]"
        rows.append((name, f"{middle:.4g}", quartiles, f"{middle / dense:.2f}", skips))
    return [title, *aligned(rows)]

"""Time of whole models with routed heads against their dense twins, in one interleaved run.

    python benchmarks/models.py                                   # about half an hour on 2 cores
    python benchmarks/models.py --parts sampling --batches 1      # one image at a time
    python benchmarks/models.py --parts groups_small groups_base groups_small_train groups_base_train --output groups.json
    python benchmarks/models.py --table                           # Markdown, from the results that are there

    vit_small, vit_base   timm's vit_base_patch16_224 and moh_vit_base_patch16_224, likewise small: forward, and forward and backward of a training
                 step (the optimiser costs both the same and is left out)
    dit_small    dit_small_patch2 and moh_dit_small_patch2_75, 32 x 32 latents: likewise
    dit_base     dit_base_patch2 and moh_dit_base_patch2_75, likewise; both sizes also guided: 10 steps of DDIM with classifier-free guidance
    transnext    transnext_small and moh_transnext_small_75: forward, and forward and backward
    sampling     the small DiT, 50 steps of DDIM without guidance, heads chosen for every token, for every image by timestep and
                 class ("condition"), or by the timestep alone, so that a step computes the same heads for all images
    groups_small, groups_base   the small and the base DiT, 50 steps of DDIM without guidance: half of the heads by timestep, and half of
                 the heads and of every MLP's groups by timestep ("with groups"); goal 0.62
    groups_small_train, groups_base_train   likewise by timestep and class: forward and backward of a training step; goal 0.80
    converted    vit_base_patch16_224 at 1024 pixels (4096 patches) and copies of it after moh_vision.convert: forward

Parts run alone overwrite --output, so give one. The figure behind a name is the share of heads: the same in all layers of a ViT, the released ones of a DiT and a TransNeXt at 0.75.
`released` are the heads of 0.75 by the released operations: all heads, then gates that are zero. Weights are random. Every round times all models in a random order, so that a noisy machine hits all alike; reported are the
medians and quartiles of the ratio to dense, round by round. `bound` is the ratio of the multiplications if what
a head needs is skipped and nothing else costs time. Results go to benchmarks/results/models.json.
"""

import itertools
import json
import sys
from copy import deepcopy
from functools import partial

import timm
import torch
from attention import ReleasedRouter, draw_router
from timing import (
    PATHS,
    about_machine,
    cell,
    interleaved,
    markdown,
    new_report,
    parser_of,
    to_base,
    use_path,
    write_report,
)
from torch import nn
from torch.nn import functional as F

import moh_vision
from moh_vision.attention.routed_layer import routed_layers
from moh_vision.classification.task import ClassificationTask
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.models.counts import count_macs
from moh_vision.models.foveal_attention import (
    WINDOW,
    AggregatedAttention,
    AggregatedHeads,
    CosineAttention,
)

SHARES = (0.75, 0.5)
STEPS = 50  # of a sampling run
GUIDED_STEPS = 10
GUIDANCE = 4.0
SECONDS = 20.0  # of a case; sampling runs all its steps
ROUNDS = (5, 15)  # at least and at most
SIZES = {  # further arguments of the models
    "vit_small": {},
    "vit_base": {},
    "dit_small": {},
    "dit_base": {},
    "transnext": {},
    "converted": dict(img_size=1024),
}
WITH_GROUPS = "with groups"  # ends the names of models whose MLPs run groups
# part -> the time over the dense model that models with groups shall reach
GOALS = {
    "groups_small": 0.62,
    "groups_base": 0.62,
    "groups_small_train": 0.80,
    "groups_base_train": 0.80,
}
DTYPES = ("float32", "bfloat16")  # bfloat16: autocast


def vit(name, head_budget=None):
    """Make a ViT; without a budget timm's."""
    if head_budget is None:
        return timm.create_model(f"{name}_patch16_224", **SIZES[name])
    return timm.create_model(f"moh_{name}_patch16_224", head_budget=head_budget, **SIZES[name])


def dit(head_budget=None, name="dit_small", **arguments):
    """Make a DiT: without a budget the dense one, with 0.75 the heads of the released one."""
    if head_budget is None:
        model = timm.create_model(f"{name}_patch2", **SIZES[name])
    else:
        if head_budget != 0.75:
            arguments["head_budget"] = head_budget
        model = timm.create_model(f"moh_{name}_patch2_75", **arguments, **SIZES[name])
    # A new DiT is the identity, and its routers see no difference between tokens.
    for block in [*model.blocks, model.final_layer]:
        nn.init.normal_(block.adaLN_modulation[1].weight, std=0.02)
    return model


def vits(name):
    models = {"dense": vit(name)}
    for head_share in SHARES:
        models[f"token {head_share}"] = vit(name, f"uniform:{head_share}")
    return models


def dits(name="dit_small"):
    models = {"dense": dit(name=name)}
    for head_share in SHARES:
        models[f"token {head_share}"] = dit(head_share, name)
    models["released"] = released(models["token 0.75"])
    return models


def transnexts():
    sizes = SIZES["transnext"]
    ours = timm.create_model("moh_transnext_small_75", **sizes)
    return {
        "dense": timm.create_model("transnext_small", **sizes),
        "token 0.75": ours,
        "released": released(ours),
    }


class UnfoldedHeads(AggregatedHeads):
    """The window as the released code reads it: keys and values unfolded nine-fold (Shi 2024, eq. 3 to 8)."""

    def attend(self, q, k, v):
        layer = self.layer
        H, W = self.size
        B, h, N, D = q.shape

        def unfolded(tensor):  # [B, h, N, D] -> [B, h, N, D, 9]
            image = tensor.transpose(2, 3).reshape(B, h * D, H, W)
            windows = F.unfold(image, 3, padding=1).view(B, h, D, WINDOW, N)
            return windows.permute(0, 1, 4, 2, 3)

        k = unfolded(k)
        v = unfolded(v)
        scaled = layer.scaled(q, self.positions.length)
        near = (scaled.unsqueeze(3) @ k).squeeze(3)  # [B, h, N, 9]
        near = near + layer.relative_pos_bias_local.unsqueeze(1)
        near = near.masked_fill(self.positions.outside, -float("inf"))
        k_pool, v_pool = layer.pooled(self.call.x.unflatten(1, (H, W)))
        k_pool = k_pool.transpose(1, 2)  # [B, h, P, D]
        v_pool = v_pool.transpose(1, 2)
        far = scaled @ k_pool.transpose(2, 3) + layer.position_bias(self.positions).transpose(1, 2)
        near, far = torch.cat([near, far], 3).softmax(3).split([WINDOW, far.shape[3]], 3)
        near = near + q @ layer.learnable_tokens + layer.learnable_bias
        return (near.unsqueeze(3) @ v.transpose(3, 4)).squeeze(3) + far @ v_pool


def released(model):
    """Copy a model; the copy computes every head by the operations of the released code."""
    model = deepcopy(model)
    for layer in routed_layers(model):
        layer.executor = "masked"
        if layer.budget.candidates:  # else all heads are shared, and run
            layer.router = ReleasedRouter(layer.router)
        # For cosine attention the released code computes the attention matrix itself.
        layer.fused_attn = not isinstance(layer, CosineAttention)
        if isinstance(layer, AggregatedAttention):
            layer.unfused_executor = UnfoldedHeads
    return model


def dits_that_sample():
    models = dits()
    del models["released"]
    for read in ("condition", "timestep"):
        for head_share in SHARES:
            models[f"{read} {head_share}"] = dit(head_share, scope="sample", route_by=read)
    return models


def dits_with_groups(name, read):
    """Make a dense DiT, and two at half of their heads, one of them at half of its MLPs' groups too, chosen by what `read` says."""
    half = dict(head_budget=0.5, name=name, scope="sample", route_by=read)
    return {
        "dense": dit(name=name),
        f"{read} 0.5": dit(**half),
        f"{read} 0.5 {WITH_GROUPS}": dit(**half, mlp_budget=0.5),
    }


def converted():
    dense = timm.create_model("vit_base_patch16_224", **SIZES["converted"])
    models = {"dense": dense}
    for head_share in SHARES:
        budget = f"uniform:{head_share}"
        models[f"token {head_share}"] = moh_vision.convert(deepcopy(dense), head_budget=budget)
    return models


# part -> function that makes {name: model}, modes, batches
PARTS = {
    "vit_base": (partial(vits, "vit_base"), ("forward", "train"), (8,)),
    "vit_small": (partial(vits, "vit_small"), ("forward",), (1, 8)),
    "dit_small": (dits, ("forward", "train", "guided"), (8,)),
    "dit_base": (partial(dits, "dit_base"), ("train", "guided"), (4,)),
    "transnext": (transnexts, ("forward", "train"), (2,)),
    "sampling": (dits_that_sample, ("denoise",), (1, 4, 8)),
    "groups_small": (partial(dits_with_groups, "dit_small", "timestep"), ("denoise",), (8,)),
    "groups_base": (partial(dits_with_groups, "dit_base", "timestep"), ("denoise",), (8,)),
    "groups_small_train": (partial(dits_with_groups, "dit_small", "condition"), ("train",), (8,)),
    "groups_base_train": (partial(dits_with_groups, "dit_base", "condition"), ("train",), (4,)),
    "converted": (converted, ("forward",), (1,)),
}


def is_dit(model):
    return hasattr(model, "final_layer")


def share(model):
    """Return the share of heads, and of groups of routed MLPs, that a model runs."""
    layers = routed_layers(model)
    if not layers:
        return 1.0
    active = sum(layer.budget.active for layer in layers)
    return active / sum(layer.num_heads for layer in layers)


def inputs(model, batch, pixels, device="cpu"):
    """Draw inputs of a training step, as the tasks take them; pixels: side of an image, where it is no DiT."""
    if not is_dit(model):
        images = torch.randn(batch, 3, pixels, pixels, device=device)
        return dict(images=images, labels=torch.randint(model.num_classes, (batch,), device=device))
    config = model.config
    size = (config.in_channels, config.sample_size, config.sample_size)
    images, noise = torch.randn(2, batch, *size, device=device)
    labels = torch.randint(config.num_classes, (batch,), device=device)
    timesteps = torch.randint(1000, (batch,), device=device)
    return dict(images=images, noise=noise, labels=labels, timesteps=timesteps)


def task(model):
    """Return what training calls: inputs -> dict with the loss."""
    if is_dit(model):
        from moh_vision.diffusion import HybridLoss  # needs diffusers

        return DiffusionTask(model, 0.01, HybridLoss()).to(next(model.parameters()).device)
    if hasattr(model, "forward_routed"):
        return ClassificationTask(model, 0.01, 0.1)

    def dense(images, labels):  # timm's own
        return dict(loss=F.cross_entropy(model(images).float(), labels, label_smoothing=0.1))

    return dense


def arguments(model, batch, pixels):
    """Draw the arguments of a model's forward."""
    given = inputs(model, batch, pixels)
    if is_dit(model):
        return given["images"], given["timesteps"], given["labels"]
    return (given["images"],)


def bound(model, pixels):
    """Return the multiplications that the active heads need, over those of all heads."""
    macs = count_macs(model, *arguments(model, 1, pixels))
    return macs.ideal / macs.dense


def forward_step(model, batch, pixels):
    call = arguments(model.eval(), batch, pixels)
    return torch.no_grad()(lambda: model(*call))


def training_step(model, batch, pixels):
    given = inputs(model.train(), batch, pixels)
    losses = task(model)

    def step():
        model.zero_grad()
        losses(**given)["loss"].backward()

    return step


def denoising_step(model, batch, _, guided=False):
    from moh_vision.diffusion import make_scheduler  # needs diffusers

    model.eval()
    config = model.config
    channels = config.in_channels
    size = (batch, channels, config.sample_size, config.sample_size)
    steps = GUIDED_STEPS if guided else STEPS
    scheduler = make_scheduler("ddim", steps, True, clip=True)
    labels = torch.arange(batch) % config.num_classes
    copies = 1  # of each latent in a batch of the model
    if guided:
        copies = 2
        no_class = torch.full_like(labels, config.num_classes)
        labels = torch.cat([labels, no_class])
    number = 0
    x = None

    @torch.no_grad()
    def step():
        nonlocal number, x
        if number % steps == 0:
            x = torch.randn(size, generator=torch.Generator().manual_seed(0))
        t = scheduler.timesteps[number % steps]
        # One number for the batch, as the samplers give it: with route_by="timestep" one choice for all images.
        predicted = model(x.repeat(copies, 1, 1, 1), t.reshape(1), labels).sample
        noise = predicted[:, :channels].float()
        if guided:
            by_class, without = noise.chunk(2)
            noise = without + GUIDANCE * (by_class - without)
        x = scheduler.step(noise, t, x).prev_sample
        number += 1

    return step


MODES = {
    "forward": forward_step,
    "train": training_step,
    "denoise": denoising_step,
    "guided": partial(denoising_step, guided=True),
}


def under(dtype, step):
    """Return the step under autocast, unless in float32."""
    if dtype == "float32":
        return step
    return torch.autocast("cpu", torch.bfloat16)(step)


def measure(models, mode, batch, pixels, dtype):
    """Time steps of models in turn.

    Args:
        models: {name: model}.
        mode: a key of MODES.
        batch: its size.
        pixels: side of an image; a DiT has its own.
        dtype: "float32" or "bfloat16".

    Returns:
        {name: a row of `to_base`, with share and bound}.
    """
    steps = {}
    for name, model in models.items():
        steps[name] = under(dtype, MODES[mode](model, batch, pixels))
    if mode == "denoise":
        times = interleaved(steps, STEPS, warm_up=1)
    elif mode == "guided":
        times = interleaved(steps, GUIDED_STEPS, warm_up=1)
    else:
        times = interleaved(steps, ROUNDS, SECONDS)
    rows = to_base(times)
    for name, model in models.items():
        least = 1.0  # the released operations compute all heads
        if name != "released":
            least = bound(model, pixels)
        rows[name].update(share=round(share(model), 3), bound=round(least, 3))
    return rows


def tables(report):
    """Write the median times over dense: a row for each case, a column for each model; cases with groups have their own table."""
    of_heads = [case for case in report["cases"] if case["part"] not in GOALS]
    of_groups = [case for case in report["cases"] if case["part"] in GOALS]
    written = []
    if of_heads:
        written.append(table(of_heads))
    if of_groups:
        written.append(table(of_groups, goals=True))
    return f"{about_machine(report)}\n\n" + "\n".join(written)


def table(cases, goals=False):
    """Write the table of some cases; `goals`: with a column of GOALS."""
    names = dict.fromkeys(name for case in cases for name in case["times"])
    names.pop("dense", None)
    columns = ["model, mode", "batch", "dtype", *names]
    if goals:
        columns.append(f"goal, {WITH_GROUPS}")
    rows = []
    for case in cases:
        row = [f"{case['part']}, {case['mode']}", str(case["batch"]), case["dtype"]]
        for name in names:
            ratio = ""
            if name in case["times"]:
                ratio = f"{case['times'][name]['ratio']:.2f}"
            row.append(ratio)
        if goals:
            row.append(f"{GOALS[case['part']]:.2f}")
        rows.append(row)
    return markdown(columns, rows)


def verdict(part, name, ratio):
    """Return what a line of a model says of its goal; "" where it has none."""
    if part not in GOALS or not name.endswith(WITH_GROUPS):
        return ""
    word = "missed"
    if ratio <= GOALS[part]:
        word = "reached"
    return f", goal {GOALS[part]:.2f} {word}"


def main():
    parser = parser_of(__doc__, "models")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--batches", nargs="+", type=int, help="default: those of the part")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=DTYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--path", choices=PATHS, help="operators; default: what a user gets")
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(args.output.read_text())), end="")
        return

    torch.set_num_threads(args.threads)
    report = new_report(path=use_path(args.path), cases=[])
    for part in args.parts:
        make, modes, batches = PARTS[part]
        pixels = SIZES.get(part, {}).get("img_size", 224)
        torch.manual_seed(0)
        models = make()
        for layer in itertools.chain(*map(routed_layers, models.values())):
            draw_router(layer.router)
        chosen = [mode for mode in modes if mode in args.modes]
        for mode, batch, dtype in itertools.product(chosen, args.batches or batches, args.dtypes):
            about = dict(part=part, mode=mode, batch=batch, dtype=dtype, threads=args.threads)
            rows = measure(models, mode, batch, pixels, dtype)
            report["cases"].append(dict(about, times=rows))
            print(*about.values())
            for name, row in rows.items():
                ratio = cell(row["ratio"], row["quartiles"])
                goal = verdict(part, name, row["ratio"])
                print(f"    {name:27}{ratio}, bound {row['bound']:.2f}{goal}", flush=True)
    write_report(args.output, report)


if __name__ == "__main__":
    sys.exit(main())

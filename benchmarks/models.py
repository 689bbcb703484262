"""Time of whole models with routed heads against their dense twins, in one interleaved run.

    python benchmarks/models.py                                   # about 10 minutes on 2 cores
    python benchmarks/models.py --parts sampling --batches 1      # one image at a time
    python benchmarks/models.py --table                           # Markdown, from the results that are there

    vit_small, vit_base   timm's vit_base_patch16_224 and moh_vit_base_patch16_224, likewise small: forward, and forward and backward of a training
                 step (the optimiser costs both the same and is left out)
    dit_small    dit_small_patch2 and moh_dit_small_patch2_75, 32 x 32 latents: likewise
    dit_base     dit_base_patch2 and moh_dit_base_patch2_75, likewise; both sizes also guided: 10 steps of DDIM with classifier-free guidance
    transnext    transnext_small and moh_transnext_small_75: forward, and forward and backward
    sampling     the small DiT, 50 steps of DDIM without guidance, heads chosen for every token, for every image by timestep and
                 class ("condition"), or by the timestep alone, so that a step computes the same heads for all images
    converted    vit_base_patch16_224 at 1024 pixels (4096 patches) and copies of it after moh_vision.convert: forward

The figure behind a name is the share of heads: the same in all layers of a ViT, the released ones of a DiT and a TransNeXt at 0.75.
`released` are the heads of 0.75 by the released operations: all heads, then gates that are zero. Weights are random. Every round times all models in a random order, so that a noisy machine hits all alike; reported are the
medians and quartiles of the ratio to dense, round by round. `bound` is the ratio of the multiplications if what
a head needs is skipped and nothing else costs time. Results go to benchmarks/results/models.json.
"""

import itertools
import json
import sys
from contextlib import nullcontext
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
from moh_vision.attention import HeadMixtureAttention
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
STEPS, GUIDED_STEPS, GUIDANCE = 50, 10, 4.0  # of a sampling run
SECONDS, ROUNDS = 20.0, (5, 15)  # per case; at least and at most; sampling runs all its steps
SIZES = {
    "vit_small": {},
    "vit_base": {},
    "dit_small": {},
    "dit_base": {},
    "transnext": {},
    "converted": dict(img_size=1024),
}  # further arguments of the models
DTYPES = ("float32", "bfloat16")  # bfloat16: autocast


def vit(name, head_budget=None):
    if head_budget is None:
        return timm.create_model(f"{name}_patch16_224", **SIZES[name])
    return timm.create_model(f"moh_{name}_patch16_224", head_budget=head_budget, **SIZES[name])


def dit(head_budget=None, name="dit_small", **scope):
    """head_budget 0.75: as released."""
    if head_budget is None:
        model = timm.create_model(f"{name}_patch2", **SIZES[name])
    else:
        budget = {} if head_budget == 0.75 else dict(head_budget=head_budget)
        model = timm.create_model(f"moh_{name}_patch2_75", **budget, **scope, **SIZES[name])
    for block in [
        *model.blocks,
        model.final_layer,
    ]:  # a new DiT is the identity, whose routers see no difference
        nn.init.normal_(block.adaLN_modulation[1].weight, std=0.02)
    return model


def vits(name):
    return {"dense": vit(name), **{f"token {s}": vit(name, f"uniform:{s}") for s in SHARES}}


def dits(name="dit_small"):
    models = {"dense": dit(name=name), **{f"token {s}": dit(s, name) for s in SHARES}}
    return dict(models, released=released(models["token 0.75"]))


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
        layer, (H, W), (B, h, N, D) = self.layer, self.size, q.shape
        maps = (t.transpose(2, 3).reshape(B, h * D, H, W) for t in (k, v))
        k, v = (
            F.unfold(t, 3, padding=1).view(B, h, D, WINDOW, N).permute(0, 1, 4, 2, 3) for t in maps
        )
        scaled = layer.scaled(q, self.positions.length)
        near = (scaled.unsqueeze(3) @ k).squeeze(3) + layer.relative_pos_bias_local.unsqueeze(
            1
        )  # [B, h, N, 9]
        near = near.masked_fill(self.positions.outside, -float("inf"))
        k_pool, v_pool = (
            t.transpose(1, 2) for t in layer.pooled(self.call.x.unflatten(1, (H, W)))
        )  # [B, h, P, D]
        far = scaled @ k_pool.transpose(2, 3) + layer.position_bias(self.positions).transpose(1, 2)
        near, far = torch.cat([near, far], 3).softmax(3).split([WINDOW, far.shape[3]], 3)
        near = near + q @ layer.learnable_tokens + layer.learnable_bias
        return (near.unsqueeze(3) @ v.transpose(3, 4)).squeeze(3) + far @ v_pool


def released(model):
    """A copy that computes every head by the operations of the released code."""
    model = deepcopy(model)
    for layer in routed(model):
        layer.executor = "masked"
        if layer.budget.candidates:  # else all heads are shared, and run
            layer.router = ReleasedRouter(layer.router)
        layer.fused_attn = not isinstance(
            layer, CosineAttention
        )  # in whose release the matrix is made
        if isinstance(layer, AggregatedAttention):
            layer.unfused_executor = UnfoldedHeads
    return model


def dits_that_sample():
    models = dits()
    del models["released"]
    for by in ("condition", "timestep"):
        models.update({f"{by} {s}": dit(s, scope="sample", route_by=by) for s in SHARES})
    return models


def converted():
    dense = timm.create_model("vit_base_patch16_224", **SIZES["converted"])
    copies = {
        f"token {s}": moh_vision.convert(deepcopy(dense), head_budget=f"uniform:{s}")
        for s in SHARES
    }
    return {"dense": dense, **copies}


# part -> function that makes {name: model}, modes, batches
PARTS = {
    "vit_base": (partial(vits, "vit_base"), ("forward", "train"), (8,)),
    "vit_small": (partial(vits, "vit_small"), ("forward",), (1, 8)),
    "dit_small": (dits, ("forward", "train", "guided"), (8,)),
    "dit_base": (partial(dits, "dit_base"), ("train", "guided"), (4,)),
    "transnext": (transnexts, ("forward", "train"), (2,)),
    "sampling": (dits_that_sample, ("denoise",), (1, 4, 8)),
    "converted": (converted, ("forward",), (1,)),
}


def is_dit(model):
    return hasattr(model, "final_layer")


def routed(model):
    """Its attention layers that are ours; none in timm's models."""
    return [module for module in model.modules() if isinstance(module, HeadMixtureAttention)]


def share(model):
    layers = routed(model)
    return (
        sum(a.budget.active for a in layers) / sum(a.num_heads for a in layers) if layers else 1.0
    )


def inputs(model, batch, pixels, device="cpu"):
    """Random inputs of a training step, as the tasks take them; pixels: side of an image, where it is no DiT."""
    if not is_dit(model):
        images = torch.randn(batch, 3, pixels, pixels, device=device)
        return dict(images=images, labels=torch.randint(model.num_classes, (batch,), device=device))
    size, channels, classes = (
        model.config.sample_size,
        model.config.in_channels,
        model.config.num_classes,
    )
    images, noise = torch.randn(2, batch, channels, size, size, device=device)
    labels, timesteps = (torch.randint(n, (batch,), device=device) for n in (classes, 1000))
    return dict(images=images, noise=noise, labels=labels, timesteps=timesteps)


def task(model):
    """What training calls: inputs -> dict with the loss."""
    if is_dit(model):
        from moh_vision.diffusion import HybridLoss  # needs diffusers

        return DiffusionTask(model, 0.01, HybridLoss()).to(next(model.parameters()).device)
    if hasattr(model, "forward_routed"):
        return ClassificationTask(model, 0.01, 0.1)

    def dense(images, labels):  # timm's own
        return dict(loss=F.cross_entropy(model(images).float(), labels, label_smoothing=0.1))

    return dense


def arguments(model, batch, pixels):
    """Of its forward."""
    given = inputs(model, batch, pixels)
    return (
        (given["images"], given["timesteps"], given["labels"])
        if is_dit(model)
        else (given["images"],)
    )


def bound(model, pixels):
    """Multiplications that the active heads need, over those of all heads."""
    macs = count_macs(model, *arguments(model, 1, pixels))
    return macs.ideal / macs.dense


def forward_step(model, batch, pixels):
    call = arguments(model.eval(), batch, pixels)
    return torch.no_grad()(lambda: model(*call))


def training_step(model, batch, pixels):
    given, losses = inputs(model.train(), batch, pixels), task(model)

    def step():
        model.zero_grad()
        losses(**given)["loss"].backward()

    return step


def denoising_step(model, batch, _, guided=False):
    from moh_vision.diffusion import make_scheduler  # needs diffusers

    size, channels = model.eval().config.sample_size, model.config.in_channels
    steps = GUIDED_STEPS if guided else STEPS
    scheduler = make_scheduler("ddim", steps, True, clip=True)
    labels = torch.arange(batch) % model.config.num_classes
    if guided:
        labels = torch.cat(
            [labels, torch.full_like(labels, model.config.num_classes)]
        )  # of no class
    state = dict(number=0)

    @torch.no_grad()
    def step():
        if state["number"] % steps == 0:
            state["x"] = torch.randn(
                batch, channels, size, size, generator=torch.Generator().manual_seed(0)
            )
        t = scheduler.timesteps[state["number"] % steps]
        noise = (
            model(state["x"].repeat(1 + guided, 1, 1, 1), t.expand(len(labels)), labels)
            .sample[:, :channels]
            .float()
        )
        if guided:
            by_class, without = noise.chunk(2)
            noise = without + GUIDANCE * (by_class - without)
        state["x"] = scheduler.step(noise, t, state["x"]).prev_sample
        state["number"] += 1

    return step


MODES = {
    "forward": forward_step,
    "train": training_step,
    "denoise": denoising_step,
    "guided": partial(denoising_step, guided=True),
}


def under(dtype, step):
    """The step, under autocast unless in float32."""

    def call():
        with nullcontext() if dtype == "float32" else torch.autocast("cpu", torch.bfloat16):
            step()

    return call


def measure(models, mode, batch, pixels, dtype):
    """{name: times, share and bound}"""
    steps = {
        name: under(dtype, MODES[mode](model, batch, pixels)) for name, model in models.items()
    }
    if mode in ("denoise", "guided"):
        times = interleaved(steps, STEPS if mode == "denoise" else GUIDED_STEPS, warm_up=1)
    else:
        times = interleaved(steps, ROUNDS, SECONDS)
    rows = to_base(times)
    for name, model in models.items():
        left = 1.0 if name == "released" else bound(model, pixels)
        rows[name].update(share=round(share(model), 3), bound=round(left, 3))
    return rows


def tables(report):
    """Time over dense, medians: a row for each case, a column for each kind of heads."""
    names = dict.fromkeys(
        name for case in report["cases"] for name in case["times"] if name != "dense"
    )
    rows = []
    for case in report["cases"]:
        ratios = (
            f"{case['times'][name]['ratio']:.2f}" if name in case["times"] else "" for name in names
        )
        rows.append([f"{case['part']}, {case['mode']}", str(case["batch"]), case["dtype"], *ratios])
    return (
        about_machine(report) + "\n\n" + markdown(["model, mode", "batch", "dtype", *names], rows)
    )


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
        return print(tables(json.loads(args.output.read_text())), end="")

    torch.set_num_threads(args.threads)
    report = new_report(path=use_path(args.path), cases=[])
    for part in args.parts:
        make, modes, batches = PARTS[part]
        pixels = SIZES.get(part, {}).get("img_size", 224)
        torch.manual_seed(0)
        models = make()
        for layer in itertools.chain(*map(routed, models.values())):
            draw_router(layer.router)
        chosen = [mode for mode in modes if mode in args.modes]
        for mode, batch, dtype in itertools.product(chosen, args.batches or batches, args.dtypes):
            about = dict(part=part, mode=mode, batch=batch, dtype=dtype, threads=args.threads)
            report["cases"].append(dict(about, times=measure(models, mode, batch, pixels, dtype)))
            print(*about.values())
            for name, row in report["cases"][-1]["times"].items():
                print(
                    f"    {name:16}{cell(row['ratio'], row['quartiles'])}, bound {row['bound']:.2f}",
                    flush=True,
                )
    write_report(args.output, report)


if __name__ == "__main__":
    sys.exit(main())

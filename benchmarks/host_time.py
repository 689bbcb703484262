"""Time on the host of one attention layer on a GPU's path, over timm's layer: Python and dispatch. Needs no GPU.

    python benchmarks/host_time.py        # about 2 minutes on an idle core

Triton's kernels are not run, in the interpreter's place: what is left is what a GPU would wait for, without Triton's own
launcher. Layers are small, so that PyTorch's products take little of the time.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from functools import partial

import torch
from timing import about_machine, cell, interleaved, machine, markdown, to_base
from timm.layers import Attention
from triton.runtime.interpreter import InterpretedFunction

from moh_vision.attention import HeadBudget, HeadMixtureAttention, kernels

WIDTH, HEADS = 64, 4
LAYERS = {
    "packed, per token": dict(executor="packed"),
    "masked, per token": dict(executor="masked"),
    "packed, per sample": dict(executor="packed", scope="sample"),
    "auto, per token": dict(executor="auto"),
}
ROUNDS = 400


def forward(layer, x):
    with torch.inference_mode():
        layer(x)


def train(layer, x):
    y = layer(x)
    if isinstance(y, tuple):
        y = y[0]
    y.sum().backward()


def main():
    torch.set_num_threads(1)
    kernels.use("triton")
    InterpretedFunction.run = lambda self, *args, **kwargs: None
    budget = HeadBudget(heads=HEADS, head_dim=WIDTH // HEADS, shared=1, routed=1)
    layers = {"timm's Attention": Attention(WIDTH, HEADS, qkv_bias=True)}
    for name, options in LAYERS.items():
        layers[name] = HeadMixtureAttention(WIDTH, budget, **options)
    x = torch.randn(2, 16, WIDTH, requires_grad=True)

    found = {}
    for mode, call in (("forward", forward), ("training", train)):
        for layer in layers.values():
            layer.train(mode == "training")
        steps = {name: partial(call, layer, x) for name, layer in layers.items()}
        found[mode] = to_base(interleaved(steps, ROUNDS, warm_up=20))
    rows = []
    for name in layers:
        row = [name]
        for mode in found:
            figures = found[mode][name]
            row.append(f"{1e3 * figures['milliseconds']:.0f}")
            row.append(cell(figures["ratio"], figures["quartiles"]))
        rows.append(row)
    columns = ["layer", "forward, us", "over timm's", "training, us", "over timm's"]
    print(about_machine(dict(machine=machine())))
    print(markdown(columns, rows), end="")


if __name__ == "__main__":
    main()

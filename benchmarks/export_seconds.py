"""Time of torch.export of routed models over their dense twins, in interleaved rounds of one process; prints a table.

    python benchmarks/export_seconds.py        # about 6 minutes on an idle core

Weights are random; a graph has the same operators whatever they are.
"""

from functools import partial

import timm
import torch
from timing import about_machine, cell, interleaved, machine, markdown, to_base

import moh_vision
from moh_vision.language import create_text_model

IMAGE = dict(x=torch.zeros(1, 3, 224, 224))
CONDITION = dict(timestep=torch.tensor([500]), class_labels=torch.tensor([7]))
LATENT = dict(hidden_states=torch.zeros(1, 4, 32, 32), **CONDITION)
PICTURE = dict(hidden_states=torch.zeros(1, 3, 256, 256), **CONDITION)
WORDS = dict(input_ids=torch.arange(1, 65).view(1, 64))
PROMPT = dict(WORDS, use_cache=False)
VOCABULARY = dict(vocab_size=1000)


def by_name(name):
    """Return a function that makes a model of timm's registry."""
    return lambda: timm.create_model(name)


def text(preset):
    """Return a function that makes a text model."""
    return lambda: create_text_model(preset, **VOCABULARY)


def converted(name):
    """Return a function that makes a model of timm's registry and converts it to routed heads."""
    return lambda: moh_vision.convert(by_name(name)(), head_budget=0.5)


# Family: the dense model, its routed twin, the arguments of their forward.
PAIRS = {
    "transnext_small": (by_name("transnext_small"), by_name("moh_transnext_small_75"), IMAGE),
    "vit_base": (
        by_name("vit_base_patch16_224"),
        by_name("moh_vit_base_patch16_224"),
        IMAGE,
    ),
    "vit_base, converted": (
        by_name("vit_base_patch16_224"),
        converted("vit_base_patch16_224"),
        IMAGE,
    ),
    "eva02_small, converted": (
        by_name("eva02_small_patch14_224"),
        converted("eva02_small_patch14_224"),
        IMAGE,
    ),
    "dit_base": (by_name("dit_base_patch2"), by_name("moh_dit_base_patch2_75"), LATENT),
    "jit_base": (by_name("jit_base_patch16"), by_name("moh_jit_base_patch16_75"), PICTURE),
    "clm_base": (text("clm_base"), text("clm_moh_base_75"), PROMPT),
    "mlm_base": (text("mlm_base"), text("mlm_moa_8K8E128D"), WORDS),
}
FAMILIES = tuple(PAIRS)  # those that are measured
ROUNDS = 3


@torch.no_grad()
def export(model, inputs):
    torch.export.export(model, (), inputs)


def main():
    torch.set_num_threads(1)
    rows = []
    for family in FAMILIES:
        dense, routed, inputs = PAIRS[family]
        steps = {
            "dense": partial(export, dense().eval(), inputs),
            "routed": partial(export, routed().eval(), inputs),
        }
        found = to_base(interleaved(steps, ROUNDS, warm_up=1))
        ratio = cell(found["routed"]["ratio"], found["routed"]["quartiles"])
        seconds = [f"{found[name]['milliseconds'] / 1e3:.1f}" for name in steps]
        rows.append([family, *seconds, ratio])
    columns = ["model", "dense, s", "routed, s", "routed over dense [quartiles]"]
    print(about_machine(dict(machine=machine())))
    print(markdown(columns, rows), end="")


if __name__ == "__main__":
    main()

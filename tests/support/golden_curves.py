"""Loss curves of short runs of the real training scripts in float64: run them, record them, compare them."""

import contextlib
import json
import platform
import re
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from moh_vision.attention import ROUTERS
from moh_vision.classification import train as train_cls
from moh_vision.diffusion import train as train_dit
from moh_vision.engine.block_descent import BlockDescent
from moh_vision.engine.training_loop import TrainingLoop
from moh_vision.language import train as train_text
from tests.support.paths import ROOT
from tests.support.small_text import ENGLISH, words, write_pairs, write_plain
from tests.support.tiny_vae import save_tiny_vae, write_latents

HERE = ROOT / "tests" / "golden"
STEPS = 20
# Relative. Chosen from the differences between numbers of threads and instruction sets, see docs/testing.md.
TOLERANCE = 1e-5
TOLERANCE_IN_FLOAT32 = 2e-4
PACKAGES = ("torch", "timm", "transformers", "tokenizers", "scikit-learn")

VIT = (
    "--config configs/quickstart/cls.yaml --model.depth 2 --model.embed_dim 32 --optim.batch_size 16 --data.workers 0 "
    "--optim.lr 3e-2 --optim.warmup_steps 5 "
)
DIT = (
    "--config configs/quickstart/dit.yaml --model.depth 2 --model.embed_dim 32 --optim.batch_size 16 "
    "--optim.lr 1e-2 --optim.warmup_steps 5 "
)
TEXT = (
    "--model.kwargs.hidden_size 32 --model.kwargs.intermediate_size 64 --model.kwargs.num_attention_heads 4 "
    "--optim.lr 3e-3 --optim.warmup_steps 5 "
)
PAIRS = (
    TEXT
    + "--model.kwargs.encoder_layers 1 --model.kwargs.decoder_layers 1 --data.root {pairs} --data.source de "
    "--data.target en --data.merges 60 --data.max_tokens 200 --data.max_length 60 --generate.beam 1 "
)
PLAIN = (
    TEXT
    + "--model.kwargs.num_hidden_layers 2 --data.root {plain} --data.block 16 --optim.batch_size 8 "
)
# name -> (script, its options)
CASES = {
    "vit_moh_token": (train_cls, VIT + "--optim.accumulation 2 --label_smoothing 0.1"),
    "vit_moh_paper_gates": (train_cls, VIT + "--model.router_kwargs.gate_scale paper"),
    "vit_moh_sample": (
        train_cls,
        VIT + "--model.scope sample --model.kwargs.drop_path_rate 0.1 --optim.layer_decay 0.8",
    ),
    "vit_query_norm": (
        train_cls,
        VIT + "--model.router query_norm --mix.mixup 0.8 --mix.cutmix 1.0",
    ),
    "vit_moa": (
        train_cls,
        VIT + "--optim.lr 1e-2 --model.router moa --model.head_budget [[0,2],[0,2]]",
    ),
    "vit_mae": (train_cls, VIT + "--model.router mae --model.head_budget null"),
    "transnext_moh": (
        train_cls,
        "--model.name moh_transnext_small_75 --model.kwargs.embed_dims [12,24,24,48] --model.kwargs.num_heads [2,4,4,8] "
        "--model.kwargs.depths [1,2,1,2] --model.head_budget [[2,0],[0,2],[1,2],[4,2]] --data.root digits "
        "--data.img_size 32 --data.workers 0 --optim.batch_size 4 --optim.lr 1e-3",
    ),
    "dit_pixels": (train_dit, DIT + "--label_drop 0.1"),
    "dit_pixels_sample": (train_dit, DIT + "--model.scope sample --learn_sigma false"),
    "dit_latents": (train_dit, DIT + "--data.root {latents} --data.augment flip"),
    "translation_mae": (train_text, PAIRS + "--model.name mt_mae_7 --block_descent.period 2"),
    "translation_moa": (train_text, PAIRS + "--model.name mt_moa_2K4E16D"),
    "masked_moa": (
        train_text,
        PLAIN + "--model.name mlm_moa_2K4E16D --data.merges 30 --optim.weight_decay 0.1",
    ),
    "causal_moh": (train_text, PLAIN + "--model.name clm_moh_small_75 --data.merges 30"),
    "causal_mae_adaptive": (
        train_text,
        PLAIN
        + "--model.name clm_wt103_mae_7 --data.words 0 --data.context 8 --model.kwargs.adaptive_cutoffs [6] "
        "--label_smoothing 0 --block_descent.mode joint",
    ),
    "llama_converted": (
        train_text,
        "--model.name clm_pretrained --model.pretrained {llama} --model.head_budget [[1,1],[1,2]] --data.root {plain} "
        "--data.tokenizer {words} --data.block 16 --optim.batch_size 8 --optim.lr 3e-3 --optim.warmup_steps 5",
    ),
}
# Every router has a curve: a ViT's, where no case above has one.
for name, router in ROUTERS.items():
    if not any(case.startswith(f"vit_{name}") for case in CASES):
        budget = " --model.head_budget null" if router.all_heads else ""
        CASES[f"vit_{name}"] = (train_cls, f"{VIT}--model.router {name}{budget}")


def write_data(folder: Path) -> dict:
    """Write the data of all cases and return {name: path}; the options of `CASES` have these names in braces."""
    paths = dict(pairs=write_pairs(folder / "pairs", train=60), plain=write_plain(folder / "plain"))
    paths["words"] = words(folder / "words", ENGLISH)
    paths["llama"] = folder / "llama"
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(
        LlamaConfig(vocab_size=13, max_position_embeddings=64, **sizes)
    ).save_pretrained(paths["llama"])
    vae = save_tiny_vae(folder / "vae")
    paths["latents"] = folder / "latents"
    argv = (
        f"--vae {vae} --data digits --out {paths['latents']} --size 8 --dtype float32 --workers 0"
    )
    assert write_latents(argv.split()) == 0
    return paths


def in_float64(batch: dict) -> dict:
    return {
        key: value.double() if value.is_floating_point() else value for key, value in batch.items()
    }


@contextlib.contextmanager
def recorded(double: bool):
    """Yield a list to which every step of the runs in the block appends its losses, {name: mean over micro-batches}.

    If `double`, the steps compute in float64. Weights, augmentation and noise are still drawn in float32, so that the
    random numbers are those of a usual run, and validation is in float32. A truncated normal is replaced by a normal
    whose elements outside of the limits are drawn again: releases of PyTorch draw it by different methods.
    """
    rows = []
    make_descent = BlockDescent.__init__
    do_step = TrainingLoop.step
    all_steps = TrainingLoop.steps

    def recorded_step(self, batches, *arguments, **more):
        if double:
            batches = map(in_float64, batches)
        do_step(self, batches, *arguments, **more)
        row = {}
        for name in self.losses[0]:
            if name != "head_runs":
                row[name] = sum(float(v[name]) for v in self.losses) / len(self.losses)
        rows.append(row)

    def normal(tensor, mean, std, a, b, generator=None):
        with torch.no_grad():
            tensor.normal_(mean, std, generator=generator)
            while (outside := (tensor < a) | (tensor > b)).any():
                again = torch.empty_like(tensor).normal_(mean, std, generator=generator)
                tensor.copy_(torch.where(outside, again, tensor))
            return tensor

    def descent_of_double(self, accelerator, model, *more):
        make_descent(self, accelerator, model.double(), *more)

    def steps_then_float(self):
        yield from all_steps(self)
        for model in filter(None, (self.model, self.ema and self.ema.module)):
            model.float()

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(TrainingLoop, "step", recorded_step))
        patches.enter_context(patch.object(torch.nn.init, "_no_grad_trunc_normal_", normal))
        if double:
            patches.enter_context(patch.object(BlockDescent, "__init__", descent_of_double))
            patches.enter_context(patch.object(TrainingLoop, "steps", steps_then_float))
        yield rows


def curve(case: str, data: dict, output: Path, double: bool = True, more: str = "") -> dict:
    """Run a case and return {name of a loss: its values over the steps}.

    Three curves have one value, for the end of the run: "weights" (their sum of absolute values), "ema_distance" (the sum
    of absolute differences of EMA and weights) and "validation" (the loss). A run without EMA or validation lacks them.
    """
    script, options = CASES[case]
    argv = [*options.format(**data).split(), *more.split()]
    argv += ["--max-steps", str(STEPS), "--output", str(output)]
    with recorded(double) as rows:
        script.main(argv)
    found = {name: [row[name] for row in rows] for name in rows[0]}
    weights = load_file(output / "model.safetensors")
    found["weights"] = [float(sum(w.double().abs().sum() for w in weights.values()))]
    if (output / "ema.safetensors").exists():
        average = load_file(output / "ema.safetensors")
        distances = [(average[k].double() - w.double()).abs().sum() for k, w in weights.items()]
        found["ema_distance"] = [float(sum(distances))]
    if (output / "results.json").exists():
        results = json.loads((output / "results.json").read_text())
        found["validation"] = [results.get("validation", results)["loss"]]
    return found


def about() -> dict:
    """Return what a curve may depend on in this environment: dtype, processor, threads and packages."""
    return dict(
        dtype="float64",
        operators="plain PyTorch: the C++ ones have no float64",
        processor=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        threads=torch.get_num_threads(),
        packages={name: version(name) for name in PACKAGES},
    )


def write(case: str, found: dict) -> None:
    """Record the curves of a case in tests/golden/CASE.json."""
    record = dict(tolerance=TOLERANCE, recorded_on=about(), curves=found)
    # One list a line, so that a diff of the file shows which curves moved.
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[[^\[\]]*\]", lambda m: " ".join(m[0].split()), text)
    (HERE / f"{case}.json").write_text(text + "\n")


def as_recorded(curves: dict, tolerance: float):
    """Return an object that equals `by_step` of curves within a relative tolerance.

    Values below 1e-3 have the absolute tolerance of 1e-3.
    """
    return pytest.approx(by_step(curves), rel=tolerance, abs=1e-3 * tolerance)


def by_step(curves: dict) -> dict:
    """Return {"NAME STEP": value}, the form in which pytest.approx names the values that differ."""
    return {
        f"{name} {step}": value
        for name, values in curves.items()
        for step, value in enumerate(values)
    }

"""A step of training and of sampling waits for the device at most once: it is not idle while Python works.

Whole steps run on the meta device, where attention computes all heads (`tests.support.waits`). The attention of a GPU, with
Triton's kernels, runs on the CPU with launches that do nothing.
"""

import contextlib
from functools import partial

import pytest
import timm
import torch
from accelerate import Accelerator

from moh_vision.attention import kernels
from moh_vision.classification.task import ClassificationTask
from moh_vision.diffusion.objectives import make_objective
from moh_vision.diffusion.previews import shape_of
from moh_vision.diffusion.sampling import Guidance, predicted, sample_images
from moh_vision.diffusion.schedulers import SAMPLERS, make_scheduler
from moh_vision.diffusion.task import DiffusionTask
from moh_vision.engine.weights import ModelEma
from moh_vision.language import create_text_model
from moh_vision.language.models.base import labelled
from moh_vision.language.task import LanguageTask
from tests.support.small_loop import small_loop
from tests.support.tiny_dit import TINY as DIT
from tests.support.tiny_vit import TINY as VIT
from tests.support.waits import META, NoReads, Waits

STEPS = 5  # of sampling
TRAINED = 3
TEXT = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_attention_heads=4)
CLASSES = dict(dtype=torch.long, device=META)
# The one wait of a step: `agree` reads whether loss and gradient are finite.
ONE = ["engine/step.py: tolist"]
# transformers looks whether a batch packs several texts into a row; its models offer no way around it.
PACKED = ["transformers/masking_utils.py: __bool__"]


def vit():
    model = timm.create_model(
        "moh_vit_tiny_patch16_224", **VIT, head_budget=0.5, drop_path_rate=0.1
    )
    batch = dict(images=torch.zeros(4, 3, 16, 16, device=META), labels=torch.zeros(4, **CLASSES))
    return ClassificationTask(model, 0.01), batch, {}


def dit(flow=False):
    config = dict(objective="flow", flow={}) if flow else {}
    model = timm.create_model(
        "moh_dit_small_patch2_75", **DIT, head_budget=0.5, learn_sigma=not flow
    )
    images = torch.zeros(4, 3, 8, 8, device=META)
    timesteps = torch.zeros(4, device=META)
    if not flow:
        timesteps = timesteps.long()
    batch = dict(images=images, noise=images, labels=torch.zeros(4, **CLASSES), timesteps=timesteps)
    return DiffusionTask(model, 0.01, make_objective(config)), batch, {}


def text(name, *inputs, **sizes):
    model = create_text_model(name, **TEXT, **sizes)
    words = torch.ones(2, 6, dtype=torch.long)
    batch = dict(labels=words, where=labelled(words), **dict.fromkeys(inputs, words))
    batch = {key: value.to(META) for key, value in batch.items()}
    return LanguageTask(model, 0.01), batch, dict(tokens=torch.ones((), device=META))


# Case -> (task, micro-batch and further arguments, waits of a step of two micro-batches).
TRAININGS = {
    "cls": (vit, ONE),
    "dit": (dit, ONE),
    "dit flow": (lambda: dit(flow=True), ONE),
    "mlm": (lambda: text("mlm_base", "input_ids", num_hidden_layers=2), ONE),
    "mt": (
        lambda: text(
            "mt_transformer_base",
            "input_ids",
            "attention_mask",
            "decoder_input_ids",
            encoder_layers=1,
            decoder_layers=1,
        ),
        ONE,
    ),
    "clm": (
        lambda: text("clm_moh_small_75", "input_ids", num_hidden_layers=2, num_key_value_heads=4),
        [*PACKED, *PACKED, *ONE],
    ),
}


@pytest.mark.parametrize("make, waits", TRAININGS.values(), ids=TRAININGS)
def test_a_step_waits_once(make, waits):
    task, batch, more = make()
    ema = ModelEma(task.model, decay=0.9).to(META)
    task = task.to(META)
    accelerator = Accelerator(cpu=True, device_placement=False)
    optimizer = torch.optim.AdamW(task.parameters())
    loop = small_loop(accelerator, task, optimizer, accumulation=2, clip_norm=1.0)
    loop.ema = ema
    with Waits() as seen:
        for _ in range(TRAINED):
            loop.step(iter([batch, batch]), epoch=0, count=8, **more)
    assert seen.at == TRAINED * waits


# Copies of each step: diffusers' DDPM draws its noise on the host, from the generators of the images, and waits for its copy.
COPIES = dict(ddpm=["diffusers/utils/torch_utils.py: copy from the host"])
ADAPTIVE = {"dopri5"}  # its solver is on the host


@pytest.mark.parametrize("sampler", sorted(SAMPLERS.keys() - ADAPTIVE))
def test_sampling_waits_for_no_step(sampler):
    task, *_ = dit(flow=SAMPLERS[sampler].output == "velocity")
    model = task.model.to(META).eval()
    guidance = Guidance(2.0, interval=(0.1, 0.9))
    scheduler = make_scheduler(sampler, STEPS, model.config.learn_sigma, clip=True)
    labels = torch.zeros(4, **CLASSES)
    with Waits() as seen:
        sample_images(
            partial(predicted, model), scheduler, labels, shape_of(model), range(4), 5, guidance
        )
    # The initial noise of four images, drawn on the host; the check of the labels; at the end that of the images.
    begun = 4 * ["diffusion/sampling.py: copy from the host"] + ["diffusion/sampling.py: __bool__"]
    of_steps = (STEPS - 1) * COPIES.get(sampler, [])  # the last step draws no noise
    assert seen.at == [*begun, *of_steps, "diffusion/sampling.py: tolist"]


@pytest.mark.parametrize("what", ["tensor", "new_tensor", "to", "copy_", "item", "bool"])
def test_the_waits_that_are_found(what):
    on_device = torch.zeros(2, device=META)
    with Waits() as seen:
        torch.zeros(2).to(META, non_blocking=True)
        if what == "tensor":
            torch.tensor([1.0], device=META)
        elif what == "new_tensor":
            on_device.new_tensor([1.0])
        elif what == "to":
            torch.zeros(2).to(META)
        elif what == "copy_":
            on_device.copy_(torch.zeros(2))
        elif what == "item":
            on_device[0].item()
        elif on_device.sum() > 0:
            pass
    assert len(seen.at) == 1 and "test_waits.py" in seen.at[0]
    with pytest.raises(NotImplementedError):  # a shape that depends on values
        on_device.nonzero()


@pytest.fixture
def stubbed_launches(monkeypatch):
    """Let Triton's kernels, which the interpreter would run, do nothing; yield within the path "triton"."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", lambda self, *args, **named: None)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(kernels.build.using("triton"))
        except ValueError as error:
            pytest.skip(str(error))
        yield


@pytest.mark.parametrize("scope", ["token", "sample"])
@pytest.mark.parametrize("executor", ["masked", "packed", "auto"])
def test_attention_on_the_path_of_a_gpu_reads_nothing(stubbed_launches, executor, scope):
    model = timm.create_model(
        "moh_vit_tiny_patch16_224", **VIT, head_budget=0.5, executor=executor, scope=scope
    )
    task = ClassificationTask(model, 0.01)
    batch = dict(images=torch.zeros(4, 3, 16, 16), labels=torch.zeros(4, dtype=torch.long))
    task(**batch)["loss"].backward()  # makes plans
    with NoReads():
        task(**batch)["loss"].backward()

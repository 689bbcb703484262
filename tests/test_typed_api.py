"""Types of what users import: mypy reads this file as one of theirs (make test), and pytest runs it."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, assert_type

import pytest
import timm
import torch
from torch import Tensor, nn

import moh_vision
from moh_vision.attention import (
    HeadBudget,
    HeadMixtureAttention,
    Routing,
    RoutingStats,
    head_usage,
    load_balance_loss,
    resolve_budget,
    token_heads,
)
from moh_vision.classification.config import ClsConfig
from moh_vision.diffusion import Guidance, MoHDiTPipeline, make_scheduler
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel
from moh_vision.models.vit import MoHVisionTransformer

PUBLIC = (
    "moh_vision",
    "moh_vision.models.counts",
    "moh_vision.models.describe",
    "moh_vision.models.head_load",
    "moh_vision.opening",
    "moh_vision.attention",
    "moh_vision.classification.config",
    "moh_vision.diffusion",
    "moh_vision.diffusion.config",
    "moh_vision.evaluation.fidelity",
    "moh_vision.language",
    "moh_vision.language.config",
    "moh_vision.language.models.create",
)


def test_a_layer() -> None:
    budgets = resolve_budget("uniform:0.5", 2, 4, 8)
    assert_type(budgets, tuple[HeadBudget, ...])
    layer = HeadMixtureAttention(32, budgets[0], router="moh", device="cpu", dtype=torch.float32)
    assert_type(layer.budget.active, int)
    y, stats = layer(torch.randn(2, 5, 32))
    assert_type(y, Tensor)
    assert_type(stats, RoutingStats)
    assert_type(stats.counts, Tensor)
    assert_type(load_balance_loss([stats]), Tensor)
    assert_type(head_usage([stats]), list[Tensor])
    assert y.shape == (2, 5, 32) and stats.counts.shape == (2, 4)


def test_a_vit(tmp_path: Any) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4, num_classes=10
    )
    images = torch.randn(2, 3, 32, 32)
    assert_type(
        moh_vision.convert(model, head_budget=[(1, 1), (1, 2)], calibrate=images), nn.Module
    )
    assert_type(moh_vision.set_head_budget(model, 0.5), nn.Module)
    assert isinstance(model, MoHVisionTransformer)
    logits, stats = model.forward_routed(images)
    assert_type(logits, Tensor)
    assert_type(stats, list[RoutingStats])
    assert_type(token_heads(model.eval(), images), list[Routing])
    share: float = moh_vision.head_budget(model)["share"]
    assert logits.shape == (2, 10) and share == 0.5
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert_type(moh_vision.load_checkpoint(model, tmp_path / "weights.pt"), nn.Module)


def test_a_pipeline() -> None:
    transformer = timm.create_model(
        "moh_dit_small_patch2_75",
        img_size=4,
        embed_dim=32,
        depth=2,
        num_heads=4,
        head_budget=0.5,
        num_classes=3,
    )
    assert isinstance(transformer, MoHDiTTransformer2DModel)
    scheduler = make_scheduler("ddim", 2, learned_variance=True, clip=False)
    pipeline = MoHDiTPipeline(transformer, scheduler, id2label={0: "cat", 1: "dog", 2: "owl"})
    assert_type(pipeline.labels, dict[str, int])
    assert_type(Guidance(1.5).guided(4), int)
    (latents,) = pipeline(
        ["cat", "owl"], num_inference_steps=2, output_type="latent", return_dict=False
    )
    assert len(latents) == 2


def test_a_configuration() -> None:
    config = ClsConfig(seed=3)
    assert_type(config.seed, int)
    assert_type(config.optim.lr, float)
    assert_type(config.data.crop_scale, tuple[float, float])


def public(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions and methods that a module offers: those of `__all__`, or where it has none, of its own classes."""
    module = importlib.import_module(name)
    classes_and_functions = [
        n
        for n, value in vars(module).items()
        if getattr(value, "__module__", "") == name and n[0] != "_"
    ]
    for named in getattr(module, "__all__", classes_and_functions):
        value = getattr(module, named)
        if inspect.isfunction(value):
            yield named, value
        elif inspect.isclass(value):
            for method, code in vars(value).items():
                code = getattr(code, "fget", getattr(code, "__func__", code))
                if inspect.isfunction(code) and (method == "__init__" or method[0] != "_"):
                    yield f"{named}.{method}", code


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_types(name: str) -> None:
    untyped = []
    count = 0
    for where, code in public(name):
        parameters = [*inspect.signature(code).parameters.values()]
        if "." in where:  # of a method, but self
            del parameters[:1]
        untyped += [f"{where}: {p.name}" for p in parameters if p.annotation is p.empty]
        if not where.endswith("__init__") and "return" not in code.__annotations__:
            untyped.append(f"{where}: what it returns")
        count += 1
    assert count and untyped == []

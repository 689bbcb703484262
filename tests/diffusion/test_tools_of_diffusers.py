"""diffusers' own tools on our transformer, beside the plain model and diffusers' own DiT with the same weights."""

import pytest
import torch
from accelerate import cpu_offload
from diffusers import (
    DiTTransformer2DModel,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import apply_first_block_cache
from diffusers.hooks.pyramid_attention_broadcast import apply_pyramid_attention_broadcast
from diffusers.hooks.taylorseer_cache import apply_taylorseer_cache
from diffusers.models.cache_utils import CacheMixin

from moh_vision.attention import token_heads
from moh_vision.diffusion import MoHDiTPipeline, make_scheduler
from moh_vision.models.dit_transformer import MoHDiTTransformer2DModel, from_diffusers
from moh_vision.models.prediction import LINEAR
from tests.support.official_dit import diffusers_dit
from tests.support.pipelines import LABELS, WITH_HEADS, draw, predict, transformer
from tests.support.refusals import refuse

BLOCKS = [r"blocks\.\d+"]


def deeper(**more):
    """A transformer of three blocks."""
    return transformer(num_layers=3, **more)


def count_calls(module):
    """Return a list that grows by one at each call of a module."""
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


@torch.no_grad()
def steps(model, times, size=8):
    """Return a model's predictions at timesteps of one slowly moving input, in one cache context."""
    x = torch.randn(2, 4, size, size, generator=torch.Generator().manual_seed(0))
    drift = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    outputs = []
    for number, time in enumerate(times):
        with CacheMixin.cache_context(model, "model"):
            y = model(x + 0.001 * number * drift, torch.tensor([time] * 2), LABELS).sample
        outputs.append(y)
    return outputs


def as_twins():
    """Return diffusers' DiT and ours with its weights."""
    theirs = diffusers_dit(num_layers=3)
    return theirs, from_diffusers(theirs)


def assert_same(some, others):
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def pixel_pipeline(name="ddim", number=8, **more):
    return MoHDiTPipeline(deeper(channels=3, **more), make_scheduler(name, number, True, clip=True))


def test_the_first_block_decides_as_in_diffusers_dit():
    """Blocks run in the same steps, with the same outputs; the third and the fourth step differ by enough to compute."""
    times = [500, 500, 500, 200, 200]
    theirs, ours = as_twins()
    plain = steps(ours, times)
    assert_same(plain, steps(theirs, times))
    # Others, because diffusers' hooks on a model that had a cache context before `apply_first_block_cache` get none.
    theirs, ours = as_twins()
    ran_theirs = count_calls(theirs.transformer_blocks[2].attn1)
    ran_ours = count_calls(ours.blocks[2].attn)
    config = FirstBlockCacheConfig(threshold=0.1)
    apply_first_block_cache(theirs, config)
    ours.enable_cache(config)
    cached = steps(ours, times)
    assert_same(cached, steps(theirs, times))
    assert len(ran_ours) == len(ran_theirs) and 0 < len(ran_ours) < len(times)
    assert not torch.equal(cached[2], plain[2])


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_with_a_threshold_of_zero_a_cache_changes_no_bit_and_can_be_removed(options):
    model = deeper(**options)
    times = [500, 499, 498]
    plain = steps(model, times, 4)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    ran = count_calls(model.blocks[2].attn)
    for one, other in zip(steps(model, times, 4), plain, strict=True):
        assert torch.equal(one, other)
    assert len(ran) == 3
    model.disable_cache()
    assert torch.equal(steps(model, times, 4)[2], plain[2])


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_skipped_blocks_repeat_their_change_of_the_tokens(options):
    """Where all blocks but the first are skipped, the output is that of the first block plus what the others added."""
    model = deeper(**options)
    x = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    seen = {"first": [], "last": []}
    for name, block in (("first", model.blocks[0]), ("last", model.blocks[2])):
        block.register_forward_hook(lambda _, inputs, y, name=name: seen[name].append(y))
    with torch.no_grad():
        model(x, torch.tensor([500]), LABELS)
        model(x, torch.tensor([480]), LABELS)
        expected = seen["first"][1] + seen["last"][0] - seen["first"][0]
        model.enable_cache(FirstBlockCacheConfig(threshold=1e6))
        for time in (500, 480):
            with model.cache_context("model"):
                model(x, torch.tensor([time]), LABELS)
    torch.testing.assert_close(seen["last"][3], expected)
    assert not torch.equal(seen["last"][3], seen["last"][1])


@pytest.mark.parametrize("identifiers", [BLOCKS, [r"blocks\.\d+\.mlp"]], ids=["blocks", "mlps"])
def test_taylor_seer_predicts_as_in_diffusers_dit(identifiers):
    times = [500, 490, 480, 470, 460, 450, 440]
    theirs, ours = as_twins()
    plain = steps(ours, times)
    options = dict(
        cache_interval=3, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    )
    of_theirs = [pattern.replace("mlp", "ff") for pattern in identifiers]
    of_theirs = [f"transformer_{pattern}" for pattern in of_theirs]
    apply_taylorseer_cache(theirs, TaylorSeerCacheConfig(cache_identifiers=of_theirs, **options))
    ours.enable_cache(TaylorSeerCacheConfig(cache_identifiers=identifiers, **options))
    ran = count_calls(ours.blocks[1].mlp.fc1)
    cached = steps(ours, times)
    assert_same(cached, steps(theirs, times))
    assert 2 < len(ran) < len(times)
    assert not torch.allclose(cached[2], plain[2])


def broadcast(callback, **more):
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=callback, **more
    )


def test_attention_is_broadcast_as_in_diffusers_dit():
    """Of seven steps the second and the last are outside of the range of timesteps, and every other one is skipped."""
    times = [900, 850, 700, 600, 500, 400, 50]
    theirs, ours = as_twins()
    plain = steps(ours, times)
    now = []
    config = broadcast(lambda: now[-1])
    apply_pyramid_attention_broadcast(theirs, config)
    ours.enable_cache(config)
    ran = count_calls(ours.blocks[1].attn.proj)
    outputs = []
    for model in (theirs, ours):
        model.register_forward_pre_hook(lambda _, inputs: now.append(inputs[1][0].item()))
        outputs.append(steps(model, times))
    assert_same(*outputs)
    assert len(ran) == 5
    assert not torch.allclose(outputs[1][3], plain[3])
    ours.disable_cache()
    assert_same(steps(ours, times), plain)


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_a_pipeline_broadcasts_attention_at_its_timesteps(options):
    """A range of timesteps that holds none changes no bit; guidance that begins anew does not meet other images."""
    guided = dict(steps=8, guidance_interval=(0.3, 0.7))
    plain = draw(pixel_pipeline(**options), [1, 2], 3, 4, **guided)
    for skipped, equal in (((990, 1000), True), ((-1, 1000), False)):
        pipe = pixel_pipeline(**options)
        config = broadcast(
            lambda pipe=pipe: pipe.current_timestep, spatial_attention_timestep_skip_range=skipped
        )
        pipe.transformer.enable_cache(config)
        ran = count_calls(pipe.transformer.blocks[1].attn.router)
        images = draw(pipe, [1, 2], 3, 4, **guided)
        assert (images == plain).all() == equal
        assert (len(ran) == 8) == equal


def test_taylor_seer_takes_class_tokens_that_later_blocks_add():
    """The tokens of each block are predicted by themselves; nothing that stands still is predicted wrongly."""
    model = deeper(class_tokens=3, class_tokens_start=1, use_rot_pos_emb=True)
    plain = steps(model, [500], 4)[0]
    x = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    config = TaylorSeerCacheConfig(
        cache_identifiers=BLOCKS, disable_cache_before_step=2, taylor_factors_dtype=None
    )
    model.enable_cache(config)
    ran = count_calls(model.blocks[1].attn)
    with torch.no_grad():
        for _ in range(3):
            with model.cache_context("model"):
                y = model(x, torch.tensor([500]), LABELS).sample
    assert len(ran) == 2
    torch.testing.assert_close(y, plain)


TAYLOR = TaylorSeerCacheConfig
FIRST = FirstBlockCacheConfig()
REFUSED = {
    "what needs layers of diffusers": (
        {},
        FasterCacheConfig(current_timestep_callback=lambda: 500),
        "FasterCacheConfig MoHDiTTransformer2DModel FirstBlockCacheConfig TaylorSeerCacheConfig",
    ),
    "attention over time": (
        {},
        PyramidAttentionBroadcastConfig(
            temporal_attention_block_skip_range=2, current_timestep_callback=lambda: 500
        ),
        "PyramidAttentionBroadcastConfig spatial_attention_block_skip_range None 2",
    ),
    "one block": (dict(num_layers=1), FIRST, "FirstBlockCacheConfig 2 blocks 1"),
    "tokens that come later": (
        dict(class_tokens=3, class_tokens_start=1),
        FIRST,
        "FirstBlockCacheConfig class_tokens 3 block 1 TaylorSeerCacheConfig",
    ),
    "blocks of zeros": ({}, TAYLOR(use_lite_mode=True), "use_lite_mode cache_identifiers blocks"),
    "attention by default": ({}, TAYLOR(), "TaylorSeerCacheConfig cache_identifiers blocks"),
    "attention": (
        {},
        TAYLOR(cache_identifiers=[r"blocks\.0\.attn"]),
        "blocks.0.attn cache_identifiers",
    ),
    "a routed MLP": (
        dict(scope="sample", mlp_budget=0.5),
        TAYLOR(cache_identifiers=[r"blocks\.\d+\.mlp"]),
        "blocks.0.mlp cache_identifiers",
    ),
    "no module": (
        {},
        TAYLOR(cache_identifiers=["transformer_blocks"]),
        "cache_identifiers transformer_blocks",
    ),
    "an end of zeros": (
        {},
        TAYLOR(cache_identifiers=[r"blocks\.0"], skip_predict_identifiers=[r"blocks\.1"]),
        "skip_predict_identifiers cache_identifiers blocks.1",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_would_fail_later_or_give_wrong_images_is_refused(case):
    options, config, facts = case
    model = transformer(**options)
    refuse(facts, model.enable_cache, config)
    assert not model.is_cache_enabled


def test_zeros_before_a_last_block_that_is_predicted_are_taken():
    """Only the last block's output counts in a predicted step."""
    options = dict(disable_cache_before_step=2, taylor_factors_dtype=torch.float32)
    some = deeper()
    some.enable_cache(TaylorSeerCacheConfig(cache_identifiers=BLOCKS, **options))
    last = deeper()
    identifiers = dict(cache_identifiers=[r"blocks\.2"], skip_predict_identifiers=[r"blocks\.[01]"])
    last.enable_cache(TaylorSeerCacheConfig(**identifiers, **options))
    assert_same(steps(some, [500, 490, 480], 4), steps(last, [500, 490, 480], 4))


@pytest.mark.parametrize("enable", [MoHDiTTransformer2DModel.enable_cache, apply_first_block_cache])
def test_statistics_of_skipped_blocks_are_refused(enable):
    model = deeper()
    enable(model, FirstBlockCacheConfig(threshold=1.0))
    x = torch.zeros(2, 4, 4, 4)
    inputs = (x, torch.tensor([500]), LABELS)
    refuse("cache statistics disable_cache forward_routed", model.forward_routed, *inputs)
    with model.cache_context("model"):
        model(*inputs)
        refuse("blocks.1.attn 0 times", token_heads, model, *inputs)


@pytest.mark.parametrize("apply", [MoHDiTTransformer2DModel.enable_cache, apply_first_block_cache])
def test_a_pipeline_reuses_blocks_and_starts_anew_for_each_sampling(apply):
    pipe = pixel_pipeline()
    plain = draw(pipe, [1, 2], 3, 4, steps=20)
    apply(pipe.transformer, FirstBlockCacheConfig(threshold=0.6))
    ran = count_calls(pipe.transformer.blocks[2].attn)
    cached = draw(pipe, [1, 2], 3, 4, steps=20)
    first_time = len(ran)
    assert 0 < first_time < 20
    again = draw(pipe, [1, 2], 3, 4, steps=20)
    assert (again == cached).all() and len(ran) == 2 * first_time
    assert not (cached == plain).all() and abs(cached - plain).max() < 0.2


def test_a_pipeline_starts_anew_after_a_sampling_that_was_interrupted():
    """Steps are counted from 0 again."""
    pipe = pixel_pipeline()
    options = dict(cache_identifiers=BLOCKS, cache_interval=2, disable_cache_before_step=3)
    pipe.transformer.enable_cache(TaylorSeerCacheConfig(**options))
    cached = draw(pipe, [1, 2], 3, 4, steps=8)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw(pipe, [3, 4], 5, 6, steps=8, callback_on_step_end=interrupt)
    assert (draw(pipe, [1, 2], 3, 4, steps=8) == cached).all()


@pytest.mark.parametrize(
    "config",
    [
        FirstBlockCacheConfig(threshold=0.0),
        # Nothing is predicted before step 3, which no part of this sampling reaches.
        TaylorSeerCacheConfig(cache_identifiers=BLOCKS, disable_cache_before_step=3),
    ],
    ids=["first block", "Taylor"],
)
def test_guidance_that_begins_and_ends_and_a_weak_model_of_fewer_heads_do_not_mix(config):
    """The model, the model with both labels, and the model with fewer heads, each in no more than 3 steps on end."""
    pipe = pixel_pipeline()
    options = dict(
        steps=8, guidance_interval=(0.3, 0.7), guide="heads:0.67", guide_scale=1.5, guidance_scale=2
    )
    plain = draw(pipe, [1, 2], 3, 4, **options)
    pipe.transformer.enable_cache(config)
    assert (draw(pipe, [1, 2], 3, 4, **options) == plain).all()


def test_what_a_cache_cannot_do_in_a_pipeline_is_refused():
    pipe = pixel_pipeline()
    pipe.transformer.enable_cache(FirstBlockCacheConfig())
    refuse("graphs FirstBlockCacheConfig disable_cache", pipe, [1], graphs=lambda *_: None)
    refuse("cache statistics disable_cache", pipe, [1], on_routing=lambda *_: None)
    pipe = pixel_pipeline()
    pipe.transformer.enable_cache(broadcast(lambda: 500))
    facts = "guide heads:0.67 PyramidAttentionBroadcastConfig FirstBlockCacheConfig"
    refuse(facts, pipe, [1], guide="heads:0.67", guide_scale=1.5)
    velocity = dict(prediction=dict(path=LINEAR, predict="velocity"), learn_sigma=False)
    for sampler in ("heun", "dopri5"):
        model = deeper(channels=3, **velocity)
        pipe = MoHDiTPipeline(model, make_scheduler(sampler, 4, False, clip=False))
        model.enable_cache(TaylorSeerCacheConfig(cache_identifiers=BLOCKS))
        refuse("TaylorSeerCacheConfig steps FirstBlockCacheConfig", pipe, [1], 1.0)


# ---- weights that are stored in float8


def stored_in(model, dtype):
    return {
        name.removesuffix(".weight") for name, p in model.named_parameters() if p.dtype == dtype
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layerwise_casting_is_that_of_diffusers_dit(dtype):
    """The layers of blocks and the last linear layer are stored in float8, in both models."""
    theirs, ours = as_twins()
    theirs.to(dtype)
    ours.to(dtype)
    plain = predict(ours)
    # diffusers would also cast the modulation of the last layer, but not those of the blocks.
    theirs.enable_layerwise_casting(skip_modules_pattern=("pos_embed", "norm", "proj_out_1"))
    ours.enable_layerwise_casting()
    layers = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
    expected = {f"blocks.{number}.{layer}" for number in range(3) for layer in layers}
    weights = {name for name in stored_in(ours, torch.float8_e4m3fn) if not name.endswith("bias")}
    assert weights == {*expected, "final_layer.linear"}
    cast = predict(ours)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(cast, predict(theirs), rtol=tolerance, atol=tolerance)
    assert not torch.equal(cast, plain)


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_layerwise_casting_computes_with_the_rounded_weights_and_keeps_routers(options):
    """The output is that of a model whose weights were rounded to float8, so no operator reads stored weights."""
    model = transformer(**options)
    rounded = transformer(**options)
    model.enable_layerwise_casting()
    names = stored_in(model, torch.float8_e4m3fn)
    assert not any("router" in name for name in names) and "blocks.0.attn.qkv" in names
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name.removesuffix(".weight") in names:
                parameter.copy_(parameter.to(torch.float8_e4m3fn))
    torch.testing.assert_close(predict(model), predict(rounded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_a_float32_model_computes_in_bfloat16_if_asked(options):
    """As a bfloat16 model with the same weights; before, a float32 token met a bfloat16 weight."""
    model = transformer(**options)
    model.enable_layerwise_casting(compute_dtype=torch.bfloat16)
    other = transformer(**options).to(torch.bfloat16)
    other.enable_layerwise_casting()
    assert model.dtype == torch.bfloat16
    assert torch.equal(predict(model), predict(other))


# ---- blocks that are compiled one by one


@pytest.mark.parametrize("options", WITH_HEADS.values(), ids=WITH_HEADS)
def test_repeated_blocks_compile_each_by_itself(options):
    model = deeper(**options)
    plain = predict(model)
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model.compile_repeated_blocks(backend=backend)
    torch.testing.assert_close(predict(model), plain, rtol=1e-5, atol=1e-5)
    assert compiled


def test_repeated_blocks_compile_as_in_diffusers_dit():
    """Blocks of equal sizes share one graph; the first block of diffusers' DiT gets its tokens in another layout."""
    graphs = {}
    for model in as_twins():
        plain = predict(model)
        compiled = []

        def backend(graph, inputs, compiled=compiled):
            compiled.append(graph)
            return graph.forward

        if not model._repeated_blocks:  # diffusers names those of its newer models alone
            model._repeated_blocks = ["BasicTransformerBlock"]
        torch.compiler.reset()
        model.compile_repeated_blocks(backend=backend, fullgraph=True)
        torch.testing.assert_close(predict(model), plain, rtol=1e-5, atol=1e-5)
        graphs[type(model)] = len(compiled)
    assert graphs[MoHDiTTransformer2DModel] == 1 and graphs[DiTTransformer2DModel] == 2


# ---- weights that are elsewhere between the calls of their layers


def spoil(model):
    """Fill all weights with NaN: those that are offloaded are read from a file before they are used."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))


MODELS = {
    **WITH_HEADS,
    "dense": dict(head_budget=None),
    "MoA": dict(router="moa"),
    "JiT's layers": dict(
        class_tokens=3,
        class_tokens_start=1,
        use_rot_pos_emb=True,
        qk_norm=True,
        norm_layer="rmsnorm",
        swiglu_mlp=True,
        patch_bottleneck=8,
    ),
}
GROUPS = {
    "layer": dict(offload_type="leaf_level"),
    "block": dict(offload_type="block_level", num_blocks_per_group=1),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_no_weight_of_an_offloaded_group_is_read_before_it_is_loaded(options, groups, tmp_path):
    """diffusers' own DiT says that it does not support this: its last layer reads the first block's embedding."""
    model = transformer(**options)
    plain = predict(model)
    cpu = torch.device("cpu")
    model.enable_group_offload(cpu, cpu, offload_to_disk_path=str(tmp_path), **groups)
    for _ in range(2):
        spoil(model)
        torch.testing.assert_close(predict(model), plain, rtol=1e-5, atol=1e-6)
    refuse("DiTTransformer2DModel", as_twins()[0].enable_group_offload, cpu, cpu)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_accelerates_offloading_loads_every_layer_as_in_diffusers_dit(options):
    model = transformer(**options)
    for whole in (model, diffusers_dit(num_layers=2)):
        plain = predict(whole)
        cpu_offload(whole, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in whole.parameters())
        torch.testing.assert_close(predict(whole), plain, rtol=1e-5, atol=1e-6)

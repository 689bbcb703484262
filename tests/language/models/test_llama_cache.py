"""`GrowingCache` holds what DynamicCache holds, whatever is done to it, and does not copy it for every token."""

import copy

import pytest
import torch
from llama_tiny import DEPTH, FAMILIES, WORDS, dense, left_padded, words
from transformers import DynamicCache, Qwen2Config
from transformers.cache_utils import DynamicSlidingWindowLayer

import moh_vision
from moh_vision.language.models.llama.cache import GrowingCache, GrowingLayer

ROWS, GROUPS, D = 2, 3, 4


def pair():
    return GrowingCache(), DynamicCache()


def append(caches, tokens, rows=ROWS):
    k, v = torch.randn(2, rows, GROUPS, tokens, D)
    return [[cache.update(k + layer, v - layer, layer) for layer in range(2)] for cache in caches]


def assert_same(growing, dynamic):
    assert growing.get_seq_length() == dynamic.get_seq_length()
    for ours, theirs in zip(growing, dynamic, strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_whatever_is_done_to_it():
    growing, dynamic = caches = pair()
    steps = [
        lambda cache: cache.crop(-2),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.batch_repeat_interleave(3),
        lambda cache: cache.crop(-1),
        lambda cache: cache.batch_select_indices(torch.tensor([5, 0])),
        lambda cache: cache.crop(-cache.get_seq_length()),
        lambda cache: cache.reset(),
    ]
    rows = ROWS
    append(caches, 5)
    for step in steps:
        for cache in caches:
            step(cache)
        rows = len(dynamic.layers[0].keys) if dynamic.get_seq_length() else ROWS
        for tokens in (1, 1, 3):
            ours, theirs = append(caches, tokens, rows)
            for a, b in zip(ours, theirs):
                assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        assert_same(growing, dynamic)


def test_buffers_are_few():
    cache, places = GrowingCache(), set()
    append([cache], 4)
    for _ in range(100):
        append([cache], 1)
        places.add(cache.layers[0].keys.data_ptr())
    assert cache.get_seq_length() == 104 and len(places) <= 5  # 8, 16, 32, 64, 128
    assert cache.layers[0].key_buffer.shape[2] == 128
    before = cache.layers[0].keys.data_ptr()
    cache.crop(-50)
    append([cache], 3)
    assert cache.layers[0].keys.data_ptr() == before and cache.get_seq_length() == 57


def test_copies_do_not_share():
    cache = GrowingCache()
    append([cache], 3)
    append([cache], 1)
    other, kept = copy.deepcopy(cache), [t.clone() for t in cache.layers[0].keys]
    append([other], 1)
    append([cache], 1)
    assert all(torch.equal(a, b[:, :4]) for a, b in zip(kept, cache.layers[0].keys))
    assert not torch.equal(other.layers[0].keys, cache.layers[0].keys)
    assert torch.equal(other.layers[0].keys[:, :, :4], cache.layers[0].keys[:, :, :4])


def test_in_and_out_of_inference_mode():
    growing, dynamic = caches = pair()
    with torch.inference_mode():
        append(caches, 3), append(caches, 1)
    with torch.no_grad():
        append(caches, 1)
    with torch.inference_mode():
        append(caches, 1)
    assert_same(growing, dynamic)


def test_gradients_flow_as_through_transformers_own():
    gradients = []
    for cache in pair():
        torch.manual_seed(0)
        k, more = torch.randn(2, 1, GROUPS, 3, D, requires_grad=True).unbind()
        leaf = torch.randn(1, GROUPS, 1, D, requires_grad=True)
        cache.update(k, k, 0)
        cache.update(leaf, leaf, 0)
        with torch.no_grad():
            cache.update(more, more, 0)
        keys, values = cache.update(leaf * 2, leaf * 3, 0)
        (keys.sum() + values.pow(2).sum()).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients) and gradients[0].norm() > 0


@pytest.mark.parametrize("executor", ["masked", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generates_the_same(family, executor):
    model = moh_vision.convert(dense(family, torch.float64), head_budget=[(3, 2), (2, 1)], executor=executor).eval()
    for options in ({}, dict(num_beams=3), dict(prompt_lookup_num_tokens=2, eos_token_id=WORDS)):
        inputs = dict(input_ids=words(1)) if "prompt_lookup_num_tokens" in options else left_padded()
        found = []
        for cache in (GrowingCache(config=model.config), DynamicCache(config=model.config)):
            found.append(model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False, **options))
            assert len(cache.layers) == DEPTH and cache.get_seq_length() > 9
        assert torch.equal(*found)


def test_layers():
    config = Qwen2Config(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=2, hidden_size=32
    )
    kinds = [type(layer) for layer in GrowingCache(config=config).layers]
    assert kinds == [GrowingLayer, GrowingLayer, DynamicSlidingWindowLayer]
    k = torch.randn(1, GROUPS, 3, D)
    given = GrowingCache([(k, -k)])
    assert type(given.layers[0]) is GrowingLayer and torch.equal(given.layers[0].values, -k)

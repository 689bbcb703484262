"""Manifests, records and configurations beside data that are damaged or made up: one line that names the file."""

import json

import pytest
from pictures import convert, write_folder
from repeat import cases
from tiny_vae import save_tiny_vae, write_latents

from moh_vision.diffusion.latents.stored import LatentCache
from moh_vision.diffusion.latents.vae import load_vae


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_folder(folder / "images", train=4, val=1)
    save_tiny_vae(folder / "vae")
    assert write(folder) == 0 and convert(folder / "images", folder / "shards") == 0
    return folder


def write(folder):
    return write_latents(
        f"--vae {folder}/vae --data {folder}/images --out {folder}/latents --size 8 --workers 0".split()
    )


JUNK = [None, 5, -1, 1.5, "x", [], {}, [1], {"a": 1}, True, 2**70, ""]


def places(tree, path=()):
    """Where values stand in a tree of JSON."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def changed(tree, path, value):
    tree = json.loads(json.dumps(tree))
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


def check(file, read, text) -> bool:
    """Whether `read` refuses the text, which it then does in one line."""
    try:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        read()
        return False
    except (ValueError, FileNotFoundError) as error:
        assert "\n" not in str(error) and (file.name in str(error) or str(file.parent) in str(error)), str(error)
        return True


def test_every_value_of_a_record(world):
    """Each replaced by junk of every type: refused, or the latents are read as before (the name of a VAE is any text)."""
    file = world / "latents" / "train.meta.json"
    whole = file.read_text()
    tree, refused, tried = json.loads(whole), 0, 0
    before = LatentCache(str(world / "latents"), "train").moments(0)

    def read():
        cache = LatentCache(str(world / "latents"), "train")
        assert cache.moments(0).shape == before.shape and len(cache.classes) == 2
        assert isinstance(cache.space.scaling_factor, (int, float)) and str(cache.space)

    try:
        for path in places(tree):
            for value in JUNK:
                tried += 1
                refused += check(file, read, json.dumps(changed(tree, path, value)))
    finally:
        file.write_text(whole)
    print(f"{refused} of {tried} refused")
    assert refused > tried // 2


@pytest.mark.parametrize("what", ["latents", "shards"])
def test_records_that_are_damaged_are_not_written_on(world, capsys, what):
    file = world / what / dict(latents="train.meta.json", shards="train.shards.json")[what]
    whole = file.read_text()
    start = dict(latents=lambda: write(world), shards=lambda: convert(world / "images", world / "shards"))[what]
    texts = ["null", "5", "{}", "[]", "[" * 100_000, b"\xff\xfe"]
    for place in (("format",), ("made_from",), ("made_from", "--seed"), ("shards",), ("shards", 0)):
        texts += [json.dumps(changed(json.loads(whole), place, value)) for value in ("x", [1])]
    wrong = (("shard", 5), ("samples", "x"), ("sha256", None), ("bad", 5), ("bad", [[1]]), ("bad", [["a", 1]]))
    texts += [json.dumps(changed(json.loads(whole), ("shards", 0, place), value)) for place, value in wrong]
    try:
        for text in texts:
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            assert start() == 2, text
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and (str(file) in error or f"--out {file.parent}" in error), error
    finally:
        file.write_text(whole)
    assert start() == 0  # as if nothing had been


def test_a_vae_whose_configuration_or_weights_are_damaged(world, tmp_path):
    rng = cases(60, "damaged VAEs")
    save_tiny_vae(tmp_path)
    refused = 0
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        file = tmp_path / name
        whole = file.read_bytes()
        texts = [b"", b"5", b"null", b"[]", b"[" * 100_000, b"\xff"]
        for _ in range(24):
            damaged = bytearray(whole)
            damaged[rng.randrange(min(len(whole), 1000))] = rng.randrange(256)
            texts.append(bytes(damaged))
        for text in texts:
            refused += check(file, lambda: load_vae(str(tmp_path)), text)
        file.write_bytes(whole)
    assert refused > 30

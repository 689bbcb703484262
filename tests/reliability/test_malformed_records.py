"""Manifests, records and configurations beside data that are damaged or made up: one line that names the file."""

import json

import pytest
from pictures import convert, write_folder
from tiny_vae import save_tiny_vae, write_latents

from moh_vision.diffusion.latents.stored import LatentCache


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
                file.write_text(json.dumps(changed(tree, path, value)))
                try:
                    read()
                except (ValueError, FileNotFoundError) as error:
                    assert "\n" not in str(error) and (file.name in str(error) or str(file.parent) in str(error)), error
                    refused += 1
    finally:
        file.write_text(whole)
    print(f"{refused} of {tried} refused")
    assert refused > tried // 2


@pytest.mark.parametrize("kind", ["latents", "shards"])
def test_records_that_are_damaged_are_not_written_on(world, capsys, kind):
    file = world / kind / dict(latents="train.meta.json", shards="train.shards.json")[kind]
    whole = file.read_text()
    start = dict(latents=lambda: write(world), shards=lambda: convert(world / "images", world / "shards"))[kind]
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

"""A command reads each tensor of a run once, and none where it does not need their values."""

from collections import Counter
from pathlib import Path

import pytest

from moh_vision.__main__ import main
from moh_vision.common.io import TensorFiles
from tests.support.pictures import write_folder

COMMANDS = {
    "table": "{cls}",
    "report": "{cls} {clm} --output {out}.html",
    "predict": "{cls} {images}",
    "patches": "{cls} --image {image} --output {out}.png",
    "export": "{cls} --format torch-export --output {out}.pt2",
    "budget-curve": "{cls} --rounds 1 --shares 0.5 1 --output {out}.png",
    "sampling-curve": "{dit} --over cfg_scale 1 2 --steps 2 --num-images 40 --score digits --extractor {cls} --output {out}.png",
    "publish": "{cls} --output {out}",
    "publish of a diffusion model": "{dit} --output {out}",
    "publish of a language model": "{clm} --output {out}",
}
WITHOUT_VALUES = ("table", "report")


@pytest.mark.parametrize("case", COMMANDS)
def test_each_tensor_is_read_once(case, trained, tmp_path, monkeypatch):
    images = write_folder(tmp_path / "images", size=(8, 8))
    image = next(path for path in sorted(images.rglob("*")) if path.is_file())
    runs = {name: trained(name, 2, "--save-every", 1) for name in ("cls", "dit", "clm")}
    argv = COMMANDS[case].format(**runs, images=images, image=image, out=tmp_path / "out")
    reads: Counter = Counter()
    opened: Counter = Counter()
    read = TensorFiles.read
    make = TensorFiles.__init__

    def counted_read(self, name):
        reads[self.path, name] += 1
        return read(self, name)

    def counted_make(self, path):
        self.path = str(path)
        opened[self.path] += 1
        make(self, path)

    monkeypatch.setattr(TensorFiles, "read", counted_read)
    monkeypatch.setattr(TensorFiles, "__init__", counted_make)
    command = case.split()[0]
    assert main([command, *argv.split()]) == 0
    # Its metadata, its shapes, its tensors. The report's table and its descriptions each find the run.
    assert opened and max(opened.values()) <= 4
    if command in WITHOUT_VALUES:
        assert not reads
    else:
        assert set(reads.values()) == {1}
        files = {path for path, _ in reads}
        assert len(files) == len(
            {Path(file).parent for file in files}
        )  # either the EMA or the model

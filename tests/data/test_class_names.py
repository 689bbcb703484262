"""Names of classes as editors and file systems write them: byte order marks, empty lines, decomposed umlauts."""

import unicodedata

import pytest

from moh_vision.common.io import class_names
from moh_vision.data.splits import open_source, open_splits
from moh_vision.diffusion.config import chosen_classes
from tests.support.pictures import convert, write_folder
from tests.support.refusals import one_line
from tests.support.shards import write_shards

# The umlaut is two characters, a letter and its dots, as a Mac writes the name of a folder.
DECOMPOSED = unicodedata.normalize("NFD", "Übersee")


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n \n"])
def test_a_byte_order_mark_and_empty_lines_at_the_end_are_no_names(tmp_path, end):
    root = write_shards(tmp_path / "shards")
    text = "\ufeffant\r\nbee  \n" + DECOMPOSED + end
    (root / "classes.txt").write_text(text, encoding="utf-8", newline="")
    assert open_source(str(root), "train").classes == ["ant", "bee", "Übersee"]


@pytest.mark.parametrize(
    "text, facts",
    [
        ("ant\n\nbee\ncat\n", "2 empty name class"),
        ("\nant\nbee\ncat\n", "1 empty name class"),
        ("ant\nbee\nant\n", "1 3 ant"),
        (f"Übersee\nbee\n{DECOMPOSED}\n", "1 3 Übersee"),
    ],
)
def test_lines_that_shift_or_repeat_names_are_refused(tmp_path, text, facts):
    root = write_shards(tmp_path / "shards")
    (root / "classes.txt").write_text(text, encoding="utf-8")
    with one_line(f"{root}/classes.txt {facts}"):
        open_source(str(root), "train")


def test_umlauts_of_a_mac_are_those_that_are_typed(tmp_path):
    root = write_folder(tmp_path / "data", classes=("Zoo", "Übersee"), train=2, val=1)
    (root / "train" / "Übersee").rename(root / "train" / DECOMPOSED)
    train, val = open_splits(str(root))
    assert train.classes == val.classes == ["Zoo", "Übersee"]
    # Images are opened by the name that the folder really has.
    assert [train.image(i).size for i in range(4)] == 4 * [(12, 8)]
    assert chosen_classes("--classes", [DECOMPOSED], train.classes) == [1]
    assert chosen_classes("--classes", ["Übersee"], ["Zoo", DECOMPOSED]) == [1]
    assert convert(root, tmp_path / "shards") == 0
    assert class_names(tmp_path / "shards" / "classes.txt") == ["Zoo", "Übersee"]
    (root / "train" / "Übersee").mkdir()
    with one_line(f"{root}/train two folders Übersee"):
        open_source(str(root), "train")

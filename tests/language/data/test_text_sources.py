import gzip
import json
import os
import sys
import types
from pathlib import Path

import pytest

from moh_vision.common.errors import user_errors
from moh_vision.language.data.sources import find_lines, find_pairs
from tests.support.paths import ROOT
from tests.support.refusals import refuse

MULTI30K = Path(os.environ.get("MOH_VISION_MULTI30K", ROOT.parent / "shared" / "data" / "multi30k"))
DE = ["Größe zählt.", "Zwei junge Männer", "Ein Hund"]
EN = ["Size matters.", "Two young men", "A dog"]


def write(folder, **files):
    """name with _ for . -> lines; names that end in _gz are compressed."""
    folder.mkdir(exist_ok=True)
    for name, lines in files.items():
        if isinstance(lines, bytes):
            data = lines
        else:
            data = "".join(f"{line}\n" for line in lines).encode()
        if name.endswith("_gz"):
            data = gzip.compress(data)
        (folder / name.replace("_", ".")).write_bytes(data)
    return str(folder)


def assert_refused(facts, call):
    refuse(facts, call, error=(ValueError, FileNotFoundError))


def test_pairs_stand_line_by_line_whatever_the_form(tmp_path):
    crlf = "\ufeff" + "".join(f"  {line} \r\n" for line in EN)
    files = dict(
        train_de_gz=DE, train_en=crlf.encode()[:-2], dev_de=DE, dev_en=EN, odd_de=DE, odd_en=EN
    )
    root = write(tmp_path / "d", **files)
    assert list(zip(*find_pairs(root, "train", "de", "en"))) == list(zip(DE, EN))
    assert list(zip(*find_pairs(root, "val", "en", "de"))) == list(
        zip(EN, DE)
    )  # val is called dev here
    assert find_pairs(root, "odd", "de", "en").check() == 3


def test_what_is_inside_a_line_or_document_stays(tmp_path):
    line = "a\u2028b\x0bc\x85d  e\tf"
    documents = [json.dumps(dict(text=text)) for text in (line, "", " two\nlines ")]
    root = write(
        tmp_path / "d",
        train_txt=[line, "", " = T = "],
        val_jsonl_gz=[documents[0], "", *documents[1:]],
    )
    assert list(find_lines(root, "train")) == [line, "", "= T ="]
    assert list(find_lines(root, "val")) == [line, " two\nlines "]


@pytest.mark.parametrize("longer", ["de", "en"])
def test_unequal_lengths_name_both_counts(tmp_path, longer):
    files = dict(de=DE, en=EN)
    files[longer] = files[longer] + ["more", "and more"]
    root = write(tmp_path / "d", train_de=files["de"], train_en=files["en"])
    counts = dict(de=3, en=3) | {longer: 5}
    facts = f"{root}/train.de {counts['de']} {root}/train.en {counts['en']}"
    assert_refused(facts, find_pairs(root, "train", "de", "en").check)


def test_empty_sides_are_refused_named_and_counted(tmp_path):
    root = write(
        tmp_path / "d", train_de=["a", "b", "", "", "e"], train_en=["a", " \t", "c", "", "e"]
    )
    pair = find_pairs(root, "train", "de", "en")
    assert_refused(f"{root}/train.en line 2 empty 3 5 data.allow_empty true", pair.check)
    assert pair.check(allow_empty=True) == 5


@pytest.mark.parametrize(
    "name, data, facts",
    [
        ("train.txt", b"good\nGr\xf6\xdfe\n", "2 UTF-8 0xf6 3"),
        ("train.txt", "good\n".encode("utf-16"), "1 NUL UTF-8"),
        ("train.txt", b"one\ntwo\nthr\0ee\n", "3 NUL UTF-8"),
        ("train.txt", b"", "empty"),
        ("train.jsonl", b'{"text": "a"}\n{"txt": "a"}\n', "2 'text' --key"),
    ],
    ids=["Latin 1", "UTF-16", "a NUL", "nothing", "another key"],
)
def test_bad_bytes_are_named_by_line(tmp_path, name, data, facts):
    root = write(tmp_path / "d", **{name.replace(".", "_"): data})
    assert_refused(f"{root}/{name} {facts}", lambda: list(find_lines(root, "train")))


@pytest.mark.parametrize(
    "damage",
    [lambda d: d[: len(d) // 2], lambda d: b"no gzip", lambda d: d[:30] + b"\xff" * 9 + d[39:]],
)
def test_damaged_gzip(tmp_path, damage):
    root = write(tmp_path / "d", train_txt_gz=[f"line {i * i}" for i in range(300)])
    path = tmp_path / "d" / "train.txt.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(f"{path} gzip line", lambda: list(find_lines(root, "train")))


def test_a_file_without_line_breaks_is_not_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("moh_vision.language.data.sources.MAX_LINE", 1 << 20)
    root = write(tmp_path / "d", train_txt=b"x" * (3 << 20))
    assert_refused(f"{root}/train.txt line 1 MiB", lambda: list(find_lines(root, "train")))


def test_missing_files_and_what_is_there(tmp_path):
    root = write(tmp_path / "d", train_de=DE, val_en=EN)
    facts = f"data.root {root} train.en .gz train.de val.en"
    assert_refused(facts, lambda: find_pairs(root, "train", "de", "en"))
    facts = f"data.root {root} val.txt val.jsonl valid.txt dev.txt .gz train.de val.en"
    assert_refused(facts, lambda: find_lines(root, "val"))
    facts = f"data.root {tmp_path}/none train.txt hfds/NAME"
    assert_refused(facts, lambda: find_lines(str(tmp_path / "none"), "train"))
    facts = "data.source data.target de same"
    assert_refused(facts, lambda: find_pairs(root, "train", "de", "de"))
    write(tmp_path / "d", train_de_gz=DE)
    facts = f"data.root {root} train.de train.de.gz"
    assert_refused(facts, lambda: find_pairs(root, "train", "de", "en"))
    os.mkfifo(tmp_path / "d" / "test.txt")
    assert_refused(f"{root}/test.txt file pipe", lambda: find_lines(root, "test"))


class Table(list):
    """What is used of datasets.Dataset."""

    def __init__(self, rows, features):
        super().__init__(rows)
        self.features = features
        self.column_names = list(features)
        self._fingerprint = "f1"


@pytest.fixture
def hub(monkeypatch):
    rows = [{"translation": dict(de=d, en=e)} for d, e in zip(DE, EN)]
    languages = types.SimpleNamespace(languages=("de", "en"))
    sets = {
        ("org/wmt", "de-en"): dict(train=Table(rows, dict(translation=languages))),
        ("org/wiki", None): dict(
            validation=Table([{"text": t} for t in ("", " = A =\n", "b\nc")], dict(text=None))
        ),
        ("org/holes", None): dict(train=Table([{"text": "a"}, {"text": None}], dict(text=None))),
        ("org/numbers", None): dict(train=Table([{"text": 5}], dict(text=None))),
    }

    def load_dataset(name, config=None):
        if (name, config) not in sets:
            raise ValueError(f"no {name}")
        return sets[name, config]

    exceptions = types.SimpleNamespace(DatasetsError=RuntimeError)
    library = types.SimpleNamespace(load_dataset=load_dataset, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", library)


def test_hugging_face_data_sets(hub, capsys):
    pair = find_pairs("hfds/org/wmt:de-en", "train", "en", "de")
    assert list(zip(*pair)) == list(zip(EN, DE))
    assert pair.source.fingerprint() != pair.target.fingerprint()
    for _ in range(2):
        assert list(find_lines("hfds/org/wiki", "val")) == ["", "= A =", "b c"]
    said = capsys.readouterr().out
    assert "hfds/org/wiki, split validation: 1 of 3 texts have several lines" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "call, facts",
    [
        (lambda: find_lines("hfds/org/other", "train"), "data.root hfds/org/other org/other"),
        (lambda: find_lines("hfds/org/wiki", "train"), "data.root hfds/org/wiki train validation"),
        (
            lambda: find_lines("hfds/org/wmt:de-en", "train"),
            "data.root hfds/org/wmt:de-en train text translation",
        ),
        (
            lambda: find_pairs("hfds/org/wmt:de-en", "train", "de", "fr"),
            "hfds/org/wmt:de-en train fr de en",
        ),
        (
            lambda: list(find_lines("hfds/org/holes", "train")),
            "hfds/org/holes train 2 text",
        ),
        (
            lambda: list(find_lines("hfds/org/numbers", "train")),
            "hfds/org/numbers train 1 text",
        ),
    ],
)
def test_hugging_face_mistakes(hub, call, facts):
    assert_refused(facts, call)


def test_without_datasets_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit), user_errors("train_text.py"):
        find_lines("hfds/some/name", "train")
    assert (
        "the package datasets is missing: pip install 'moh_vision[hub]'" in capsys.readouterr().err
    )


def test_multi30k():
    if not MULTI30K.is_dir():
        pytest.skip(f"no Multi30k at {MULTI30K} (set MOH_VISION_MULTI30K)")
    assert find_pairs(str(MULTI30K), "val", "de", "en").check() == 1014
    assert find_pairs(str(MULTI30K), "test_2016_flickr", "de", "en").check() == 1000

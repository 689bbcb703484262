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
from tests.support.refusals import one_line

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


def message(call):
    with one_line(error=(ValueError, FileNotFoundError)) as error:
        call()
    return str(error.value)


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
    text = message(find_pairs(root, "train", "de", "en").check)
    counts = dict(de=3, en=3) | {longer: 5}
    assert (
        f"train.de has {counts['de']} lines, " in text and f"train.en has {counts['en']}; " in text
    )


def test_empty_sides_are_refused_named_and_counted(tmp_path):
    root = write(
        tmp_path / "d", train_de=["a", "b", "", "", "e"], train_en=["a", " \t", "c", "", "e"]
    )
    pair = find_pairs(root, "train", "de", "en")
    text = message(pair.check)
    assert (
        f"{root}/train.en, line 2: empty (pairs with an empty side: 3 of 5)" in text
        and "data.allow_empty" in text
    )
    assert pair.check(allow_empty=True) == 5


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"good\nGr\xf6\xdfe\n", "train.txt, line 2: not UTF-8 (byte 0xf6 at 3)"),
        ("good\n".encode("utf-16"), "train.txt, line 1: a NUL character"),
        (b"one\ntwo\nthr\0ee\n", "train.txt, line 3: a NUL character"),
        (b"", "train.txt: the file is empty"),
        (b'{"text": "a"}\n{"txt": "a"}\n', "train.jsonl, line 2: no text under the key 'text'"),
    ],
)
def test_bad_bytes_are_named_by_line(tmp_path, data, expected):
    root = write(
        tmp_path / "d", **{expected.partition(":")[0].partition(",")[0].replace(".", "_"): data}
    )
    assert expected in message(lambda: list(find_lines(root, "train")))


@pytest.mark.parametrize(
    "damage",
    [lambda d: d[: len(d) // 2], lambda d: b"no gzip", lambda d: d[:30] + b"\xff" * 9 + d[39:]],
)
def test_damaged_gzip(tmp_path, damage):
    root = write(tmp_path / "d", train_txt_gz=[f"line {i * i}" for i in range(300)])
    path = tmp_path / "d" / "train.txt.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert "train.txt.gz: damaged gzip file behind line" in message(
        lambda: list(find_lines(root, "train"))
    )


def test_a_file_without_line_breaks_is_not_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("moh_vision.language.data.sources.MAX_LINE", 1 << 20)
    root = write(tmp_path / "d", train_txt=b"x" * (3 << 20))
    assert "line 1: more than 1 MiB" in message(lambda: list(find_lines(root, "train")))


def test_missing_files_and_what_is_there(tmp_path):
    root = write(tmp_path / "d", train_de=DE, val_en=EN)
    text = message(lambda: find_pairs(root, "train", "de", "en"))
    assert "no train.en (or .gz); it holds train.de, val.en" in text
    assert "no val.txt or val.jsonl or valid.txt or " in message(lambda: find_lines(root, "val"))
    assert "no such folder" in message(lambda: find_lines(str(tmp_path / "none"), "train"))
    assert "same language" in message(lambda: find_pairs(root, "train", "de", "de"))
    write(tmp_path / "d", train_de_gz=DE)
    assert "both train.de and train.de.gz" in message(lambda: find_pairs(root, "train", "de", "en"))
    os.mkfifo(tmp_path / "d" / "test.txt")
    assert "not a file" in message(lambda: find_lines(root, "test"))


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
    "call, expected",
    [
        (lambda: find_lines("hfds/org/other", "train"), "data.root hfds/org/other: no org/other"),
        (lambda: find_lines("hfds/org/wiki", "train"), "no split train; it has validation"),
        (lambda: find_lines("hfds/org/wmt:de-en", "train"), "no column text; it has translation"),
        (
            lambda: find_pairs("hfds/org/wmt:de-en", "train", "de", "fr"),
            "no language fr; it has de, en",
        ),
        (
            lambda: list(find_lines("hfds/org/holes", "train")),
            "hfds/org/holes, split train, row 2: no text",
        ),
        (
            lambda: list(find_lines("hfds/org/numbers", "train")),
            "hfds/org/numbers, split train, row 1: no text",
        ),
    ],
)
def test_hugging_face_mistakes(hub, call, expected):
    assert expected in message(call)


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

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from moh_vision.language.config import TextDataConfig
from moh_vision.language.data.inputs import CausalInputs, TranslationInputs
from moh_vision.language.data.sources import TextFile, find_lines, find_pairs
from moh_vision.language.data.tokens import encoded
from moh_vision.language.data.vocabulary import (
    EOS,
    MASK,
    UNK,
    Vocabulary,
    train_vocabulary,
    trained_vocabulary,
)
from tests.support.paths import ROOT
from tests.support.refusals import assert_says, one_line, refuse

WIKITEXT2 = Path(
    os.environ.get("MOH_VISION_WIKITEXT2", ROOT.parent / "shared" / "data" / "wikitext2")
)
GERMAN = [
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "Ein Junge übt „Fußball“ – für 3,50 € pro Stunde!",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "ÄÖÜ äöü ß, naïve Straßenverkäuferinnen; d'accord?",
]
ENGLISH = [
    "Two young, White males are outside near many bushes.",
    'A boy\'s practising "football" -- at 3.50 an hour!',
    "Several men in hard hats are operating a giant pulley system.",
    "It isn't the well-known  double  blank\tor tab.",
]
OTHERS = ("a normalizer", "a gap", "twice", "other specials")  # tokenizers that are foreign
STRANGE = ["日本語 и русский 🙂", "a\u2028b\x85c", "<s> is </s> text <pad>, <mask> too", "x\u00a0y"]


@pytest.fixture(scope="module")
def bpe():
    return train_vocabulary((GERMAN + ENGLISH) * 2, 150, mask=True)


def test_decoding_gives_the_text_back(bpe):
    for text in GERMAN + ENGLISH + STRANGE:
        [ids] = bpe.encode([text])
        assert min(ids) >= bpe.specials and max(ids) < len(bpe)
        assert bpe.decode([1, *ids, EOS, 0, 0]) == text
    assert (
        "\n" not in bpe.decode([i for text in "a\nb" for i in bpe.encode([text])[0]])
        and bpe.decode([]) == ""
    )
    assert len(bpe) == 5 + 256 + 150 and bpe.specials == 5
    assert [bpe.token(i) for i in range(5)] == ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    small = train_vocabulary(["ab ab ab"], 1000)  # Ġa, Ġab: no pair comes twice in another word
    assert len(small) == 4 + 256 + 2 and small.specials == 4


def test_unknown_words_of_wikitext_are_unk(bpe):
    [ids] = bpe.encode(["Two <unk> men <unk>"])
    assert ids.count(UNK) == 2 and bpe.decode(ids) == "Two <unk> men <unk>"
    without = train_vocabulary(["a <unk> b"] * 50, 20)
    assert not any("unk" in without.token(i) for i in range(4, len(without)))


def test_lowercase():
    lower = train_vocabulary(GERMAN * 2, 50, lowercase=True)
    assert lower.lowercase and lower.decode(lower.encode([GERMAN[3]])[0]) == GERMAN[3].lower()


def test_words_by_frequency():
    words = train_vocabulary(["b a c a </s>", "b a <unk> d"], mask=False)
    assert [words.token(i) for i in range(4, len(words))] == [
        "a",
        "b",
        "c",
        "d",
    ]  # ties by alphabet
    assert words.encode(["a x </s> <unk> b"]) == [[4, UNK, UNK, UNK, 5]]
    assert words.decode([1, 4, UNK, 5, 2]) == "a <unk> b"
    assert len(train_vocabulary(["b a c"], words=1)) == 5


def test_saved_and_loaded(bpe, tmp_path):
    bpe.save(tmp_path / "run" / "tokenizer.json", CausalInputs.form)
    again = Vocabulary.load(tmp_path / "run" / "tokenizer.json")
    assert (again.fingerprint, len(again), again.scheme) == (bpe.fingerprint, len(bpe), "bpe")
    ids = bpe.encode(GERMAN + STRANGE)
    assert (
        again.encode(GERMAN + STRANGE)
        == ids
        == pickle.loads(pickle.dumps(bpe)).encode(GERMAN + STRANGE)
    )
    # transformers reads the folder, and encodes alike, behind what stands before a text in training.
    other = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert other(GERMAN + STRANGE)["input_ids"] == [[EOS, *row] for row in ids]
    assert [other.decode(row, skip_special_tokens=True) for row in ids] == GERMAN + STRANGE
    assert (other.bos_token_id, other.eos_token_id, other.pad_token_id) == (EOS, EOS, 0)


def changed(data, **entries):
    content = json.loads(data)
    for path, value in entries.items():
        *parents, last = path.split("__")
        inner = content
        for key in parents:
            inner = inner[key]
        inner[last] = value
    return json.dumps(content).encode()


def test_damaged_and_foreign_files_are_one_line(bpe, tmp_path):
    vocab = json.loads(bpe.data)["model"]["vocab"]
    bad = {
        "cut off": bpe.data[: len(bpe.data) // 2],
        "binary": bytes(range(256)),
        "deep": b"[" * 100_000,
        "a list": b"[1]",
        "no model": b"{}",
        "unigram": changed(bpe.data, model__type="Unigram"),
        "a costly pattern": changed(
            bpe.data, pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}}
        ),
        "a normalizer": changed(
            bpe.data, normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
        ),
        "a gap": changed(bpe.data, model__vocab={**vocab, "more": len(vocab) + 7}),
        "twice": changed(bpe.data, model__vocab={**vocab, "more": 9}),
        "huge": changed(bpe.data, model__vocab={**vocab, "more": 2**70}),
        "texts": changed(bpe.data, model__vocab={**vocab, "more": "9"}),
        "truth": changed(bpe.data, model__vocab={k: bool(v) for k, v in list(vocab.items())[:2]}),
        "no bytes": changed(bpe.data, model__vocab=dict(list(vocab.items())[:100])),
        "other specials": bpe.data.replace(b'"<s>"', b'"<x>"'),
        "a merge to no token": changed(
            bpe.data, model__merges=[["a", "]"]]
        ),  # which aborts tokenizers itself
        "a merge of one": changed(bpe.data, model__merges=[["a"]]),
        "no merges": changed(bpe.data, model__merges=None),
        "a number below 0": changed(bpe.data, model__vocab={**vocab, "more": -1}),
        "another model": changed(bpe.data, model__type="Strange"),
        "a pattern": changed(
            bpe.data, pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "invert": False}
        ),
    }
    path = tmp_path / "tokenizer.json"
    path.write_bytes(changed(bpe.data, model__vocab={**vocab, "more": 1 << 30}))
    refuse(
        f"{path} 1073741824 16777216",
        lambda: Vocabulary.load(path, foreign=True),
    )
    for what, data in bad.items():
        path.write_bytes(data)
        if what not in OTHERS:
            refuse(f"{path} tokenizer.json", lambda: Vocabulary.load(path, foreign=True))
        with one_line(f"{path} not tokenizer.json") as error:
            Vocabulary.load(path)
        assert len(str(error.value)) < 600, what


@pytest.fixture
def pair(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "train.de").write_text("\n".join(GERMAN * 3) + "\n")
    (folder / "train.en").write_text("\n".join(ENGLISH * 3) + "\n")
    return find_pairs(str(folder), "train", "de", "en")


def vocabularies(folder, cache, **options):
    data = TextDataConfig(root=str(folder), source="de", target="en", val="train", **options)
    return TranslationInputs(data, str(cache), 0).vocabularies


def test_vocabularies_are_trained_once(pair, tmp_path, capsys):
    folder = tmp_path / "d"
    cache = tmp_path / "cache"
    joint, same = vocabularies(folder, cache, merges=60)
    assert joint is same
    source, target = vocabularies(folder, cache, merges=60, target_merges=40)
    assert (len(source), len(target)) == (320, 300)
    files = sorted(cache.glob("*/tokenizer.json"))
    assert len(files) == 3
    assert vocabularies(folder, cache, merges=60)[0].fingerprint == joint.fingerprint
    assert sorted(cache.glob("*/tokenizer.json")) == files
    # Another text, and a damaged file, are trained again.
    for path in files:
        path.write_bytes(b"{")
    capsys.readouterr()
    assert vocabularies(folder, cache, merges=60)[0].fingerprint == joint.fingerprint
    assert capsys.readouterr().out.count("making it again") == 1
    Path(pair.source.path).write_text("\n".join(ENGLISH * 3) + "\n")
    assert vocabularies(folder, cache, merges=60)[0].fingerprint != joint.fingerprint


def test_cached_tokens_are_used_checked_and_made_again(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("moh_vision.language.data.tokens.TEXTS_AT_ONCE", 5)
    cache = str(tmp_path / "c")
    vocabulary = trained_vocabulary(pair, cache, merges=80)
    first = encoded(pair.source, vocabulary, cache)
    assert [row.tolist() for row in first] == [ids + [EOS] for ids in vocabulary.encode(GERMAN * 3)]
    assert isinstance(first.ids, np.memmap) and first.words == sum(
        len(line.split()) + 1 for line in GERMAN * 3
    )
    (store,) = first.paths
    files = {path: path.read_bytes() for path in store.iterdir()}
    damages = 0
    times = [path.stat().st_mtime_ns for path in files]
    assert encoded(pair.source, vocabulary, cache).paths == first.paths and len(files) == 3
    assert [path.stat().st_mtime_ns for path in files] == times
    for path, whole in files.items():
        flipped = [
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (3, len(whole) - 2)
        ]
        for damaged in (whole[:-9], whole[:40], b"", whole + b"x" * 8, *flipped):
            path.unlink()
            path.write_bytes(damaged)
            assert encoded(pair.source, vocabulary, cache).ids.tolist() == first.ids.tolist()
            assert path.read_bytes() == whole
            damages += 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == damages and all("making it again" in text for text in said)
    # A changed text and another vocabulary find nothing.
    Path(pair.source.path).write_text("neu\n")
    assert len(encoded(TextFile(pair.source.path), vocabulary, cache)) == 1
    other = train_vocabulary(GERMAN * 2, 20)
    assert encoded(pair.target, other, cache).paths != encoded(pair.target, vocabulary, cache).paths


def test_after_an_error_nothing_is_left(tmp_path, bpe):
    (tmp_path / "train.txt").write_bytes(b"good\n" * 3000 + b"\xff\n")
    (tmp_path / "blank.txt").write_text("\n \n\n")
    with one_line(f"{tmp_path}/train.txt 3001 UTF-8 0xff"):
        encoded(find_lines(str(tmp_path), "train"), bpe, str(tmp_path / "c"))
    with one_line(f"{tmp_path}/blank.txt no text empty"):
        encoded(find_lines(str(tmp_path), "blank"), bpe, str(tmp_path / "c"), skip_empty=True)
    assert list((tmp_path / "c").iterdir()) == []
    with pytest.raises(OSError) as error:
        encoded(find_lines(str(tmp_path), "train"), bpe, str(tmp_path / "train.txt"))
    assert_says(str(error.value), f"{tmp_path}/train.txt")


def test_wrong_pairs_are_found_when_they_are_encoded(pair, tmp_path, bpe):
    bpe.save(tmp_path / "bpe" / "tokenizer.json", TranslationInputs.form)

    def inputs(**options):
        data = TextDataConfig(
            root=str(tmp_path / "d"), source="de", target="en", val="train", **options
        )
        return TranslationInputs(data, str(tmp_path / "c"), 0, str(tmp_path / "bpe"))

    Path(pair.target.path).write_text("\n".join([*ENGLISH * 2, "", *ENGLISH]))
    refuse(f"{tmp_path}/d/train.de 12 {tmp_path}/d/train.en 13", inputs)
    Path(pair.target.path).write_text("\n".join(["", *ENGLISH * 3][:12]))
    for _ in range(2):  # also from the caches
        refuse(f"{tmp_path}/d/train.en 1 empty 12 data.allow_empty", inputs)
    text = inputs(allow_empty=True)
    assert (
        len(text.train) == 11
        and len(text.train.target) == 12
        and text.train.target[0].tolist() == [EOS]
    )
    refuse(
        f"{tmp_path}/d/train.en 1 empty",
        lambda: vocabularies(tmp_path / "d", tmp_path / "c2", merges=10),
    )
    assert not (tmp_path / "c2").exists()


def test_wikitext2_has_the_papers_number_of_words(tmp_path):
    if not WIKITEXT2.is_dir():
        pytest.skip(f"no WikiText-2 at {WIKITEXT2} (set MOH_VISION_WIKITEXT2)")
    text = find_lines(str(WIKITEXT2), "test")
    words = trained_vocabulary([text], str(tmp_path))
    tokens = encoded(text, words, str(tmp_path))
    assert len(tokens.ids) == tokens.words == 245_569  # Merity et al. 2017, table 1, test
    counts = np.bincount(tokens.ids, minlength=len(words))[4:]
    assert (np.diff(counts) <= 0).all() and counts[-1] == 1  # falling, as adaptive softmaxes need
    assert (tokens.ids == MASK).sum() == counts[0]  # 4 is the commonest word where there is no mask
    assert (tokens.ids == UNK).sum() == sum(line.split().count("<unk>") for line in text)

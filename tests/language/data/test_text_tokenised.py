"""Text that comes as token ids: plain files, foreign tokenizers, and the command that makes them."""

import gzip
import json
import pickle

import numpy as np
import pytest
from refusals import one_line, refuse
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from moh_vision.__main__ import main
from moh_vision.language.config import TextDataConfig
from moh_vision.language.data.blocks import CausalWindows
from moh_vision.language.data.inputs import CausalInputs
from moh_vision.language.data.sources import TextFile, find_tokens
from moh_vision.language.data.tokens import Tokens, encoded
from moh_vision.language.data.vocabulary import Vocabulary, train_vocabulary

IDS = np.random.default_rng(0).integers(0, 300, 500)


def llama_like(folder, bos="<s>", eos="</s>", **extra):
    """A small tokenizer.json in the manner of LLaMA's: bos before every text, words for tokens."""
    folder.mkdir(exist_ok=True)
    names = [bos, eos, "<unk>", *"abcdefgh", "zwei"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([bos, eos])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if extra:
        (folder / "tokenizer_config.json").write_text(json.dumps(extra))
    return folder


def read(root, split="train", **more):
    return Tokens(find_tokens(str(root), split), **more)


def load_vocabulary(path):
    return Vocabulary.load(path, foreign=True)


@pytest.mark.parametrize("kind", ["uint16", "uint32", "npy", "npy64", "cut npy", "cut bin", "cache"])
def test_every_form_gives_the_same_windows(tmp_path, kind):
    ids = IDS
    if kind in ("uint16", "uint32"):
        ids.astype(f"<u{int(kind[4:]) // 8}").tofile(tmp_path / "train.bin")
        (tmp_path / "train.json").write_text(json.dumps(dict(dtype=kind, eos=7)))
    elif kind in ("npy", "npy64"):
        np.save(tmp_path / "train.npy", ids.astype(np.int32 if kind == "npy" else np.int64))
    elif kind == "cut npy":
        for number, part in enumerate(np.split(ids, [100, 101, 333])):
            np.save(tmp_path / f"train-{number:02d}.npy", part)
    elif kind == "cut bin":
        for number, part in enumerate(np.split(ids, [100, 101, 333])):
            part.astype("<u2").tofile(tmp_path / f"train-{number:02d}.bin")
    else:
        (tmp_path / "lines").mkdir()
        (tmp_path / "lines" / "train.txt").write_text("a b c\n" * 100)
        cache = encoded(TextFile(tmp_path / "lines" / "train.txt"), train_vocabulary(["a b c"]), str(tmp_path / "c"))
        cache.paths[0].rename(tmp_path / "train")
        ids = np.array([4, 5, 6, 2] * 100)
    tokens = read(tmp_path, dtype="uint16" if kind == "cut bin" else None)
    assert len(tokens.ids) == len(ids) and (np.asarray(tokens.ids[0 : len(ids)]) == ids).all()
    assert (tokens.words == 400) if kind == "cache" else tokens.words is None
    assert tokens.eos == (7 if kind.startswith("uint") else 2 if kind == "cache" else None)
    windows = CausalWindows(tokens, 16, eos=tokens.eos, size=300)
    last = len(windows) - 1
    found = [i for n in range(len(windows)) for i in windows[0, n][1] if i != -100]
    if tokens.eos is None:  # nothing to predict the first from
        assert windows[0, 0][1][0] == -100 and found == ids[1:].tolist()
    else:
        assert windows[0, 0][0][0] == tokens.eos and found == ids.tolist()
    again = pickle.loads(pickle.dumps(windows))
    assert all((a == b).all() for a, b in zip(again[0, last], windows[0, last]))
    tokens.check_ids(300, str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"token id (299|6), but the vocabulary has \d+ tokens"):
        tokens.check_ids(int(ids.max()), str(tmp_path / "cache"))
    assert len(tokens.fingerprint()) == 64


def test_the_file_with_a_strange_id_is_named(tmp_path):
    np.save(tmp_path / "train-0.npy", np.arange(10))
    np.save(tmp_path / "train-1.npy", np.array([1, -2, 3]))
    with pytest.raises(ValueError, match=r"train-1.npy: token id -2, but the vocabulary has 50 tokens, 0 to 49"):
        read(tmp_path).check_ids(50, str(tmp_path / "cache"))
    # What was found is remembered, for this very file.
    remembered = sorted((tmp_path / "cache").iterdir())
    assert [json.loads(file.read_text()) for file in remembered] == [[0, 9], [-2, 3]]
    remembered[0].write_text("[0, 77]")
    refuse(r"train-0.npy: token id 77", lambda: read(tmp_path).check_ids(50, str(tmp_path / "cache")))
    np.save(tmp_path / "train-0.npy", np.arange(12))
    refuse("train-1.npy", lambda: read(tmp_path).check_ids(50, str(tmp_path / "cache")))
    # Ids are looked at again where they are read: a file may lie about its largest.
    np.array([1, 2, 3, 900, 5], "<u2").tofile(tmp_path / "val.bin")
    (tmp_path / "val.json").write_text('{"dtype": "uint16", "largest": 5}')
    lying = read(tmp_path, "val")
    lying.check_ids(50, str(tmp_path / "cache"))
    refuse(r"val.bin, token 0: token id 900", lambda: CausalWindows(lying, 5, size=50)[0, 0])


@pytest.mark.parametrize(
    "name, data, side, words",
    [
        ("train.bin", b"abcd", None, "nothing says what its numbers are; write train.json beside it"),
        ("train.bin", b"abc", '{"dtype": "uint16"}', "3 bytes are not a whole number of uint16"),
        ("train.bin", b"", '{"dtype": "uint16"}', "0 bytes"),
        ("train.bin", b"abcd", '{"dtype": "int8"}', "train.json: dtype 'int8'; expected uint16 or uint32"),
        ("train.bin", b"abcd", '{"dtype": "uint16", "tokens": 3}', "2 tokens, but train.json says 3"),
        ("train.bin", b"abcd", '{"dtype": "uint16", "eos": -1}', "train.json: eos -1; expected a whole number"),
        ("train.bin", b"abcd", "[1]", "train.json: not a JSON object"),
        ("train.bin", b"abcd", "{", "train.json: not a JSON object"),
        ("train.npy", b"abcd", None, "not an array that can be read"),
        ("train.npy", np.zeros((2, 2), int), None, "int64 of shape .2, 2.; expected one vector"),
        ("train.npy", np.zeros(2), None, "float64 of shape"),
        ("train.npy", np.array([[1], "a"], dtype=object), None, "not an array that can be read"),
        ("train.npy", np.zeros(0, int), None, "train.npy"),
        ("train/ids.bin", b"abcd", None, "not a file of token ids or a finished store of them"),
    ],
)
def test_damaged_files_are_named_in_one_line(tmp_path, name, data, side, words):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    if isinstance(data, bytes):
        (tmp_path / name).write_bytes(data)
    else:
        np.save(tmp_path / name, data)
    if side:
        (tmp_path / "train.json").write_text(side)
    with one_line(words) as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_two_forms_are_refused(tmp_path):
    np.save(tmp_path / "train.npy", IDS)
    (tmp_path / "train.txt").write_text("a\n")
    refuse("both train.npy and train.txt; remove one", lambda: find_tokens(str(tmp_path), "train"))
    (tmp_path / "valid.txt").write_text("a\n")
    assert find_tokens(str(tmp_path), "val") == find_tokens(str(tmp_path), "test") == []
    (tmp_path / "valid.txt").rename(tmp_path / "other.txt")
    np.save(tmp_path / "valid.npy", IDS)
    assert [path.name for path in find_tokens(str(tmp_path), "val")] == ["valid.npy"]
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.txt").write_text("x\n")
    assert not find_tokens(str(tmp_path), "part/one")  # text in a folder below


def test_a_foreign_tokenizer(tmp_path):
    folder = llama_like(tmp_path / "t")
    vocabulary = load_vocabulary(folder / "tokenizer.json")
    assert vocabulary.kind == "foreign" and len(vocabulary) == 12
    assert (vocabulary.bos, vocabulary.eos, vocabulary.pad) == (0, 1, None)
    # LLaMA's bos comes from the tokenizer itself.
    assert vocabulary.encode(["a b", "", "h x a"]) == [[0, 3, 4], [0], [0, 10, 2, 3]]
    assert vocabulary.decode([0, 3, 4, 1]) == "a b" and vocabulary.token(11) == "zwei"
    vocabulary.save(tmp_path / "run" / "tokenizer.json")
    again = load_vocabulary(tmp_path / "run" / "tokenizer.json")
    assert again.fingerprint == vocabulary.fingerprint and again.eos == 1
    assert pickle.loads(pickle.dumps(vocabulary)).encode(["a"]) == [[0, 3]]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert theirs.eos_token_id == 1 and theirs("a b")["input_ids"] == [0, 3, 4]


@pytest.mark.parametrize("template", ["$A", "$A </s>"])
def test_special_tokens_in_a_text_are_text(tmp_path, template):
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("</s>", 256)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path / "tokenizer.json")
    assert len(vocabulary) == 257 and vocabulary.eos == 256
    (ids,) = vocabulary.encode(["</s>"])
    assert len(ids) == 4 and 256 not in ids


def test_which_token_ends_a_text(tmp_path):
    named = llama_like(tmp_path / "a", "<x>", "<y>", eos_token=dict(content="<y>"), bos_token="<x>", pad_token=None)
    assert load_vocabulary(named / "tokenizer.json").eos == 1
    with pytest.raises(ValueError, match="which token ends a text is not known; put a tokenizer_config.json"):
        load_vocabulary(llama_like(tmp_path / "b", "<x>", "<y>") / "tokenizer.json")
    with pytest.raises(ValueError, match="eos_token may be </s> or <eos>"):
        load_vocabulary(llama_like(tmp_path / "c", "<eos>", "</s>") / "tokenizer.json")
    with pytest.raises(ValueError, match="no token '<z>', which its tokenizer_config.json names as eos_token"):
        load_vocabulary(llama_like(tmp_path / "d", eos_token="<z>") / "tokenizer.json")


def run(*argv):
    return main(["tokenise", *map(str, argv)])


def test_tokenise(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("moh_vision.engine.commands.LINE_EVERY", 0)
    tokenizer = llama_like(tmp_path / "t")
    (tmp_path / "a.txt").write_text("a b\n\n  c \n")
    lines = [json.dumps(dict(text="d\ne f", meta=1)), "", json.dumps(dict(text=""))]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    argv = (tmp_path / "a.txt", tmp_path / "b.jsonl.gz", "--tokenizer", tokenizer, "--out", tmp_path / "o")
    assert run(*argv) == 0
    assert "a.txt: 10 of 10 bytes, 00:00 left\n" in capsys.readouterr().out
    tokens = read(tmp_path / "o")
    assert np.asarray(tokens.ids[0:99]).tolist() == [0, 3, 4, 1, 0, 5, 1, 0, 6, 7, 8, 1]
    assert tokens.eos == 1 and tokens.words == 9
    assert tokens.tokenizers == {load_vocabulary(tokenizer / "tokenizer.json").fingerprint}
    about = json.loads((tmp_path / "o" / "train-00001" / "meta.json").read_text())
    assert about["texts"] == 1 and about["largest"] == 8 and about["dtype"] == "uint16"
    # What is finished stays; what a kill has cut off, which has no meta.json yet, is made again.
    first, second = (tmp_path / "o" / f"train-0000{i}" / "ids.bin" for i in range(2))
    before, whole = first.stat().st_mtime_ns, second.read_bytes()
    second.write_bytes(b"cut")
    second.with_name("meta.json").unlink()
    capsys.readouterr()
    assert run(*argv) == 0
    assert first.stat().st_mtime_ns == before and second.read_bytes() == whole
    assert "train-00000: there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("a.txt", b"a\n\xff\n", "a.txt, line 2: not UTF-8 (byte 0xff at 1)"),
        ("a.txt", b"\n\n", "a.txt: no text"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl, line 1: no text under the key"),
        ("a.jsonl", b"{\n", "a.jsonl, line 1: "),
        ("a.parquet", b"", "expected .txt, .jsonl, .json"),
    ],
)
def test_tokenise_names_what_is_wrong(tmp_path, refused, name, data, words):
    (tmp_path / name).write_bytes(data)
    tokenizer = llama_like(tmp_path / "t")
    assert words in refused("tokenise", tmp_path / name, "--tokenizer", tokenizer, "--out", tmp_path / "o")
    assert not list(tmp_path.glob("o/*"))


def test_tokenise_does_not_mix_runs(tmp_path, refused):
    (tmp_path / "a.txt").write_text("a b\n")
    argv = (tmp_path / "a.txt", "--tokenizer", llama_like(tmp_path / "t"), "--out", tmp_path / "o")
    assert run(*argv) == 0
    (tmp_path / "a.txt").write_text("a c\n")
    assert "made with source_sha256" in refused("tokenise", *argv)
    (tmp_path / "o" / "train-00001.bin").write_bytes(b"")
    assert "train-00001.bin: not of these files" in refused("tokenise", *argv)
    assert "b.txt: no such file" in refused("tokenise", tmp_path / "b.txt", *argv[1:])
    no_tokenizer = (*argv[:2], tmp_path / "no", *argv[3:])
    assert "no: no such file, or a folder without tokenizer.json" in refused("tokenise", *no_tokenizer)


def inputs(folder, **more):
    data = TextDataConfig(**dict(dict(root=str(folder), block=8, val="train"), **more))
    return CausalInputs(data, str(folder / "cache"), 0, data.tokenizer)


def test_ids_without_a_tokenizer(tmp_path):
    np.save(tmp_path / "train.npy", IDS)
    assert inputs(tmp_path, vocab_size=300).special_tokens() == {}
    refuse("train.npy: token id 299, but the vocabulary has 299 tokens", lambda: inputs(tmp_path, vocab_size=299))
    (tmp_path / "train.json").write_text('{"eos": 70000}')
    refuse("eos is token 70000, but the vocabulary has 300 tokens", lambda: inputs(tmp_path, vocab_size=300))


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a b c\n" * 9)
    one, other = llama_like(tmp_path / "t"), llama_like(tmp_path / "u", "<bos>", "<eos>")
    assert run(tmp_path / "a.txt", "--tokenizer", one, "--out", tmp_path / "o") == 0
    text = inputs(tmp_path / "o", tokenizer=str(one))
    assert text.special_tokens() == dict(bos_token_id=0, eos_token_id=1)
    assert text.train[0, 0][0][:4].tolist() == [1, 0, 3, 4]
    refuse("made with another tokenizer.json", lambda: inputs(tmp_path / "o", tokenizer=str(other)))
    with pytest.raises(ValueError, match="data.vocab_size 11: data.tokenizer .* has 12 tokens"):
        inputs(tmp_path / "o", tokenizer=str(one), vocab_size=11)
    assert inputs(tmp_path / "o", tokenizer=str(one), vocab_size=64).model_arguments() == dict(vocab_size=64)
    assert inputs(tmp_path / "o", vocab_size=64).special_tokens() == dict(eos_token_id=1)

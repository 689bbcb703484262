"""Text that comes as token ids: stores, foreign tokenizers, and the command that makes them."""

import gzip
import json
import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from moh_vision.__main__ import main
from moh_vision.language.config import TextDataConfig
from moh_vision.language.data.blocks import CausalWindows
from moh_vision.language.data.inputs import CausalInputs
from moh_vision.language.data.sources import find_tokens
from moh_vision.language.data.tokens import Tokens
from moh_vision.language.data.vocabulary import Vocabulary, train_vocabulary
from tests.support.refusals import assert_says, one_line, refuse
from tests.support.small_text import write_ids

LETTERS = train_vocabulary(["a b c"])  # 7 tokens
RECORD = dict(dtype="uint16", tokens=2, words=1, tokenizer="", sha256="")  # of a store


def llama_like(folder, bos="<s>", eos="</s>", **extra):
    """A small tokenizer.json in the manner of LLaMA's: bos before every text, words for tokens."""
    folder.mkdir(exist_ok=True)
    names = [bos, eos, "<unk>", *"abcdefgh", "zwei"]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([bos, eos])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    if extra:
        (folder / "tokenizer_config.json").write_text(json.dumps(extra))
    return folder


def test_what_is_lost_of_a_text_is_said(tmp_path, capsys):
    """Indentation of lines, and markers of a chat, which are no special tokens in a text."""
    folder = llama_like(tmp_path / "t", eos="<|end|>", eos_token="<|end|>")
    (tmp_path / "code.txt").write_text("a:\n    b\n\tc\n d \n\u3000e\n")
    texts = ["a <|end|> b", "<s> a <|end|>", "c", "    d"]
    rows = [json.dumps(dict(text=text)) for text in texts]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows) + "\n")
    for name in ("code.txt", "chat.jsonl"):
        argv = [
            "tokenise",
            tmp_path / name,
            "--tokenizer",
            folder,
            "--out",
            tmp_path / f"{name}.out",
        ]
        assert main([str(a) for a in argv]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/code.txt: 3 of 5 lines are indented (first line 2); what is blank" in out
    assert (
        f"{tmp_path}/chat.jsonl: 2 of 4 texts hold special tokens of the tokenizer, such as " in out
    )
    assert out.count("indented") == out.count("special tokens of the tokenizer") == 1
    # Read for a vocabulary of our own and to be encoded: said once.
    (tmp_path / "again.txt").write_text((tmp_path / "code.txt").read_text())
    data = TextDataConfig(root=str(tmp_path), train="again", val="again", merges=5, block=3)
    CausalInputs(data, str(tmp_path / "cache"), 0)
    assert capsys.readouterr().out.count("lines are indented") == 1


def read(root):
    return Tokens(find_tokens(str(root), "train"))


def load_vocabulary(path):
    return Vocabulary.load(path, foreign=True)


@pytest.mark.parametrize("parts", ([400], [100, 1, 299]))
def test_one_or_several_stores_give_the_same_windows(tmp_path, parts):
    ids = np.random.default_rng(0).integers(4, 7, 400)
    for number, part in enumerate(np.split(ids, np.cumsum(parts)[:-1])):
        name = "train" if len(parts) == 1 else f"train-{number:02d}"
        write_ids(tmp_path / name, part, LETTERS)
    tokens = read(tmp_path)
    assert len(tokens.ids) == tokens.words == 400 and (np.asarray(tokens.ids[0:400]) == ids).all()
    windows = CausalWindows(tokens, 16, 16, LETTERS)
    assert windows[0, 0][0][0] == LETTERS.eos
    assert [i for n in range(len(windows)) for i in windows[0, n][1] if i != -100] == ids.tolist()
    again = pickle.loads(pickle.dumps(windows))
    last = len(windows) - 1
    assert all((a == b).all() for a, b in zip(again[0, last], windows[0, last]))
    before = tokens.fingerprint()
    write_ids(tokens.paths[-1], [3] * parts[-1], LETTERS)
    assert read(tmp_path).fingerprint() != before


@pytest.mark.parametrize(
    "file, facts, record, data",
    [
        ("", "finished meta.json", None, b"abcd"),
        ("/ids.bin", "3 bytes meta.json 2 uint16", RECORD, b"abc"),
        ("/ids.bin", "6 bytes meta.json 2 uint16", RECORD, b"abcdef"),
        ("/meta.json", "record 'int8'", dict(RECORD, dtype="int8"), b"abcd"),
        ("/meta.json", "record tokens 0", dict(RECORD, tokens=0), b""),
        ("/meta.json", "record words '1'", dict(RECORD, words="1"), b"abcd"),
        ("/meta.json", "record 'dtype'", dict(tokens=2), b"abcd"),
        ("/meta.json", "record list", "[1]", b"abcd"),
        ("/meta.json", "record line 1", "{", b"abcd"),
    ],
)
def test_damaged_stores_are_named_in_one_line(tmp_path, file, facts, record, data):
    store = tmp_path / "train"
    store.mkdir()
    (store / "ids.bin").write_bytes(data)
    if record is not None:
        (store / "meta.json").write_text(record if isinstance(record, str) else json.dumps(record))
    refuse(f"{store}{file} {facts}", read, tmp_path)


def test_two_forms_are_refused(tmp_path):
    write_ids(tmp_path / "train", [4] * 9, LETTERS)
    (tmp_path / "train.txt").write_text("a\n")
    refuse(f"data.root {tmp_path} both train train.txt", find_tokens, str(tmp_path), "train")
    (tmp_path / "train.txt").rename(tmp_path / "valid.txt")
    assert find_tokens(str(tmp_path), "val") == find_tokens(str(tmp_path), "test") == []
    (tmp_path / "valid.txt").rename(tmp_path / "other.txt")
    write_ids(tmp_path / "valid-0", [4] * 9, LETTERS)
    assert [path.name for path in find_tokens(str(tmp_path), "val")] == ["valid-0"]
    write_ids(tmp_path / "valid", [4] * 9, LETTERS)
    refuse(f"data.root {tmp_path} both valid valid-0", find_tokens, str(tmp_path), "val")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "one.txt").write_text("x\n")
    assert not find_tokens(str(tmp_path), "part/one")  # text in a folder below


def test_a_foreign_tokenizer(tmp_path):
    folder = llama_like(tmp_path / "t")
    vocabulary = load_vocabulary(folder / "tokenizer.json")
    assert vocabulary.scheme == "foreign" and len(vocabulary) == 12
    assert (vocabulary.bos, vocabulary.eos, vocabulary.pad) == (0, 1, None)
    # LLaMA's bos comes from the tokenizer itself.
    assert vocabulary.encode(["a b", "", "h x a"]) == [[0, 3, 4], [0], [0, 10, 2, 3]]
    assert vocabulary.decode([0, 3, 4, 1]) == "a b" and vocabulary.token(11) == "zwei"
    vocabulary.save(tmp_path / "run" / "tokenizer.json", CausalInputs.form)
    again = load_vocabulary(tmp_path / "run" / "tokenizer.json")
    assert again.fingerprint == vocabulary.fingerprint and again.eos == 1
    assert pickle.loads(pickle.dumps(vocabulary)).encode(["a"]) == [[0, 3]]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert theirs.eos_token_id == 1 and theirs("a b")["input_ids"] == [0, 3, 4]


@pytest.mark.parametrize("template", ["$A", "$A </s>"])
def test_special_tokens_in_a_text_are_text(tmp_path, template):
    tokenizer = Tokenizer(
        models.BPE({token: n for n, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("</s>", 256)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path / "tokenizer.json")
    assert len(vocabulary) == 257 and vocabulary.eos == 256
    (ids,) = vocabulary.encode(["</s>"])
    assert len(ids) == 4 and 256 not in ids


# Template of a foreign tokenizer -> ids of "a", "" and "a b", to which training adds eos, 1.
TEMPLATES = {
    "$A": [[3], [], [3, 4]],
    "$A </s>": [[3], [], [3, 4]],
    "</s> $A": [[1, 3], [1], [1, 3, 4]],
    "</s> $A </s>": [[1, 3], [1], [1, 3, 4]],
    "<s> $A </s>": [[0, 3], [0], [0, 3, 4]],
    "<s> $A <unk> </s>": [[0, 3, 2], [0, 2], [0, 3, 4, 2]],
    "<s> </s> $A": [[0, 1, 3], [0, 1], [0, 1, 3, 4]],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_eos_behind_a_foreign_text_is_added_once(tmp_path, template):
    """One before the text is none behind it, though "" does not tell them apart."""
    folder = llama_like(tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special_tokens = [("<s>", 0), ("</s>", 1), ("<unk>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special_tokens
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    encode = load_vocabulary(folder / "tokenizer.json").encode
    assert encode(["a", "", "a b"]) == TEMPLATES[template]


def test_which_token_ends_a_text(tmp_path):
    named = llama_like(
        tmp_path / "a", "<x>", "<y>", eos_token=dict(content="<y>"), bos_token="<x>", pad_token=None
    )
    assert load_vocabulary(named / "tokenizer.json").eos == 1
    with one_line(f"{tmp_path}/b/tokenizer.json tokenizer_config.json eos_token"):
        load_vocabulary(llama_like(tmp_path / "b", "<x>", "<y>") / "tokenizer.json")
    with one_line(f"{tmp_path}/c/tokenizer.json eos_token </s> <eos> tokenizer_config.json"):
        load_vocabulary(llama_like(tmp_path / "c", "<eos>", "</s>") / "tokenizer.json")
    with one_line(f"{tmp_path}/d/tokenizer.json '<z>' tokenizer_config.json eos_token"):
        load_vocabulary(llama_like(tmp_path / "d", eos_token="<z>") / "tokenizer.json")


def run(*argv):
    return main(["tokenise", *map(str, argv)])


def test_tokenise(tmp_path, capsys, hours_pass):
    hours_pass()
    tokenizer = llama_like(tmp_path / "t")
    (tmp_path / "a.txt").write_text("a b\n\n  c \n")
    lines = [json.dumps(dict(text="d\ne f", meta=1)), "", json.dumps(dict(text=""))]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    argv = (
        tmp_path / "a.txt",
        tmp_path / "b.jsonl.gz",
        "--tokenizer",
        tokenizer,
        "--out",
        tmp_path / "o",
    )
    assert run(*argv) == 0
    assert "a.txt: 10 of 10 bytes, 00:00 left\n" in capsys.readouterr().out
    tokens = read(tmp_path / "o")
    assert np.asarray(tokens.ids[0:99]).tolist() == [0, 3, 4, 1, 0, 5, 1, 0, 6, 7, 8, 1]
    assert (
        tokens.words == 9 and tokens.metas[1]["texts"] == 1 and tokens.metas[1]["dtype"] == "uint16"
    )
    fingerprint = load_vocabulary(tokenizer / "tokenizer.json").fingerprint
    assert all(meta["tokenizer"] == fingerprint and meta["eos"] == 1 for meta in tokens.metas)
    # What is finished stays; what a kill has cut off, which has no meta.json yet, is made again.
    first, second = (tmp_path / "o" / f"train-0000{i}" / "ids.bin" for i in range(2))
    before = first.stat().st_mtime_ns
    whole = second.read_bytes()
    second.write_bytes(b"cut")
    second.with_name("meta.json").unlink()
    capsys.readouterr()
    assert run(*argv) == 0
    assert first.stat().st_mtime_ns == before and second.read_bytes() == whole
    assert "train-00000: there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "tokens, dtype", [(65_536, "uint16"), (65_537, "uint32"), (128_256, "uint32")]
)
def test_ids_of_large_vocabularies(tmp_path, tokens, dtype):
    """uint16 has numbers for 65,536 tokens; LLaMA 3 has 128,256."""
    names = ["<s>", "</s>", "<unk>", *(f"w{number}" for number in range(3, tokens))]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(f"w3 w{tokens - 1} w65535\n")
    out = tmp_path / "o"
    argv = (tmp_path / "a.txt", "--tokenizer", tmp_path / "tokenizer.json", "--out", out)
    assert run(*argv) == 0
    found = read(out)
    assert found.metas[0]["dtype"] == dtype and found.metas[0]["largest"] == tokens - 1
    assert np.asarray(found.ids[0:9]).tolist() == [3, tokens - 1, 65_535, 1]


@pytest.mark.parametrize(
    "name, data, facts",
    [
        ("a.txt", b"a\n\xff\n", "line 2 UTF-8 0xff 1"),
        ("a.txt", b"\n\n", "no text empty"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 'text' --key"),
        ("a.jsonl", b"{\n", "line 1 double quotes"),
        ("a.parquet", b"", ".txt .jsonl .json .gz"),
    ],
)
def test_tokenise_names_what_is_wrong(tmp_path, refused, name, data, facts):
    (tmp_path / name).write_bytes(data)
    tokenizer = llama_like(tmp_path / "t")
    error = refused("tokenise", tmp_path / name, "--tokenizer", tokenizer, "--out", tmp_path / "o")
    assert_says(error, f"{tmp_path}/{name} {facts}")
    assert not list(tmp_path.glob("o/*"))


def test_tokenise_does_not_mix_runs(tmp_path, refused):
    (tmp_path / "a.txt").write_text("a b\n")
    argv = (tmp_path / "a.txt", "--tokenizer", llama_like(tmp_path / "t"), "--out", tmp_path / "o")
    assert run(*argv) == 0
    (tmp_path / "a.txt").write_text("a c\n")
    error = refused("tokenise", *argv)
    assert_says(error, f"{tmp_path}/o/train-00000/meta.json source_sha256 --out")
    write_ids(tmp_path / "o" / "train-00001", [4], LETTERS)
    assert_says(refused("tokenise", *argv), f"{tmp_path}/o/train-00001 --out")
    error = refused("tokenise", tmp_path / "b.txt", *argv[1:])
    assert_says(error, f"{tmp_path}/b.txt no file")
    no_tokenizer = (*argv[:2], tmp_path / "no", *argv[3:])
    error = refused("tokenise", *no_tokenizer)
    assert_says(error, f"--tokenizer {tmp_path}/no tokenizer.json")


def inputs(folder, **more):
    data = TextDataConfig(**dict(dict(root=str(folder), block=8, val="train"), **more))
    return CausalInputs(data, str(folder / "cache"), 0, data.tokenizer)


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a b c\n" * 9)
    one = llama_like(tmp_path / "t")
    other = llama_like(tmp_path / "u", "<bos>", "<eos>")
    assert run(tmp_path / "a.txt", "--tokenizer", one, "--out", tmp_path / "o") == 0
    text = inputs(tmp_path / "o", tokenizer=str(one))
    assert text.special_tokens() == dict(bos_token_id=0, eos_token_id=1)
    assert text.train[0, 0][0][:4].tolist() == [1, 0, 3, 4]
    facts = f"{tmp_path}/o/train-00000 tokenizer.json sha256 data.tokenizer"
    refuse(facts, lambda: inputs(tmp_path / "o", tokenizer=str(other)))
    refuse(
        f"data.vocab_size 11 {one}/tokenizer.json 12",
        inputs,
        tmp_path / "o",
        tokenizer=str(one),
        vocab_size=11,
    )
    assert inputs(tmp_path / "o", tokenizer=str(one), vocab_size=64).model_arguments() == dict(
        vocab_size=64
    )
    # Ids are looked at where they are read: before, that would read all of them.
    write_ids(
        tmp_path / "o" / "train-00000",
        [4] * 20 + [77] + [4] * 20,
        load_vocabulary(one / "tokenizer.json"),
    )
    train = inputs(tmp_path / "o", tokenizer=str(one)).train
    refuse(
        f"{tmp_path}/o/train-00000 20 77 12",
        lambda: [*map(train.__getitem__, enumerate(range(5)))],
    )


def test_ids_that_changed_since_they_were_written_are_refused(tmp_path):
    """By the sum in meta.json, though their number is the same; ids that are as written are taken."""
    (tmp_path / "a.txt").write_text("a b c\n" * 9)
    tokenizer = llama_like(tmp_path / "t")
    assert run(tmp_path / "a.txt", "--tokenizer", tokenizer, "--out", tmp_path / "o") == 0
    file = tmp_path / "o" / "train-00000" / "ids.bin"
    inputs(tmp_path / "o", tokenizer=str(tokenizer))
    whole = file.read_bytes()
    file.write_bytes(whole[2:] + whole[:2])
    refuse(
        f"{file} sha256 {file.parent}/meta.json",
        lambda: inputs(tmp_path / "o", tokenizer=str(tokenizer)),
    )
    file.write_bytes(whole)
    inputs(tmp_path / "o", tokenizer=str(tokenizer))

"""Turn files of documents into token ids that train_text.py reads.

    python -m moh_vision tokenise --tokenizer tokenizer.json --out FOLDER --split train FILE ...

Every FILE (.txt: a document a line; .jsonl: an object a line, with the text under --key; or these with .gz) becomes a
store FOLDER/SPLIT-00000 and so on, in the order they are given: ids.bin, ends.npy and a meta.json that says what it
holds. A document is what the tokenizer makes of it, and eos. Stores that are finished are kept: after a kill, the same
command goes on with the next.
"""

import contextlib
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from moh_vision.common.cli import refuse_unwritable
from moh_vision.common.io import sha256_of
from moh_vision.common.progress import Progress, say
from moh_vision.language.data.sources import IDS, TextFile, form_of
from moh_vision.language.data.tokens import META, Tokens, read_meta, write_store
from moh_vision.language.data.vocabulary import Vocabulary, find_tokenizer

KEPT = "stores"
FORMS = (".txt", ".jsonl", ".json")


def tokenise(
    files: list[Path], tokenizer: Path, out: Path, split: str = "train", key: str = "text"
) -> list[Path]:
    """Write missing stores of token ids, and return the paths of all.

    Args:
        files: of documents.
        tokenizer: any tokenizer.json or its folder.
        out: folder of the stores.
        split: name of the split that the files make up.
        key: of the text in the objects of a .jsonl.
    """
    refuse_unwritable("--out", out)
    tokenizer_file = find_tokenizer("--tokenizer", tokenizer)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        if form_of(file) not in FORMS:
            raise ValueError(f"{file}: expected {', '.join(FORMS)}, or one of these with .gz")
    vocabulary = Vocabulary.load(tokenizer_file, foreign=True)
    stores = [out / f"{split}-{number:05d}" for number in range(len(files))]
    extra = sorted({file.parent for file in out.glob(f"{split}-*/{IDS}")} - set(stores))
    if extra:
        raise ValueError(
            f"{extra[0]}: not of these files, and would be trained on too; remove it, or take another --out"
        )
    for file, store in zip(files, stores):
        made_from = dict(source=file.name, source_sha256=sha256_of(file), key=key)
        if is_finished(store, dict(made_from, tokenizer=vocabulary.fingerprint)):
            say(f"{store}: there already")
            continue
        text_file = TextFile(file, None if form_of(file) == ".txt" else key)
        with Progress(file.name, file.stat().st_size, "byte", scaled=True) as progress:
            texts = filter(None, text_file.read(progress))
            meta = write_store(store, texts, vocabulary, str(file), **made_from)
        say(f"{store}: {meta['texts']:,} documents, {meta['tokens']:,} tokens")
    return stores


def is_finished(store: Path, made_from: dict) -> bool:
    """Return whether a store is complete; raise ValueError if it was made from something else."""
    meta_file = store / META
    if not meta_file.exists():  # meta.json is written last
        return False
    meta = read_meta(store)
    for name, value in made_from.items():
        if meta.get(name) != value:
            raise ValueError(
                f"{meta_file}: made with {name} {meta.get(name)}, now it is {value}; take another --out"
            )
    with contextlib.suppress(ValueError, OSError, EOFError):
        return bool(Tokens([store]))  # opening it checks ids.bin and ends.npy
    return False


def options(add: Callable) -> None:
    add("files", nargs="+", type=Path, metavar="FILE", help=".txt, .jsonl, or these with .gz")
    add("--tokenizer", type=Path, required=True, help="a tokenizer.json, or a folder with one")
    add(
        "--out", type=Path, required=True, metavar="FOLDER", help="new, or that of the same command"
    )
    add("--split", default="train", help="name of the split (train)")
    add("--key", default="text", help="of the text in a .jsonl (text)")


def work(options: Namespace) -> None:
    tokenise(**vars(options))

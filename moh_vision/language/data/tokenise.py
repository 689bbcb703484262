"""Turn files of documents into token ids that train_text.py reads.

    python -m moh_vision tokenise --tokenizer tokenizer.json --out FOLDER --split train FILE ...

Every FILE (.txt: a document a line; .jsonl: an object a line, with the text under --key; or these with .gz) becomes
FOLDER/SPLIT-00000.bin and so on, in the order they are given, with a .json beside it that says what it holds. A
document is what the tokenizer makes of it, and eos. Files that are finished are kept: after a kill, the same command
goes on with the next.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

import numpy as np

from moh_vision.engine.commands import Parser, Progress, exit_code, refuse_unwritable, say, user_errors
from moh_vision.engine.io import sha256_of, whole_file, write_whole
from moh_vision.language.data.lines import decoded, raw_lines

with user_errors("tokenise"):
    from moh_vision.language.data.foreign import AnyVocabulary, load_vocabulary
    from moh_vision.language.data.token_files import DTYPES

FORMS = (".txt", ".jsonl", ".json")
MAX_LINE = 1 << 28  # bytes
DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 2000, 1 << 23


def tokenise(files: List[Path], tokenizer: Path, out: Path, split: str = "train", key: str = "text") -> List[Path]:
    """Write missing .bin files of token ids to `out`, and return all paths.
    `tokenizer` is any tokenizer.json or its folder; for `key` see `documents`.
    """
    refuse_unwritable("--out", out)
    place = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not place.is_file():
        raise FileNotFoundError(f"--tokenizer {tokenizer}: no such file, or a folder without tokenizer.json")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        form_of(file)
    vocabulary = load_vocabulary(place)
    made = [out / f"{split}-{number:05d}.bin" for number in range(len(files))]
    extra = sorted(set(out.glob(f"{split}-*.bin")) - set(made))
    if extra:
        raise ValueError(
            f"{extra[0]}: not of these files, and would be trained on too; remove it, or take another --out"
        )
    for file, target in zip(files, made):
        made_from = dict(source=file.name, source_sha256=sha256_of(file))
        made_from.update(tokenizer=vocabulary.fingerprint, key=key)
        if is_finished(target, made_from):
            say(f"{target}: there already")
        else:
            about = write_ids(target, documents(file, key), vocabulary, file)
            told = json.dumps({**about, **made_from}, indent=1)
            write_whole(target.with_suffix(".json"), told + "\n", shared=True)
            say(f"{target}: {about['documents']:,} documents, {about['tokens']:,} tokens")
    return made


def is_finished(target: Path, made_from: dict) -> bool:
    """Whether a file is there as a whole, made from the same."""
    side = target.with_suffix(".json")
    if not side.exists():  # it is written last
        return False
    try:
        about = json.loads(side.read_text("utf-8"))
        known = {name: about[name] for name in made_from}
        size = about["tokens"] * DTYPES[about["dtype"]].itemsize
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{side}: not written by this command ({error!r}); take another --out") from None
    for name, value in made_from.items():
        if known[name] != value:
            raise ValueError(f"{side}: made with {name} {known[name]}, now it is {value}; take another --out")
    return target.exists() and target.stat().st_size == size


def write_ids(target: Path, texts: Iterator[Tuple[str, int]], vocabulary: AnyVocabulary, source: Path) -> dict:
    """Write the ids of all documents; returns what the .json beside them says."""
    kind = "uint16" if len(vocabulary) <= 1 << 16 else "uint32"
    count = tokens = words = largest = 0
    digest = hashlib.sha256()
    read = Progress(source.name, source.stat().st_size, "byte", scaled=True)
    with whole_file(target, shared=True) as file, read:
        for batch, position in batched(texts):
            rows = vocabulary.encode(batch)
            ids = np.fromiter((i for row in rows for i in (*row, vocabulary.eos)), DTYPES[kind])
            data = ids.tobytes()
            digest.update(data)
            file.write(data)
            count += len(batch)
            tokens += len(ids)
            largest = max(largest, int(ids.max()))
            words += sum(len(text.split()) + 1 for text in batch)
            read.add(position - read.done)
        if not count:
            raise ValueError(f"{source}: no text")
    return dict(
        dtype=kind, eos=vocabulary.eos, tokens=tokens, largest=largest, words=words, documents=count,
        sha256=digest.hexdigest(),
    )  # fmt: skip


def form_of(path: Path) -> str:
    """Which of `FORMS` a file is, by its name without .gz."""
    form = Path(path.name.removesuffix(".gz")).suffix
    if form not in FORMS:
        raise ValueError(f"{path}: expected {', '.join(FORMS)}, or one of these with .gz")
    return form


def documents(path: Path, key: str = "text") -> Iterator[Tuple[str, int]]:
    """Yield (text, bytes of the file read so far) of every document that is not empty: a stripped line
    (.txt), or the text under `key` of an object a line (.jsonl, .json).
    """
    plain = form_of(path) == ".txt"
    for number, line, position in raw_lines(path, MAX_LINE, "document"):
        where = f"{path}, line {number}"
        text = decoded(line, where).strip()
        if text and not plain:
            text = _text_of(text, key, where)
        if "\0" in text:
            raise ValueError(f"{where}: a NUL character; expected text")
        if text:
            yield text, position


def _text_of(line: str, key: str, where: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), str):
        raise ValueError(f"{where}: no text under the key {key!r}; expected an object a line that has it (--key)")
    return content[key]


def batched(texts: Iterator[Tuple[str, int]]) -> Iterator[Tuple[List[str], int]]:
    """(documents, position in the file), so many that memory does not grow with the file."""
    batch: List[str] = []
    characters = position = 0
    for text, position in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= DOCUMENTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield batch, position
            batch, characters = [], 0
    if batch:
        yield batch, position


def main(argv: Optional[List[str]] = None) -> int:
    """The command; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""

    def work() -> None:
        parser = Parser("python -m moh_vision tokenise", __doc__)
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".txt, .jsonl, or these with .gz")
        parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json, or a folder with one")
        parser.add_argument(
            "--out", type=Path, required=True, metavar="FOLDER", help="new, or that of the same command"
        )
        parser.add_argument("--split", default="train", help="name of the split (train)")
        parser.add_argument("--key", default="text", help="of the text in a .jsonl (text)")
        tokenise(**vars(parser.parse(argv)))

    return exit_code("tokenise", work, kept="files")


if __name__ == "__main__":
    raise SystemExit(main())

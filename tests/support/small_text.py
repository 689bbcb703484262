"""Text that a small model can learn: numbers in words, from one language into another."""

import gzip
import hashlib
import json
import random

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

GERMAN = "null eins zwei drei vier fünf sechs sieben acht neun".split()
ENGLISH = "zero one two three four five six seven eight nine".split()


def sentence(rng):
    """Return a German sentence, and its English translation with the words in reverse order."""
    digits = [rng.randrange(10) for _ in range(rng.randint(1, 6))]
    return " ".join(GERMAN[d] for d in digits), " ".join(ENGLISH[d] for d in reversed(digits))


def write_pairs(folder, train=300, val=40, test=20, seed=0):
    """Write sentences to SPLIT.de and their translations to SPLIT.en.gz; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for split, count in (("train", train), ("val", val), ("test", test)):
        pairs = [sentence(rng) for _ in range(count)]
        (folder / f"{split}.de").write_text("".join(f"{de}\n" for de, _ in pairs), encoding="utf-8")
        text = "".join(f"{en}\n" for _, en in pairs).encode()
        (folder / f"{split}.en.gz").write_bytes(gzip.compress(text, mtime=0))
    return folder


def write_plain(folder, train=300, val=60, seed=0):
    """Write SPLIT.txt, lines of English numbers that count up, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for split, count in (("train", train), ("valid", val)):
        lines = []
        for _ in range(count):
            first = rng.randrange(10)
            lines.append(" ".join(ENGLISH[(first + i) % 10] for i in range(rng.randint(4, 12))))
        (folder / f"{split}.txt").write_text(
            "".join(line + "\n" for line in lines), encoding="utf-8"
        )
    return folder


def write_ids(store, ids, vocabulary):
    """Write the given token ids as one text, in the files that the command tokenise writes; return `store`."""
    store.mkdir(parents=True, exist_ok=True)
    data = np.asarray(ids, "<u2").tobytes()
    (store / "ids.bin").write_bytes(data)
    np.save(store / "ends.npy", [len(ids)])  # one text
    digest = hashlib.sha256(data + (store / "ends.npy").read_bytes())
    counts = dict(tokens=len(ids), words=len(ids))
    record = dict(dtype="uint16", **counts, sha256=digest.hexdigest())
    (store / "meta.json").write_text(json.dumps(dict(record, tokenizer=vocabulary.fingerprint)))
    return store


def words(folder, names):
    """Write a tokenizer.json that the package has not made, with one token for each of `names`; return `folder`."""
    folder.mkdir(exist_ok=True)
    names = ["<unk>", "<s>", "</s>", *names]
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder

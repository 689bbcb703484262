"""Foreign vocabularies: a tokenizer.json of Hugging Face, or only a number of tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence, Union

from tokenizers import Tokenizer

from moh_vision.engine.commands import reason_of
from moh_vision.engine.io import write_whole
from moh_vision.language.data.vocabulary import MASK, SPECIALS, Vocabulary, read_json

COMPANION = "tokenizer_config.json"
# Used without a tokenizer_config.json: the names in LLaMA, GPT-2 and their successors.
NAMES = {
    "eos_token": ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]"),
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]"),
}
MAX_TOKENS = 1 << 24


class ForeignVocabulary:
    """Reads a tokenizer.json (LLaMA, GPT) and, if any, the tokenizer_config.json beside it.

    Encodes as the tokenizer does, with its first tokens (LLaMA's bos), and appends eos.
    Special tokens in a text are read as text.

    Args:
        data: the bytes of tokenizer.json.
        where: its name, for messages.
        names: token by role (eos_token, bos_token, pad_token), of its tokenizer_config.json.

    Attributes:
        bos, eos, pad: ids; bos and pad may be None.
        fingerprint: sha256 of tokenizer.json.
    """

    kind, lowercase, specials = "foreign", False, 0

    def __init__(self, data: bytes, where: str, names: Optional[Dict[str, str]] = None):
        self.data, self.where = data, where
        self.fingerprint = hashlib.sha256(data).hexdigest()
        try:
            _check(json.loads(data))
            self._tokenizer = Tokenizer.from_buffer(data)
            numbers = self._tokenizer.get_vocab(with_added_tokens=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of the package tokenizers are no Exception
            reason = reason_of(error)
            raise ValueError(f"{where}: not a tokenizer.json of Hugging Face ({reason})") from None
        self._size = max(numbers.values(), default=-1) + 1
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.names = {role: _named(role, names or {}, numbers, where) for role in NAMES}
        self.eos, self.bos, self.pad = (numbers.get(self.names[role]) for role in NAMES)
        if self.eos is None:
            raise ValueError(
                f"{where}: which token ends a text is not known; put a {COMPANION} with eos_token beside it"
            )

        self._ends_with_eos = self._tokenizer.encode("").ids[-1:] == [self.eos]

    @classmethod
    def load(cls, path: Path) -> ForeignVocabulary:
        """Read a tokenizer.json and the tokenizer_config.json beside it."""
        return cls(read_json(path), str(path), _companion(path))

    def save(self, path: Path) -> None:
        """Write the source file, and the files that AutoTokenizer needs."""
        write_whole(Path(path), self.data, shared=True)
        write_companion(Path(path).with_name(COMPANION), {k: v for k, v in self.names.items() if v})

    def __len__(self) -> int:
        """One more than the largest id."""
        return self._size

    def __reduce__(self):
        return ForeignVocabulary, (self.data, self.where, self.names)

    def token(self, number: int) -> str:
        """A token as tokenizer.json writes it."""
        return self._tokenizer.id_to_token(number) or f"<{number}>"

    def encode(self, texts: Sequence[str]) -> List[List[int]]:
        """Encode texts with the tokenizer's first tokens, without eos."""
        found = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]
        return [ids[:-1] for ids in found] if self._ends_with_eos else found

    def decode(self, ids: Iterable[int]) -> str:
        """The text, on one line, without special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return " ".join(text.splitlines()).strip()


class NumberedVocabulary:
    """A vocabulary of `size` tokens that are known only as ids."""

    kind, lowercase, specials = "numbers", False, 0
    bos = eos = pad = None

    def __init__(self, size: int):
        self.size, self.fingerprint = size, f"{size} tokens"

    def __len__(self) -> int:
        return self.size

    def save(self, path: Path) -> None:
        """There is nothing to write."""

    def token(self, number: int) -> str:
        return f"<{number}>"

    def encode(self, texts: Sequence[str]) -> List[List[int]]:
        raise ValueError("data.vocab_size says how many tokens there are, not which; text needs data.tokenizer")

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(self.token, ids))


AnyVocabulary = Union[Vocabulary, ForeignVocabulary, NumberedVocabulary]


def write_companion(path: Path, names: Dict[str, str]) -> None:
    """Write the tokenizer_config.json that AutoTokenizer needs; `names`: token by role."""
    about = dict(tokenizer_class="PreTrainedTokenizerFast", **names)
    write_whole(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n", shared=True)


def load_vocabulary(path: Path) -> AnyVocabulary:
    """A tokenizer.json, of this package or a foreign one."""
    return (Vocabulary if is_ours(path) else ForeignVocabulary).load(path)


def is_ours(path: Path) -> bool:
    """Whether a tokenizer.json begins with our special tokens. True for invalid JSON, which `Vocabulary`
    refuses."""
    data = read_json(path)
    try:
        content = json.loads(data)
        numbers = content["model"]["vocab"]
        return all(numbers.get(token) == number for number, token in enumerate(SPECIALS[:MASK]))
    except (KeyError, TypeError, AttributeError):
        return not isinstance(content, dict) or not isinstance(content.get("model"), dict)
    except (ValueError, RecursionError):
        return True


def _check(content) -> None:
    """Raise ValueError for sizes that would exhaust the memory."""
    vocab = content["model"]["vocab"]
    if not isinstance(vocab, (dict, list)) or len(vocab) > MAX_TOKENS:
        raise ValueError(f"its model has no vocabulary, or one of more than {MAX_TOKENS} tokens")
    added = [token["id"] for token in content.get("added_tokens") or []]
    numbers = [*added, *(vocab.values() if isinstance(vocab, dict) else ())]
    if any(type(number) is not int or not 0 <= number < MAX_TOKENS for number in numbers):
        raise ValueError(f"its tokens are not numbered from 0 to {MAX_TOKENS - 1}")


def _companion(path: Path) -> Dict[str, str]:
    """Read the tokens by role from the tokenizer_config.json beside a file; empty without one."""
    file = Path(path).with_name(COMPANION)
    if not file.is_file():
        return {}
    try:
        content = json.loads(read_json(file))
        found = {role: content.get(role) for role in NAMES}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: not a tokenizer_config.json ({reason_of(error)})") from None
    texts = {role: value.get("content") if isinstance(value, dict) else value for role, value in found.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _named(role: str, names: Dict[str, str], numbers: Dict[str, int], where: str) -> Optional[str]:
    if names.get(role) is not None:
        if names[role] not in numbers:
            raise ValueError(f"{where}: it has no token {names[role]!r}, which its {COMPANION} names as {role}")
        return names[role]
    if names:  # it says which there are
        return None
    there = [name for name in NAMES[role] if name in numbers]
    if len(there) > 1:
        raise ValueError(f"{where}: {role} may be {' or '.join(there)}; put a {COMPANION} beside it that says which")
    return there[0] if there else None

"""Convert text to token ids and back, by a tokenizer.json of the package tokenizers: one of our own or a foreign one.

Our own are of two kinds. Byte-level BPE (Radford et al. 2019; RoBERTa, whose vocabulary MoA's masked models use) knows
every character and restores the text exactly, so raw text can go in and BLEU needs no post-processing. Words, split at
blanks as in WikiText and sorted by falling frequency, are for adaptive softmaxes.
"""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from moh_vision.common.errors import reason_of
from moh_vision.common.io import write_whole
from moh_vision.common.progress import Progress
from moh_vision.engine.ranks import say

PAD, BOS, EOS, UNK, MASK = range(5)
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")  # <mask> only for masked models
BASE_SPECIALS = SPECIALS[:MASK]  # those of every vocabulary of our own
UNKNOWN = SPECIALS[UNK]
MAX_BYTES = 1 << 28  # of a tokenizer.json
MAX_TOKENS = 1 << 24  # of a vocabulary
FORMAT = "3"  # version of what caches hold
SCHEMES = {  # model of a tokenizer.json -> (our name, class of the pre-tokenizer)
    models.BPE: ("bpe", pre_tokenizers.ByteLevel),
    models.WordLevel: ("word", pre_tokenizers.WhitespaceSplit),
}
SPECIAL_WORD = rf"(?<!\S)(?:{'|'.join(SPECIALS)})(?!\S)"  # a special token between blanks
TOKENIZER = "tokenizer.json"
TARGET = "target"  # a folder with the tokenizer of a translation's target, if it has its own
COMPANION = "tokenizer_config.json"
SPECIAL_MAP = (
    "special_tokens_map.json"  # written by transformers before 5; has roles that COMPANION may lack
)
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
# Keys of a foreign COMPANION that are not carried over: code, paths on another machine, and options with which
# transformers would encode differently from the tokenizer.json, which training reads.
NOT_CARRIED = frozenset(
    {
        "auto_map",
        "name_or_path",
        "tokenizer_file",
        "vocab_file",
        "merges_file",
        "special_tokens_map_file",
        "is_local",
        "backend",
        "post_processor",
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "split_special_tokens",
    }
)
OWN_ROLES = dict(eos_token=SPECIALS[EOS], pad_token=SPECIALS[PAD])
# Names of tokens in LLaMA, GPT-2 and their successors, for foreign tokenizers without a tokenizer_config.json.
USUAL_ROLES = {
    "eos_token": ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]"),
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]"),
}


class TextForm(NamedTuple):
    """What a task puts around texts, for transformers' tokenizers of our own vocabularies.

    Attributes:
        template: the special tokens around a text, $A.
        bos: id of the token that stands before the first one to predict.
        padding_side: "left" or "right".
        masks: texts may hold the special token <mask>, and so the others.
    """

    template: str
    bos: int
    padding_side: str = "right"
    masks: bool = False


class Vocabulary:
    """Encodes and decodes text by a tokenizer.json.

    Args:
        data: the bytes of the tokenizer.json.
        where: name of the tokenizer.json in messages.
        companion: content of the tokenizer_config.json and the other files beside a foreign tokenizer.json.
        foreign: whether the tokenizer.json may be one that this package did not write.

    Attributes:
        scheme: "bpe", "word" or "foreign".
        specials: number of special tokens of a vocabulary of our own, which have the first ids: 4, or 5 with <mask>; 0
            for a foreign one.
        bos, eos, pad: ids of these tokens; bos and pad may be None. Our own have no bos: it depends on the task.
        markers: pattern that finds a foreign vocabulary's special tokens in a text; None if it has none, and for our own.
        companion: what `save` writes into the tokenizer_config.json of a foreign vocabulary; {} for our own.
        fingerprint: sha256 of the tokenizer.json, which checkpoints contain; of our own without a task's template.
    """

    def __init__(
        self, data: bytes, where: str, companion: dict | None = None, foreign: bool = False
    ):
        self.data = data
        self.where = where
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
            token_ids = self._tokenizer.get_vocab(with_added_tokens=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the package tokenizers is not an Exception
            raise ValueError(f"{where}: not a tokenizer.json ({reason_of(error)})") from None
        self._size = max(token_ids.values(), default=-1) + 1
        if self._size > MAX_TOKENS:
            raise ValueError(
                f"{where}: a token has the number {self._size - 1}; allowed are {MAX_TOKENS} tokens"
            )
        reason = _why_foreign(self._tokenizer, token_ids)
        if reason and not foreign:
            raise ValueError(f"{where}: not a tokenizer.json that this package wrote ({reason})")
        if reason:
            self.scheme = "foreign"
            self.lowercase = False
            self.specials = 0
            self.companion = companion or {}
            self.roles = _roles(self.companion, token_ids, where)
            self.markers = _markers(self._tokenizer)
        else:
            self.data = _with_template(data, None)
            self.scheme, _ = SCHEMES[type(self._tokenizer.model)]
            lowering = _normalizer(self.scheme, lowercase=True)
            self.lowercase = _steps(self._tokenizer.normalizer) == _steps(lowering)
            self.specials = len(BASE_SPECIALS)
            if token_ids.get(SPECIALS[MASK]) == MASK:
                self.specials += 1
            self.companion = {}
            self.roles = OWN_ROLES
            self.markers = None
        self.fingerprint = hashlib.sha256(self.data).hexdigest()
        self.eos = token_ids.get(self.roles.get("eos_token"))
        self.bos = token_ids.get(self.roles.get("bos_token"))
        self.pad = token_ids.get(self.roles.get("pad_token"))
        self._tokenizer.encode_special_tokens = (
            True  # encode "</s>" in a text as text, not as the special token
        )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._adds_eos = self.scheme == "foreign" and _ends_with(self._tokenizer, self.eos)

    @classmethod
    def load(cls, path: Path, foreign: bool = False) -> Self:
        """Read a tokenizer.json; with `foreign` it may be one that this package did not write."""
        companion = _companion(path) if foreign else None
        return cls(_read(path), str(path), companion, foreign)

    def save(self, path: Path, form: TextForm, longest: int | None = None) -> None:
        """Write the tokenizer.json, and the tokenizer_config.json that AutoTokenizer needs.

        A tokenizer of our own gets the task's template, so that transformers puts around a text what training does. A
        foreign one is written unchanged.

        Args:
            path: of the tokenizer.json.
            form: of the task.
            longest: tokens that the model's longest text has; None: any number.
        """
        path = Path(path)
        data = self.data
        companion = {"padding_side": form.padding_side, **self.companion}
        if self.scheme != "foreign":
            data = _with_template(data, form.template)
            companion["bos_token"] = SPECIALS[form.bos]
            companion["split_special_tokens"] = not form.masks
            if form.masks:
                companion["mask_token"] = SPECIALS[MASK]
            if longest is not None:
                companion["model_max_length"] = longest
        companion.update(tokenizer_class="PreTrainedTokenizerFast", **self.roles)
        write_whole(path, data, shared=True)
        text = json.dumps(companion, indent=1, ensure_ascii=False) + "\n"
        write_whole(path.with_name(COMPANION), text, shared=True)

    def __len__(self) -> int:
        """Return one more than the largest id."""
        return self._size

    def __reduce__(self):
        return Vocabulary, (self.data, self.where, self.companion, True)

    def token(self, token_id: int) -> str:
        """Return a token as tokenizer.json writes it; in BPE, G with a dot is a blank."""
        return self._tokenizer.id_to_token(token_id) or f"<{token_id}>"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without an eos at the end; a foreign tokenizer, such as LLaMA's, may add a bos.

        Special tokens that are written in a text are encoded as text.
        """
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=self.scheme == "foreign"
        )
        rows = [encoding.ids for encoding in encodings]
        if self._adds_eos:
            return [ids[:-1] for ids in rows]
        return rows

    def marker_in(self, text: str) -> str | None:
        """Return the first special token of a foreign vocabulary that is written in a text; None if there is none."""
        if self.markers is None:
            return None
        found = self.markers.search(text)
        return None if found is None else found[0]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, on one line. Special tokens are left out; "<unk>", which is a word, stays."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text.replace("\r", " ").replace("\n", " ").strip()  # a model may write any byte


def train_vocabulary(
    texts: Iterable[str],
    merges: int | None = None,
    words: int | None = None,
    lowercase: bool = False,
    mask: bool = False,
) -> Vocabulary:
    """Train a vocabulary: of byte-level BPE if `merges` is given, else of words.

    Args:
        texts: training texts; iterated once.
        merges: number of merged tokens, beside the special tokens and 256 bytes. There are fewer if no further pair of
            tokens occurs twice.
        words: number of words to keep, the most frequent ones; equally frequent ones in alphabetical order. All others
            become <unk>. None: keep all.
        lowercase: turn all text to lower case.
        mask: add the special token <mask>.
    """
    specials = list(SPECIALS if mask else BASE_SPECIALS)
    scheme = "word" if merges is None else "bpe"
    if merges is not None:
        tokenizer, trainer = _untrained_bpe(specials, merges)
        # WikiText's texts contain the word "<unk>". Its letters must not be merged into tokens.
        texts = (text.replace(UNKNOWN, " ") for text in texts)
    else:
        tokenizer, trainer = _untrained_words(specials, words)
        # Lower the case first: "</S>" then is a special token too, which the next line leaves out.
        lines = (text.lower() if lowercase else text for text in texts)
        # Words that read like special tokens are not counted: they have their ids already.
        texts = (" ".join(word for word in line.split() if word not in SPECIALS) for line in lines)
    tokenizer.normalizer = _normalizer(scheme, lowercase)
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    # The trainers made <unk> a special token, which decoding would leave out. It is a word of WikiText's texts.
    if merges is not None:
        content["added_tokens"][UNK].update(special=False, lstrip=True)
    else:  # the words of the model contain <unk>
        del content["added_tokens"][UNK]
    data = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return Vocabulary(data.encode(), "the new vocabulary")


def _untrained_bpe(specials: list[str], merges: int) -> tuple[Tokenizer, trainers.BpeTrainer]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    # Encoding drops the blank before "<unk>", a word of WikiText's texts, and adds a blank before the text. The decoder
    # undoes both.
    steps = [
        decoders.Replace(UNKNOWN, f" {UNKNOWN}"),
        decoders.ByteLevel(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=len(specials) + 256 + merges,
        special_tokens=specials,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    return tokenizer, trainer


def _untrained_words(
    specials: list[str], words: int | None
) -> tuple[Tokenizer, trainers.WordLevelTrainer]:
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = MAX_TOKENS if words is None else len(specials) + words
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=specials, show_progress=False
    )
    return tokenizer, trainer


def trained_vocabulary(
    texts: Sequence, cache_dir: str, before: Callable[[], None] | None = None, **options
) -> Vocabulary:
    """Return the vocabulary of training texts from the cache, or train it.

    Args:
        texts: the training texts; two of them make a joint vocabulary of two languages.
        cache_dir: folder of the cache.
        before: called before a vocabulary is trained.
        **options: see `train_vocabulary`.
    """

    def load(folder: Path) -> Vocabulary:
        return Vocabulary.load(folder / TOKENIZER)

    def make(folder: Path) -> None:
        if before is not None:
            before()
        lines = Progress.over(chain(*texts), "reading", "line")
        write_whole(folder / TOKENIZER, train_vocabulary(lines, **options).data, shared=True)

    scheme = "word" if options.get("merges") is None else "bpe"
    made_from = [FORMAT, scheme, sorted(options.items()), [text.fingerprint() for text in texts]]
    return cached(cache_dir, scheme, made_from, load, make)


def cached(cache_dir: str, name: str, made_from: list, load: Callable, make: Callable):
    """Load the content of a folder of the cache; make the folder first if it is missing or damaged.

    Args:
        cache_dir: where the folder is.
        name: beginning of the folder's name.
        made_from: everything that determines the content; the folder's name ends with its hash.
        load: returns the content of a folder.
        make: writes the content into a folder.
    """
    key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    folder = Path(cache_dir, f"{name}.{key}")
    try:
        return load(folder)
    except FileNotFoundError:
        pass
    except (ValueError, OSError, KeyError, TypeError) as error:
        say(f"{folder}: damaged ({reason_of(error)}); making it again")
    make(folder)
    return load(folder)


def find_tokenizer(option: str, path: Path) -> Path:
    """Return the tokenizer.json at `path`, which is the file or its folder; `option` is for messages."""
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{option} {path}: no such file, or a folder without {TOKENIZER}")
    return file


def copy_tokenizers(run: Path, folder: Path) -> None:
    """Copy the tokenizers of a run, as far as it has them, into the folder of a model of it."""
    for source in (run, run / TARGET):
        for name in (TOKENIZER, COMPANION):
            file = source / name
            if file.is_file():
                copy = folder / file.relative_to(run)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def _normalizer(scheme: str, lowercase: bool) -> normalizers.Sequence | None:
    """Return the normalizer of a vocabulary of our own.

    Among words a special token becomes <unk>, because the model would give it the special token's id.
    """
    steps = []
    if lowercase:
        steps.append(normalizers.Lowercase())
    if scheme == "word":
        steps.append(normalizers.Replace(Regex(SPECIAL_WORD), UNKNOWN))
    if not steps:
        return None
    return normalizers.Sequence(steps)


def _steps(normalizer: normalizers.Normalizer | None) -> bytes:
    """Return what a normalizer does, to compare it with another one."""
    return b"" if normalizer is None else normalizer.__getstate__()


def _with_template(data: bytes, template: str | None) -> bytes:
    """Return a tokenizer.json of our own with special tokens around the text $A, or with None as it was trained."""
    content = json.loads(data)
    content["post_processor"] = None
    if template is not None:
        names = [(name, number) for number, name in enumerate(SPECIALS) if name in template]
        processor = processors.TemplateProcessing(single=template, special_tokens=names)
        content["post_processor"] = json.loads(processor.__getstate__())
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _ends_with(tokenizer: Tokenizer, token_id: int | None) -> bool:
    """Return whether a tokenizer puts this token behind a text."""
    # One word, because "" does not tell a token behind the text from one before it, and not every vocabulary has "a".
    of_one_word = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    of_one_word.post_processor = tokenizer.post_processor
    encoding = of_one_word.encode("a")
    behind = encoding.ids[encoding.sequence_ids.index(0) + 1 :]
    return behind[-1:] == [token_id]


def _why_foreign(tokenizer: Tokenizer, token_ids: dict[str, int]) -> str:
    """Return why a tokenizer is not one of our own; "" if it is."""
    tokens = sorted(token_ids, key=token_ids.__getitem__)
    if type(tokenizer.model) not in SCHEMES:
        return f"its model is {type(tokenizer.model).__name__}, allowed are BPE and WordLevel"
    first = tuple(tokens[: len(BASE_SPECIALS)])
    if first != BASE_SPECIALS:
        return f"its first tokens are {', '.join(map(repr, first))}, not {', '.join(BASE_SPECIALS)}"
    if [token_ids[token] for token in tokens] != list(range(len(tokens))):
        return "its tokens are not numbered from 0 on, each once"
    scheme, splitter = SCHEMES[type(tokenizer.model)]
    normalizing = [_steps(_normalizer(scheme, lowercase)) for lowercase in (False, True)]
    knows_normalizer = _steps(tokenizer.normalizer) in normalizing
    if not knows_normalizer or not isinstance(tokenizer.pre_tokenizer, splitter):
        return "its normalizer or pre_tokenizer is another one"
    return ""


def _markers(tokenizer: Tokenizer) -> re.Pattern | None:
    """Return a pattern of a foreign tokenizer's special tokens, such as the markers of a chat; None if it has none."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = [re.escape(token.content) for token in added if token.special]
    if not special:
        return None
    return re.compile("|".join(special))


def _read(path: Path) -> bytes:
    """Read a tokenizer.json or the file beside it; refuse one that is far too large."""
    if Path(path).stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: more than {MAX_BYTES >> 20} MiB; not a tokenizer.json")
    return Path(path).read_bytes()


def _companion(path: Path) -> dict:
    """Merge the files beside a tokenizer.json into the content of one tokenizer_config.json; {} if there are none."""
    folder = Path(path).parent
    content = _json_beside(folder / SPECIAL_MAP) | _json_beside(folder / COMPANION)
    templates = {"default": folder / CHAT_TEMPLATE}
    templates |= {file.stem: file for file in sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))}
    texts = {
        name: _read(file).decode("utf-8", "replace")
        for name, file in templates.items()
        if file.is_file()
    }
    if list(texts) == ["default"]:
        content["chat_template"] = texts["default"]
    elif texts:
        content["chat_template"] = [dict(name=name, template=texts[name]) for name in texts]
    return {name: value for name, value in content.items() if name not in NOT_CARRIED}


def _json_beside(file: Path) -> dict:
    """Return the keys and values of a JSON file; {} if there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read(file))
        if not isinstance(content, dict):
            raise ValueError(f"{type(content).__name__}; expected keys and values")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a {file.name} ({reason_of(error)})") from None
    return content


def _roles(companion: dict, token_ids: dict[str, int], where: str) -> dict[str, str]:
    """Return role -> token of a foreign tokenizer, from its tokenizer_config.json or else from the usual names."""
    named = {}
    for role in USUAL_ROLES:
        token = companion.get(role)
        if isinstance(token, dict):  # a token with its options
            token = token.get("content")
        if isinstance(token, str):
            named[role] = token
    roles = {}
    for role, usual in USUAL_ROLES.items():
        if role in named:
            candidates = [named[role]]
        elif named:  # the file names other roles, so this one has no token
            candidates = []
        else:
            candidates = [name for name in usual if name in token_ids]
        if not candidates:
            continue
        if len(candidates) > 1:
            raise ValueError(
                f"{where}: {role} may be {' or '.join(candidates)}; put a {COMPANION} beside it that says which"
            )
        token = candidates[0]
        if token not in token_ids:
            raise ValueError(
                f"{where}: it has no token {token!r}, which its {COMPANION} names as {role}"
            )
        roles[role] = token
    if "eos_token" not in roles:
        raise ValueError(
            f"{where}: which token ends a text is not known; put a {COMPANION} with eos_token beside it"
        )
    return roles

"""What counts as a word in the text that is scored: sacrebleu's tokenizers by language, and words cut into pieces."""

import re
from collections.abc import Callable, Iterable, Sequence

from sacrebleu.metrics import BLEU

# Other codes (ISO 639-2 and 639-3) of languages -> the code for which sacrebleu has a tokenizer.
CODES = dict(zho="zh", chi="zh", cmn="zh", yue="zh", jpn="ja", jp="ja", kor="ko")
CUT_WORD = re.compile(r"\S@@(?= |$)")  # of subword-nmt: "con@@ tinu@@ ation"
BLANK = "\u2581"  # of SentencePiece, instead of a blank: "\u2581con tinu ation"
CUT_LINES = 0.1  # a text counts as cut into pieces if more than this share of its lines has pieces
LONG = 10  # tokens of more characters on average are no words; German or Finnish words have 6 to 8


def bleu_tokenizer(target: str, asked: str | None = None) -> str:
    """Return the name of sacrebleu's tokenizer: the one `asked` for, or sacrebleu's choice by the target's language.

    Raises:
        ValueError: a package that the tokenizer needs is missing.
    """
    if asked in (None, "given"):
        language = re.split("[-_]", target.lower())[0]
        arguments = dict(trg_lang=CODES.get(language, language))
    else:
        arguments = dict(tokenize=asked)
    try:
        signature = BLEU(**arguments).tokenizer_signature
    except (ImportError, RuntimeError):
        code = (asked or arguments["trg_lang"]).partition("-")[0]
        raise ValueError(
            f"data.target {target}: BLEU needs a package: pip install 'sacrebleu[{code}]', "
            "or --generate.tokenizer char, which counts characters"
        ) from None
    # The signature of a dictionary's tokenizer also has its versions: ja-mecab-0.996-IPA.
    return next(name for name in BLEU.TOKENIZERS if signature.startswith(name))


def tokenise_by(tokenizer: str) -> Callable[[str], str]:
    """Return the function of one of sacrebleu's tokenizers; "given" leaves a line as it is."""
    if tokenizer == "given":
        return str
    return BLEU(tokenize=tokenizer).tokenizer


def pieces_in(lines: Sequence[str]) -> str:
    """Return the sign by which words are cut into pieces, "@@" or U+2581; "" if words are whole."""
    least = CUT_LINES * len(lines)
    if sum(BLANK in line for line in lines) > least:
        return BLANK
    if sum(bool(CUT_WORD.search(line)) for line in lines) > least:
        return "@@"
    return ""


def join_pieces(line: str, sign: str) -> str:
    """Join the pieces of a line into whole words; with the sign "" return the line as it is."""
    if sign == BLANK:
        return line.replace(" ", "").replace(BLANK, " ").strip()
    if sign:
        return re.sub(r"@@( |$)", "", line)
    return line


def mean_length(lines: Iterable[str]) -> float:
    """Return the mean number of characters between blanks."""
    words = [word for line in lines for word in line.split()]
    return sum(map(len, words)) / max(1, len(words))


def notes_on_bleu(lines: Sequence[str], tokenizer: str, name: str) -> list[str]:
    """Return warnings if the tokens of the references, called `name`, are not words; `tokenizer`: see `tokenise_by`."""
    sign = pieces_in(lines)
    notes = []
    if sign:
        notes.append(f"{name} is cut into pieces ({sign}): BLEU is of whole words, joined again")
    whole = [join_pieces(line, sign) for line in lines]
    length = mean_length(map(tokenise_by(tokenizer), whole))
    if length > LONG:
        notes.append(
            f"{name}: the tokens of BLEU have {length:.0f} characters on average by {tokenizer}, so they are no words: "
            "a language without blanks needs --generate.tokenizer char, or the one of its language"
        )
    return notes


def notes_on_perplexity(lines: Sequence[str], name: str) -> list[str]:
    """Return warnings if blanks do not separate words in a text, so that perplexity per word counts something else."""
    sign = pieces_in(lines)
    if sign:
        return [f"{name} is cut into pieces ({sign}): perplexity per word is per piece"]
    length = mean_length(lines)
    if length > LONG:
        return [
            f"{name}: {length:.0f} characters between two blanks on average: perplexity per word is per such stretch"
        ]
    return []

"""What BLEU and perplexity per word count in languages without blanks, and in text that is cut into pieces."""

import json

import pytest

from moh_vision.language import train as train_text
from moh_vision.language.evaluation.translation import bleu
from moh_vision.language.evaluation.words import bleu_tokenizer, join_pieces, pieces_in
from tests.support import refusals
from tests.support.small_runs import arguments, results
from tests.support.small_text import ENGLISH, write_pairs, write_plain

CHINESE = dict(zip(ENGLISH, "零一二三四五六七八九"))


def pairs(folder, language, change):
    """Numbers in German, and in English words as `change` rewrites each line."""
    write_pairs(folder, train=60, val=20, test=0)
    for split in ("train", "val"):
        lines = (folder / f"{split}.de").read_text().splitlines()
        english = [" ".join(ENGLISH[len(word) % 10] for word in line.split()) for line in lines]
        (folder / f"{split}.{language}").write_text("".join(f"{change(e)}\n" for e in english))
        (folder / f"{split}.en.gz").unlink()
    return folder


def train(tmp_path, capsys, language, change, *more):
    data = pairs(tmp_path / "data", language, change)
    argv = arguments("text", tmp_path / "run", 2, 100)
    argv += ["--data.root", str(data), "--data.target", language, *more]
    train_text.main(argv)
    return results(tmp_path / "run"), capsys.readouterr().out


def without_blanks(line):
    return "".join(CHINESE[word] for word in line.split()) + "。"


def test_the_tokenizer_is_sacrebleus_choice_for_the_target():
    assert [bleu_tokenizer(t) for t in ("de", "zh", "zh-CN", "zho_Hans", "th")] == [
        *("13a", "zh", "zh", "zh", "13a")
    ]
    assert (bleu_tokenizer("zh", "char"), bleu_tokenizer("zh", "given")) == ("char", "zh")
    references = ["我喜欢在早上喝茶。", "他昨天去了北京。"]
    translations = ["我喜欢早上喝茶。", "他昨天去了北京市。"]
    assert bleu(translations, references, "13a")["bleu"] == 0
    assert bleu(translations, references, bleu_tokenizer("zh"))["bleu"] > 50


def test_into_chinese(tmp_path, capsys):
    found, out = train(tmp_path, capsys, "zh", without_blanks)
    sacrebleu, papers = found["bleu"]["soft"].values()
    assert "|tok:zh|" in sacrebleu["signature"] and "tokenised:zh|" in papers["signature"]
    lines = (tmp_path / "data" / "val.zh").read_text().splitlines()
    assert sacrebleu["reference_length"] == sum(map(len, lines)), "a character is a token"
    assert "characters on average" not in out


@pytest.mark.parametrize("language, code", [("ja", "ja"), ("jpn_Jpan", "ja"), ("ko", "ko")])
def test_a_missing_package_is_named_before_any_work(tmp_path, capsys, monkeypatch, language, code):
    def missing(*_, **__):
        raise RuntimeError("Please install them")

    monkeypatch.setattr("sacrebleu.metrics.bleu._get_tokenizer", missing)
    argv = arguments("text", tmp_path / "run", 2, 100)
    argv += ["--data.root", tmp_path / "nowhere", "--data.target", language]
    error = refusals.refused(capsys, train_text.main, *argv)
    facts = f"data.target {language} 'sacrebleu[{code}]' --generate.tokenizer char"
    refusals.assert_says(error, facts)
    assert not (tmp_path / "run").exists()


def test_tokens_that_are_no_words_are_said(tmp_path, capsys):
    """A language that sacrebleu has no tokenizer for, and that writes no blanks."""
    found, out = train(tmp_path, capsys, "th", lambda line: line.replace(" ", ""))
    assert "val.th: the tokens of BLEU have" in out and "--generate.tokenizer char" in out
    assert "|tok:13a|" in found["bleu"]["soft"]["bleu"]["signature"]
    more = ["--generate.tokenizer", "char", "--fresh"]
    found, out = train(tmp_path, capsys, "th", lambda line: line.replace(" ", ""), *more)
    assert "the tokens of BLEU" not in out
    assert "|tok:char|" in found["bleu"]["soft"]["bleu"]["signature"]


@pytest.mark.parametrize("sign", ["@@", "\u2581"])
def test_words_in_pieces_are_joined(tmp_path, capsys, sign):
    def cut(line):
        if sign == "@@":
            return " ".join(f"{word[:2]}@@ {word[2:]}" for word in line.split())
        return " ".join(f"{sign}{word[:2]} {word[2:]}" for word in line.split())

    whole = ["one two three", "zero"]
    assert pieces_in(whole) == "" and pieces_in(list(map(cut, whole))) == sign
    assert [join_pieces(cut(line), sign) for line in whole] == whole
    assert pieces_in(["see the hunk @@ -1,2 @@ of a diff", "an@@"] + whole * 20) == ""
    found, out = train(tmp_path, capsys, "en", cut)
    assert f"val.en is cut into pieces ({sign}): BLEU is of whole words, joined again" in out
    assert found["bleu_joined"] == sign
    scored = found["bleu"]["soft"]["tokenised_bleu"]
    lines = (tmp_path / "data" / "val.en").read_text().splitlines()
    assert 2 * scored["reference_length"] == sum(len(line.split()) for line in lines)
    assert sign not in (tmp_path / "run" / "translations.txt").read_text()


def test_perplexity_per_word_of_text_without_words_is_said(tmp_path, capsys):
    folder = write_plain(tmp_path / "plain", train=60, val=10)
    for change, words in (
        (str, ""),
        (lambda text: text.replace(" ", ""), "characters between two blanks on average"),
        (lambda text: text.replace("e ", "@@ e "), "is cut into pieces (@@): perplexity per word"),
    ):
        for split in ("train", "valid"):
            file = folder / f"{split}.txt"
            lines = (tmp_path / "plain" / f"{split}.txt").read_text().splitlines()
            changed = tmp_path / "changed" / file.name
            changed.parent.mkdir(exist_ok=True)
            changed.write_text("".join(f"{change(line)}\n" for line in lines))
        argv = arguments("clm", tmp_path / f"run{len(words)}", 1, 100)
        train_text.main([*argv, "--data.root", str(tmp_path / "changed"), "--data.block", "4"])
        out = capsys.readouterr().out
        assert words in out and ("per word" in out) == bool(words)
    record = json.loads((tmp_path / "run0" / "results.json").read_text())
    assert record["validation"]["word_perplexity"] > 1

"""A published text model read back is the model of the run: the same ids, special tokens, loss and generated text."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from moh_vision.__main__ import main as command
from moh_vision.language import train as train_text
from moh_vision.language.data.inputs import INPUTS
from moh_vision.language.data.vocabulary import BOS, EOS, MASK, PAD, UNK, Vocabulary
from moh_vision.language.models.create import list_text_presets, preset_config, task_of
from moh_vision.language.models.weights import saved_model
from tests.support.refusals import one_line
from tests.support.small_runs import results
from tests.support.small_text import write_pairs, write_plain
from tests.support.tiny_lm import write_task

SIZES = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4)
LLAMA = dict(SIZES, num_hidden_layers=2, num_key_value_heads=4, max_position_embeddings=32)
LAYERS = dict(SIZES, encoder_layers=1, decoder_layers=1)
BLOCKS = "--data.val valid --data.block 16 --optim.batch_size 4"
PAIRS = (
    "--data.source de --data.target en --data.max_tokens 200 --data.max_length 60 --generate.beam 1"
)
# Name of a case -> preset, its fields, options, and the ids that training puts before and behind a text.
CASES = {
    "clm_small": ("clm_small", LLAMA, f"{BLOCKS} --data.merges 20", [EOS], []),
    "clm_moh": ("clm_moh_small_75", LLAMA, f"{BLOCKS} --data.merges 20", [EOS], []),
    "clm_words": (
        "clm_wt103_base",
        dict(SIZES, num_hidden_layers=2, adaptive_cutoffs=[6, 10]),
        f"{BLOCKS} --data.words 0 --label_smoothing 0",
        [EOS],
        [],
    ),
    "mlm": ("mlm_base", dict(SIZES, num_hidden_layers=2), f"{BLOCKS} --data.merges 20", [BOS], [EOS]),
    "mt_joint": ("mt_mae_7", LAYERS, f"{PAIRS} --data.merges 60", [], [EOS]),
    "mt_two": ("mt_moa_2K4E8D", LAYERS, f"{PAIRS} --data.merges 60 --data.target_merges 40", [], [EOS]),
}  # fmt: skip
TEXTS = {
    "one token": "one",
    "several": "seven eight nine",
    "unknown": "the cat",
    "empty": "",
    "blanks before": "  two three",
    "blanks behind": "two  ",
    "end": "two </s> three",
    "end alone": "</s>",
    "end within a word": "two</s>three",
    "start": "<s> two",
    "padding": "<pad>",
    "the word unk": "two <unk> three",
    "upper case": "ONE </S>",
}


class Published(NamedTuple):
    case: str
    run: Path
    folder: Path  # the run, published
    again: Path  # published by a run that began with `folder` and trained nothing

    def everywhere(self):
        return self.run, self.folder, self.again


def train(output, case, data, steps, *more):
    preset, fields, options, *_ = CASES[case]
    argv = [*options.split(), "--data.root", data, "--max-steps", steps, "--output", output]
    argv += ["--log-every", 1, "--optim.lr", 1e-2, "--optim.warmup_steps", 1]
    train_text.main([*map(str, argv), *map(str, more or named(preset, fields))])


def named(preset, fields):
    return ["--model.name", preset, "--model.kwargs", json.dumps(fields)]


# clm_moh has the tokenizer and the classes of clm_small.
@pytest.fixture(
    scope="module",
    params=[pytest.param("clm_small", marks=pytest.mark.slow), *list(CASES)[1:]],
)
def published(request, tmp_path_factory):
    case = request.param
    folder = tmp_path_factory.mktemp(case)
    preset, fields, *_ = CASES[case]
    data = folder / "data"
    if preset.startswith("mt"):
        write_pairs(data, train=60, val=12, test=5)
    else:
        write_plain(data, train=60, val=10)
        for file in (data / "train.txt", data / "valid.txt"):
            file.write_text(file.read_text() + "one </s> two\n<pad> three\nfour <unk> five\n")
    train(folder / "run", case, data, 3)
    assert command(["publish", str(folder / "run"), "--output", str(folder / "out")]) == 0
    if preset in ("clm_small", "clm_moh_small_75"):
        start = ["--model.name", "clm_pretrained", "--model.pretrained", folder / "out"]
    else:
        start = [*named(preset, fields), "--init-from", folder / "out"]
    train(folder / "scored", case, data, 0, *start)
    assert command(["publish", str(folder / "scored"), "--output", str(folder / "again")]) == 0
    return Published(case, folder / "run", folder / "out", folder / "again")


def tokenizers(published):
    """Return the folders with tokenizers of the run and of both published folders."""
    folders = [published.everywhere()]
    if published.case == "mt_two":
        folders.append(tuple(folder / "target" for folder in published.everywhere()))
    return folders


# Each is read once, because a case asks them for every text.
tokenizer_of = functools.cache(AutoTokenizer.from_pretrained)
vocabulary_of = functools.cache(Vocabulary.load)


@pytest.mark.parametrize("text", TEXTS)
def test_ids(published, text):
    *_, before, behind = CASES[published.case]
    for run, *others in tokenizers(published):
        (ids,) = vocabulary_of(run / "tokenizer.json").encode([TEXTS[text]])
        assert not {PAD, BOS, EOS, MASK} & {*ids}
        for folder in others:
            vocabulary = vocabulary_of(folder / "tokenizer.json")
            assert vocabulary.encode([TEXTS[text]]) == [ids]
        # A masked model's tokenizer has to read <mask>, and reads the other special tokens too.
        options = dict(split_special_tokens=True) if published.case == "mlm" else {}
        for folder in (run, *others):
            tokenizer = tokenizer_of(folder)
            assert tokenizer(TEXTS[text], **options).input_ids == [*before, *ids, *behind]


def test_words_that_are_special_tokens(published):
    """What a text with them becomes, by hand."""
    tokenizer = AutoTokenizer.from_pretrained(published.folder)
    if published.case == "clm_words":
        assert tokenizer("</s> <pad>").input_ids == [EOS, UNK, UNK]
    if published.case == "mlm":
        assert tokenizer("<mask>").input_ids == [BOS, MASK, EOS]
        assert tokenizer("</s>").input_ids == [BOS, EOS, EOS]
    (unknown,) = tokenizer("<unk>", add_special_tokens=False).input_ids
    assert unknown == UNK and tokenizer.decode([UNK], skip_special_tokens=True) == "<unk>"


def test_files(published):
    for run, *others in tokenizers(published):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            for folder in others:
                assert (folder / name).read_bytes() == (run / name).read_bytes()


def test_special_tokens_of_tokenizer_and_configurations(published):
    bos = EOS if published.case.startswith("clm") else BOS
    for folder in published.everywhere():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        configs = [AutoConfig.from_pretrained(folder)]
        if (folder / "generation_config.json").exists():
            configs.append(saved_model(folder).generation_config)
        for source in (tokenizer, *configs):
            ids = (source.bos_token_id, source.eos_token_id, source.pad_token_id)
            assert ids == (bos, EOS, PAD)
        longest = getattr(configs[0], "max_position_embeddings", None)
        assert longest is None or tokenizer.model_max_length == longest


def test_scores(published):
    first = results(published.run)["validation"]
    second = results(published.run.with_name("scored"))["validation"]
    assert second["tokens"] == first["tokens"]
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-6)


def test_outputs(published):
    """Generated text; of a masked model, which generates none, its logits."""
    texts = ["one", "", " two", "two </s>", "<unk>"]
    outputs = []
    for folder in published.everywhere():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = saved_model(folder).eval()
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        torch.manual_seed(0)
        with torch.no_grad():
            if published.case == "mlm":
                outputs.append(model(**inputs).logits)
            else:
                outputs.append(model.generate(**inputs, max_new_tokens=8, do_sample=True))
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])


@pytest.mark.parametrize("preset", list_text_presets())
def test_a_preset_starts_texts_as_its_task_does(preset):
    """For models that are made without a run."""
    config = preset_config(preset)
    form = INPUTS[task_of(preset)].form
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (form.bos, EOS, PAD)
    assert getattr(config, "decoder_start_token_id", form.bos) in (None, form.bos)


ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}"
metric_list:
  - {metric: word_perplexity}
"""


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.parametrize(
    "published", [case for case in CASES if case.startswith("clm")], indirect=True
)
def test_perplexity_by_the_harness(published, tmp_path):
    """That of a text behind one start token."""
    text = "two three </s> four"
    tasks = write_task(tmp_path / "tasks", "rolling", [dict(q=text)], ROLLING)
    (ids,) = Vocabulary.load(published.run / "tokenizer.json").encode([text])
    ids = torch.tensor([[EOS, *ids]])
    with torch.no_grad():
        scores = saved_model(published.run).eval()(ids).logits[0].log_softmax(-1)
    nats = -sum(scores[i - 1, ids[0, i]].item() for i in range(1, ids.shape[1]))
    for number, folder in enumerate((published.run, published.again)):
        out = tmp_path / f"{number}.json"
        argv = ["--tasks", "rolling", "--include-path", tasks, "--out", str(out)]
        assert command(["lm", "--model", str(folder), *argv]) == 0
        (row,) = json.loads(out.read_text())["rows"]
        found = row["metrics"]["rolling"]["word_perplexity,none"]
        assert found == pytest.approx(torch.tensor(nats / len(text.split())).exp().item(), rel=1e-4)


def test_a_model_that_transformers_does_not_know_is_one_line(tmp_path):
    """transformers advises in several lines, which do not name the file."""
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "moh_llamo"}')
    with one_line(f"{file} moh_llamo"):
        saved_model(tmp_path)

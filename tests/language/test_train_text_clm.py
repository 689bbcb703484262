"""train_text.py on causal models: token ids, weighted sources, foreign tokenizers, pre-trained models that become routed."""

import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import moh_vision
from moh_vision.__main__ import main as command
from moh_vision.common.io import sha256_of
from moh_vision.language import train as train_text
from moh_vision.models.head_load import HeadLoad
from tests.support import refusals
from tests.support.paths import ROOT
from tests.support.small_runs import entries, results, same
from tests.support.small_text import ENGLISH, words, write_plain

FAST = "--log-every 1 --optim.lr 5e-3 --optim.warmup_steps 3 --optim.batch_size 8 --data.block 16 --label_smoothing 0"
CLM = ["--model.name", "clm_pretrained"]
HALVED = [*CLM, "--model.convert", "{head_budget: 'uniform:0.5'}"]
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """plain/: text; ids/: the same as ids; old/, new/: tokenizers of 13 and 20 tokens; llama/: a model of the old one."""
    folder = tmp_path_factory.mktemp("clm")
    write_plain(folder / "plain")
    words(folder / "old", ENGLISH)
    new = words(folder / "new", [*ENGLISH, *"abcdefg"])
    argv = ["--tokenizer", str(new), "--out", str(folder / "ids")]
    assert command(["tokenise", str(folder / "plain" / "train.txt"), *argv]) == 0
    assert command(["tokenise", str(folder / "plain" / "valid.txt"), *argv, "--split", "val"]) == 0
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=13, max_position_embeddings=64, **SIZES)
    ).save_pretrained(folder / "llama")
    return folder


def train(run, steps, *more):
    train_text.main(
        [*FAST.split(), "--max-steps", str(steps), "--output", str(run), *map(str, more)]
    )
    return entries(run)


def refused(run, capsys, *more):
    error = refusals.refused(
        capsys, train_text.main, *FAST.split(), "--max-steps", 2, "--output", run, *more
    )
    assert not run.exists()
    return error


def test_the_two_stages(texts, tmp_path, capsys):
    """A dense LLaMA grows its vocabulary and learns; then it gets routed heads and learns on."""
    for name in ("plain", "ids"):
        (tmp_path / name).symlink_to(texts / name)
    (tmp_path / "val.txt").write_text((texts / "plain" / "valid.txt").read_text())
    sources = [dict(root="plain", weight=1), dict(root="ids", weight=3)]
    data = [
        "--data.root",
        tmp_path,
        "--data.mixture",
        json.dumps(sources),
        "--data.tokenizer",
        texts / "new",
        *CLM,
    ]
    first = tmp_path / "one"
    lines = train(
        first, 20, *data, "--model.pretrained", texts / "llama", "--optim.accumulation", 2
    )
    out = capsys.readouterr().out
    assert (
        "the vocabulary grows from 13 to 20 tokens: new rows of the embedding and of the output"
        in out
    )
    assert "source plain: 25.00 %" in out and "source ids: 75.00 %" in out
    steps = [e for e in lines if "loss" in e]
    assert steps[-1]["nll"] < 0.8 * steps[0]["nll"] and steps[-1]["balance_loss"] == 0
    validation = results(first)["validation"]
    assert validation["loss"] < 0.8 * steps[0]["nll"] and validation["word_perplexity"] > 1

    # The folder is one of transformers.
    model = AutoModelForCausalLM.from_pretrained(first)
    tokenizer = AutoTokenizer.from_pretrained(first)
    assert (
        model.config.vocab_size == 20
        and model.config.moh is None
        and model.generation_config.eos_token_id == 2
    )
    inputs = tokenizer("one two three four", return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[4, 5, 6, 7]]
    assert model.generate(**inputs, max_new_tokens=3).shape == (1, 7)

    options = [*data, "--model.pretrained", first, "--model.head_budget", "[[1,1],[1,1]]"]
    train(tmp_path / "whole", 5, *options)
    second = tmp_path / "two"
    train(second, 2, *options)
    steps = [e for e in train(second, 5, *options) if "loss" in e]
    assert same(tmp_path / "whole/model.safetensors", second / "model.safetensors")
    assert all(e["balance_loss"] > 0 and e["loss"] > e["nll"] for e in steps)
    assert [sum(layer) for layer in steps[-1]["head_usage"]] == pytest.approx([2, 2], abs=0.01)
    assert not (first / "head_load.json").exists()  # every head runs
    load = HeadLoad.read(second / "head_load.json")
    assert load.groups == {
        "text": ["val", "plain", "ids"]
    }  # the validation set, and the sources of the mixture
    assert [layer.sum(1).tolist() for layer in load.share()] == [[2, 2, 2]] * 2
    validated = load.runs()[0][
        :, -1
    ]  # tokens that the windows hold, of the sources no more than of the validation set
    assert (
        validated[0] >= results(second)["validation"]["tokens"]
        and 0 < validated[1:].max() <= validated[0]
    )
    model = AutoModelForCausalLM.from_pretrained(second)
    assert (
        model.config.moh["head_budget"] == [[1, 1], [1, 1]]
        and model.config.moh["router"] == "query_norm"
    )
    assert same(model, moh_vision.load_run(second / "checkpoints" / "step_5"))
    before = load_file(first / "model.safetensors")
    assert load_file(second / "model.safetensors").keys() == before.keys()  # no new parameters
    again = ["--model.pretrained", second, "--model.convert", "{head_budget: 0.5}"]
    error = refused(tmp_path / "three", capsys, *data, *again)
    refusals.assert_says(error, f"model.convert model.pretrained {second} already")


def test_pretrained_brings_its_tokenizer(texts, tmp_path, capsys):
    """A new vocabulary would number other tokens than the model has learnt."""
    llama = tmp_path / "llama"
    shutil.copytree(texts / "llama", llama)
    shutil.copy(texts / "old" / "tokenizer.json", llama)
    train(tmp_path / "run", 1, "--data.root", texts / "plain", *CLM, "--model.pretrained", llama)
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (
        llama / "tokenizer.json"
    ).read_bytes()

    # Another may add tokens, not move them.
    options = [
        "--data.root",
        texts / "plain",
        *CLM,
        "--model.pretrained",
        llama,
        "--data.tokenizer",
    ]
    train(tmp_path / "grown", 1, *options, texts / "new")
    other = words(tmp_path / "other", ENGLISH[::-1])
    error = refused(tmp_path / "moved", capsys, *options, other)
    facts = f"data.tokenizer {other} 3 {ENGLISH[-1]!r} {llama}/tokenizer.json {ENGLISH[0]!r}"
    refusals.assert_says(error, facts)


def chat_folder(folder, extra=("<|user|>", "<|end|>")):
    """A LLaMA with a tokenizer as a chat model has it."""
    words(folder, [*ENGLISH, *extra])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(extra),
        padding_side="left",
        pad_token="</s>",
        model_max_length=48,
        chat_template="{% for m in messages %}<|user|> {{ m['content'] }} <|end|>{% endfor %}",
    )
    tokenizer.save_pretrained(folder)
    size = dict(vocab_size=len(tokenizer), max_position_embeddings=64)
    model = LlamaForCausalLM(LlamaConfig(**size, **SIZES))
    model.generation_config.update(eos_token_id=[2, 14], temperature=0.6, do_sample=True)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["one file", "files of transformers 4"])
def test_what_a_foreign_tokenizer_and_model_say_is_carried_over(texts, tmp_path, form):
    """Of a chat model its template, left padding, length, extra special tokens and end tokens, in every folder."""
    llama = chat_folder(tmp_path / "llama")
    if form == "files of transformers 4":
        companion = json.loads((llama / "tokenizer_config.json").read_text())
        special = {name: companion.pop(name) for name in ("unk_token", "eos_token", "bos_token")}
        special["additional_special_tokens"] = companion.pop("extra_special_tokens")
        special["pad_token"] = companion.pop("pad_token")
        companion["chat_template"] = (llama / "chat_template.jinja").read_text()
        (llama / "chat_template.jinja").unlink()
        (llama / "tokenizer_config.json").write_text(json.dumps(companion))
        (llama / "special_tokens_map.json").write_text(json.dumps(special))
    run = tmp_path / "run"
    data = ["--data.root", texts / "plain", "--keep-weights-every", 1]
    train(run, 1, *data, *CLM, "--model.pretrained", llama)
    train(tmp_path / "next", 1, *data, *CLM, "--model.pretrained", run)
    assert command(["publish", str(run), "--output", str(tmp_path / "out")]) == 0
    theirs = AutoTokenizer.from_pretrained(llama)
    assert theirs.padding_side == "left" and theirs.all_special_tokens[-2:] == [
        "<|user|>",
        "<|end|>",
    ]
    for folder in (run, run / "weights" / "step_1", tmp_path / "out", tmp_path / "next"):
        ours = AutoTokenizer.from_pretrained(folder)
        assert (ours.padding_side, ours.model_max_length) == ("left", 48), folder
        assert ours.chat_template == theirs.chat_template
        assert ours.special_tokens_map == theirs.special_tokens_map
        assert ours.all_special_tokens == theirs.all_special_tokens
        chat = [dict(role="user", content="one two")]
        asked = dict(tokenize=False)
        assert ours.apply_chat_template(chat, **asked) == "<|user|> one two <|end|>"
        assert ours("<|user|> one two <|end|>").input_ids == [13, 4, 5, 14]
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.eos_token_id == 2 and model.generation_config.eos_token_id == [2, 14]
        assert model.generation_config.temperature == 0.6


def test_ids_and_rows_to_spare(texts, tmp_path, capsys):
    """Such a run is resumed too, with the same ids."""
    shutil.copytree(texts / "ids", tmp_path / "ids")
    options = [
        "--data.root",
        tmp_path / "ids",
        "--data.tokenizer",
        texts / "new",
        "--data.vocab_size",
        24,
        *CLM,
    ]
    options += ["--model.pretrained", texts / "llama"]
    train(tmp_path / "whole", 4, *options)
    train(tmp_path / "run", 2, *options)
    train(tmp_path / "run", 4, *options)
    assert same(tmp_path / "whole/model.safetensors", tmp_path / "run/model.safetensors")
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["vocab_size"] == 24 and about["eos_token_id"] == 2
    opened = moh_vision.open_run(tmp_path / "run")
    assert opened.scores()["loss"] == pytest.approx(results(tmp_path / "run")["validation"]["loss"])
    rewritten = ["tokenise", str(texts / "plain" / "valid.txt"), "--tokenizer", str(texts / "new")]
    shutil.rmtree(tmp_path / "ids" / "train-00000")
    assert command([*rewritten, "--out", str(tmp_path / "ids")]) == 0
    argv = [*FAST.split(), "--max-steps", 6, "--output", tmp_path / "run", *options]
    error = refusals.refused(capsys, train_text.main, *argv)
    refusals.assert_says(error, f"data.root {tmp_path}/ids train {tmp_path}/run --fresh")


def test_from_scratch(texts, tmp_path):
    """Its own byte pairs, trained on all the text there is."""
    options = [
        "--data.root",
        texts / "plain",
        "--data.merges",
        30,
        "--model.name",
        "clm_moh_small_50",
    ]
    options += [
        "--model.kwargs",
        json.dumps(SIZES | dict(num_key_value_heads=4)),
        "--checkpointing",
        "true",
    ]
    steps = [e for e in train(tmp_path / "run", 12, *options) if "loss" in e]
    assert steps[-1]["nll"] < 0.9 * steps[0]["nll"] and steps[-1]["balance_loss"] > 0
    model, tokenizer = (
        loader.from_pretrained(tmp_path / "run") for loader in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model.config.vocab_size == len(tokenizer) and (
        tokenizer.eos_token,
        tokenizer.eos_token_id,
    ) == ("</s>", 2)
    assert tokenizer.decode(tokenizer("one two")["input_ids"]) == "</s> one two"
    # What stands before the first token in training is eos; bos is in no text.
    assert (
        tokenizer.bos_token == "</s>"
        and model.config.bos_token_id == model.generation_config.bos_token_id == 2
    )

    # The guide's code continues a text from the published folder, whose tokenizer puts eos there.
    assert command(["publish", str(tmp_path / "run"), "--output", str(tmp_path / "folder")]) == 0
    guide = (ROOT / "docs/guides/text.md").read_text().partition("## Continue a text")[2]
    found = {}
    exec(
        re.search(r"```python\n(.*?)```", guide, re.S)[1].replace(
            "FOLDER", str(tmp_path / "folder")
        ),
        found,
    )
    assert found["ids"][0, 0] == 2 and len(found["ids"][0]) > len(
        found["tokenizer"]("The first album").input_ids
    )

    # A batch is padded before its texts, so that each goes on as it does alone.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.padding_side == "left"
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    sentences = ["one two three four five", "seven"]
    batch = tokenizer(sentences, return_tensors="pt", padding=True)
    assert batch.attention_mask[1, 0] == 0
    told = dict(max_new_tokens=3, min_new_tokens=3, do_sample=False)
    together = model.generate(**batch, **told)[:, -3:]
    for text, row in zip(sentences, together):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), **told)
        assert alone[0, -3:].tolist() == row.tolist()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert tokenizer.padding_side == "left"

    # The perplexity of one text, which needs no training split: as token by token, each behind what its window holds.
    lines = (texts / "plain" / "valid.txt").read_text().splitlines()[:6]
    (tmp_path / "val.txt").write_text("\n".join(lines))
    one = [
        "--data.root",
        tmp_path,
        "--data.train",
        "val",
        *CLM,
        "--model.pretrained",
        tmp_path / "run",
    ]
    train(tmp_path / "scored", 0, *one, "--data.context", 12)  # windows of 16, 4 apart
    ids = torch.tensor([2, *(i for line in lines for i in (*tokenizer(line)["input_ids"][1:], 2))])
    nats = []
    last = len(ids) - 1
    for t in range(1, len(ids)):
        end = min(last, 16 + 4 * max(0, math.ceil((t - 16) / 4)))
        with torch.no_grad():
            scores = model(ids[None, max(0, end - 16) : t]).logits[0, -1].log_softmax(-1)
        nats.append(-scores[ids[t]].item())
    scores = results(tmp_path / "scored")["validation"]
    assert scores["tokens"] == last and scores["loss"] == pytest.approx(sum(nats) / last, rel=1e-5)
    words = sum(len(line.split()) + 1 for line in lines)
    assert scores["word_perplexity"] == pytest.approx(math.exp(sum(nats) / words), rel=1e-4)


def test_mistakes(texts, tmp_path, capsys):
    llama = texts / "llama"
    config = llama / "config.json"
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    (broken / "model.safetensors").write_bytes(
        (broken / "model.safetensors").read_bytes()[:5000]
    )  # cut off
    ids = ["--data.root", texts / "ids"]
    sized = [*ids, "--data.tokenizer", texts / "new"]
    taken = [*CLM, *sized, "--model.pretrained", llama]
    for facts, *options in (
        (
            "model.pretrained model.name clm_pretrained mt_mae_7",
            "--model.name",
            "mt_mae_7",
            "--model.pretrained",
            llama,
        ),
        (
            "model.pretrained model.name clm_pretrained clm_moh_small_75",
            "--model.name",
            "clm_moh_small_75",
            "--model.pretrained",
            llama,
        ),
        ("model.convert 0.5 model.pretrained", *CLM, "--model.convert.head_budget", 0.5),
        (
            f"model.pretrained {texts}/plain model_type config.json",
            *CLM,
            *sized,
            "--model.pretrained",
            texts / "plain",
        ),
        ("model.convert 'head_budge' head_budget", *taken, "--model.convert.head_budge", 0.5),
        ("model.convert 'moa' query_norm moh", *taken, "--model.convert.router", "moa"),
        (
            f"model.kwargs 'hidden_size' 8 model.pretrained {llama}",
            *taken,
            "--model.kwargs.hidden_size",
            8,
        ),
        ("data.block 65 64", *taken, "--data.block", 65),
        (
            f"model.pretrained {llama} tokenizer.json data.tokenizer",
            *CLM,
            "--model.pretrained",
            llama,
            *ids,
        ),
        (
            f"{texts}/ids ids data.tokenizer",
            "--model.name",
            "clm_small",
            *ids,
        ),
        (
            f"model.pretrained {tmp_path}/none",
            *CLM,
            *sized,
            "--model.pretrained",
            tmp_path / "none",
        ),
        (
            f"model.pretrained {config} folder --init-from",
            *CLM,
            *sized,
            "--model.pretrained",
            config,
        ),
        (f"data.vocab_size 12 {texts}/new/tokenizer.json 20", *taken, "--data.vocab_size", 12),
        (
            f"model.pretrained {broken} header",
            *CLM,
            *sized,
            "--model.pretrained",
            broken,
        ),
        (
            "data.mixture model.name clm_",
            "--model.name",
            "mlm_base",
            "--data.mixture",
            "[{root: a, weight: 1}]",
        ),
    ):
        refusals.assert_says(refused(tmp_path / "run", capsys, *options), facts)


def test_dry_run(texts, tmp_path, capsys):
    data = ["--data.root", texts / "ids", "--data.tokenizer", texts / "new"]
    argv = [*HALVED, *data, "--model.pretrained", texts / "llama", "--dry-run"]
    train_text.main([*FAST.split(), "--output", str(tmp_path / "run"), *map(str, argv)])
    assert "active heads: 4 of 8" in capsys.readouterr().out and not (tmp_path / "run").exists()


@pytest.fixture
def damaged(texts, tmp_path):
    """The command line of a run whose ids hold one that is no token."""
    shutil.copytree(texts / "ids", tmp_path / "ids")
    file = tmp_path / "ids" / "train-00000" / "ids.bin"
    ids = np.fromfile(file, "<u2")
    ids[len(ids) // 2] = 77
    ids.tofile(file)
    meta = file.with_name("meta.json")  # of a writer with that fault: damage is found before step 0
    written = dict(json.loads(meta.read_text()), sha256=sha256_of(file, file.with_name("ends.npy")))
    meta.write_text(json.dumps(written))
    argv = [*FAST.split(), "--data.root", tmp_path / "ids", "--data.tokenizer", texts / "new", *CLM]
    argv += ["--data.workers", 1, "--max-steps", 900]
    argv += ["--model.pretrained", texts / "llama", "--output", tmp_path / "run"]
    return [*map(str, argv)], f"{file.parent} {len(ids) // 2} 77 20"


def check_bad_id(code, error, facts):
    lines = error.splitlines()
    assert code == 1 and len(lines) == 1, lines
    assert lines[0].startswith("train_text.py: error: ")
    refusals.assert_says(lines[0], facts)
    assert "Traceback" not in lines[0] and "worker" not in lines[0]


def test_a_bad_id_in_the_middle_ends_the_run(damaged, capfd):
    """In one line, from a process of the loader."""
    argv, facts = damaged
    with pytest.raises(SystemExit) as ended:
        train_text.main(argv)
    check_bad_id(ended.value.code, capfd.readouterr().err, facts)


@pytest.mark.slow
def test_a_bad_id_in_the_middle_ends_the_process(damaged):
    """It must not wait for the loader's."""
    argv, facts = damaged
    command = [sys.executable, ROOT / "train_text.py", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    check_bad_id(done.returncode, done.stderr, facts)

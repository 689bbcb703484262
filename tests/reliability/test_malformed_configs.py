"""Every key of every configuration misspelt, values that the model refuses, and files that are no configuration."""

import string

import pytest
from accelerate.state import AcceleratorState
from refusals import one_line
from repeat import cases

from moh_vision.classification.config import ClsConfig, ValidateConfig
from moh_vision.diffusion.config import DitConfig, SampleConfig
from moh_vision.engine.command_line import groups_of, parse_config
from moh_vision.engine.keys import changed_keys, keys_of, unknown_key
from moh_vision.engine.run import make_accelerator
from moh_vision.language.config import LanguageConfig
from moh_vision.models.weights import create

KINDS = [ClsConfig, DitConfig, LanguageConfig, SampleConfig, ValidateConfig]
NEEDED = {SampleConfig: ["--checkpoint", "run", "--out", "images"], ValidateConfig: ["--checkpoint", "run"]}
LETTERS = string.ascii_lowercase + string.digits + "_."


def parse(kind, *argv):
    return parse_config(kind, [*NEEDED.get(kind, []), *argv], "test")


def edits(key, letters=LETTERS):
    """Every key one edit away: a letter lost, added, exchanged, or two swapped."""
    for i in range(len(key) + 1):
        yield from (key[:i] + letter + key[i:] for letter in letters)
    for i in range(len(key)):
        yield key[:i] + key[i + 1 :]
        yield from (key[:i] + letter + key[i + 1 :] for letter in letters)
        yield key[:i] + key[i + 1 : i + 2] + key[i] + key[i + 2 :]


@pytest.mark.parametrize("letters", ["eq.", pytest.param(LETTERS, marks=pytest.mark.reliability)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_misspelt_by_one_edit_is_corrected(kind, letters):
    """All edits of all keys and flags: the right one is suggested, and alone."""
    own = {name: key for _, keys in groups_of(kind) for name, key in keys.items()}
    of = {}  # an edit may be one from two keys
    for key in own:
        for wrong in set(edits(key, letters)) - set(own):
            of.setdefault(wrong, set()).add(key)
    for wrong, right in of.items():
        message = unknown_key(wrong, own)
        assert any(message == f"unknown key '{wrong}', did you mean '{key}'?" for key in right), (right, message)
    print(f"{len(own)} keys, {len(of)} edits, {sum(len(r) > 1 for r in of.values())} of them of two keys")
    assert len(of) > 5 * sum(map(len, own))


@pytest.mark.parametrize("kind", KINDS)
def test_every_misspelt_key_is_refused_on_the_command_line_and_in_a_file(kind, tmp_path):
    """For each key and flag some of its edits, through the whole of the parser."""
    own, file, tried = {name: key for _, keys in groups_of(kind) for name, key in keys.items()}, tmp_path / "c.yaml", 0
    sections = {key.partition(".")[0] for key in own if "." in key}
    rng = cases(3 * len(own), f"misspelt keys of {kind.__name__}")
    for key in own:
        possible = sorted(e for e in set(edits(key, "aeq_.")) - set(own) if e.strip("_") and e not in sections)
        for wrong in rng.sample(possible, 3):
            with pytest.raises(ValueError, match="unknown key") as error:
                parse(kind, f"--{wrong}", "1")
            message = str(error.value)
            assert f"did you mean '{key}'?" in message and "\n" not in message, (key, message)
            tried += 1
        if not own[key].about["kept"]:
            continue
        head, _, leaf = key.rpartition(".")
        possible = (e for e in sorted(set(edits(leaf, "aeq_"))) if "." not in e)
        wrong = rng.choice([e for e in possible if e and e[0] in string.ascii_lowercase])
        if f"{head}.{wrong}".strip(".") in own or wrong in sections:
            continue
        file.write_text(f"{head}: {{{wrong}: 1}}\n" if head else f"{wrong}: 1\n")
        with pytest.raises(ValueError, match="unknown key") as error:
            parse(kind, "--config", str(file))
        assert str(file) in str(error.value) and f"did you mean '{key}'?" in str(error.value), (key, str(error.value))
        tried += 1
    assert tried >= 3 * len(own)


def test_one_edit_is_nearer_than_many_letters_in_common():
    message = unknown_key("optim.ets", keys_of(ClsConfig))
    assert message == "unknown key 'optim.ets', did you mean 'optim.eps'?"


# ---------------------------------------------------------------- what the model refuses


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(router="mho"), "router.*mho.*moh"),
        (dict(scope="image"), "scope.*image.*sample"),
        (dict(executor="fast"), "executor.*fast.*auto"),
        (dict(head_budget=1.5), "head_budget 1.5 is not understood"),
        (dict(head_budget=0.0), "head_budget 0.0"),
        (dict(head_budget=-0.5), "head_budget -0.5"),
        (dict(head_budget=float("nan")), "head_budget nan"),
        (dict(head_budget="ramp:2"), "head_budget.*ramp:2"),
        (dict(head_budget="slope:0.5"), "head_budget.*slope:0.5"),
        (dict(head_budget=[(1, 1)]), "head_budget"),
        (dict(router_kwargs=dict(gate_scale="x")), "gate_scale.*x"),
        (dict(router_kwargs=dict(colour="x")), "colour"),
        (dict(embed_dim=33, num_heads=2), "33"),
        (dict(colour=3), "colour"),
    ],
)
def test_names_and_budgets_are_refused_by_the_model(arguments, words):
    with one_line(words):
        create("moh_vit_tiny_patch16_224", "classifier", **{**dict(depth=2, embed_dim=32, num_heads=2), **arguments})


def test_arguments_that_the_data_decide():
    model = parse(ClsConfig, "--model.kwargs", "{num_classes: 5, drop_rate: 0.1}").model
    assert model.decided(num_classes=5, in_chans=1) == dict(num_classes=5, in_chans=1)
    with one_line("model.kwargs.num_classes 5 has no effect: the data and other keys make it 10"):
        model.decided(num_classes=10)


def test_half_precision_on_a_processor():
    AcceleratorState._reset_state(True)  # of the tests before
    with one_line('fp16 needs a GPU; on a CPU it is "no" or "bf16"'):
        make_accelerator("fp16")
    AcceleratorState._reset_state(True)


def test_a_configuration_of_another_script():
    with one_line("train_text.py takes this file; .*wt103.yaml: unknown key"):
        parse(ClsConfig, "--config", "text/wt103")
    with one_line("^--config cls/nix: no such file$"):
        parse(ClsConfig, "--config", "cls/nix")


# ---------------------------------------------------------------- files


FILES = {
    "aliases": ("a: &a [x, x]\nmodel: {kwargs: {b: [*a, *a]}}\n", "an alias, \\*a; write the value out"),
    "deep nesting": ("model: {kwargs: {a: " + "[" * 3000 + "]" * 3000 + "}}\n", "not readable as YAML"),
    "a number of 9,999 digits": (f"seed: {'9' * 9999}\n", "not readable as YAML"),
    "two megabytes": ("# " + "x" * 2**21 + "\n", "a configuration has at most 1048576"),
    "bytes": ("\x00\x01\x02", "not readable as YAML"),
    "a list": ("[1, 2]", "expected keys and values, found list"),
    "a text": ("hello", "expected keys and values, found str"),
    "numbers for keys": ("1: 2", "unknown key '1'"),
    "a tag": ("seed: !!python/name:os.system", "not readable as YAML"),
    "two documents": ("seed: 1\n---\nseed: 2\n", "not readable as YAML"),
    "tabs": ("model:\n\tdepth: 1\n", "not readable as YAML"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_configuration(tmp_path, case):
    text, words = FILES[case]
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with one_line(words) as error:
        parse(ClsConfig, "--config", str(file))
    assert str(file) in str(error.value) and len(str(error.value)) < 2000


def test_latin_1_is_no_configuration(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes("output: é\n".encode("latin-1"))
    with pytest.raises(ValueError, match="c.yaml: not readable as YAML"):
        parse(ClsConfig, "--config", str(file))


def test_texts_are_only_texts():
    """Nothing is expanded, run or followed."""
    for text in ("$(touch x)", "`touch x` ~", "../../${HOME}", "%s%n \u202e", "x" * 100_000):
        assert parse(ClsConfig, f"--output={text}").output == text


@pytest.mark.parametrize("value", ["other.yaml", "5", "[1]", "null", "{dpeth: 3}"])
def test_a_section_as_a_whole_holds_known_keys(tmp_path, value, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("depth: 3\n")
    with pytest.raises(ValueError, match="is a section of keys|unknown key 'model.dpeth', did you mean 'model.depth'"):
        parse(ClsConfig, "--model", value)
    assert parse(ClsConfig, "--model", "{depth: 3}").model.depth == 3


@pytest.mark.parametrize("saved", [None, 5, "x", [1]])
def test_a_saved_configuration_that_is_none(saved):
    with pytest.raises(ValueError, match="config.yaml that is there holds no keys and values"):
        changed_keys(saved, parse(ClsConfig), [])

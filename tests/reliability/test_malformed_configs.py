"""Every key of every configuration: misspelt, of a wrong type, out of its range; and files that are no configuration."""

import dataclasses
import string
import typing

import pytest
from accelerate.state import AcceleratorState
from refusals import one_line
from repeat import cases

from moh_vision.classification.config import ClsConfig, MixConfig
from moh_vision.diffusion.config import DitConfig, SampleConfig
from moh_vision.engine.command_line import _leaf_keys, _unknown_key, changed_keys, parse_config
from moh_vision.engine.config import OptimConfig
from moh_vision.engine.run import make_accelerator
from moh_vision.language.config import LanguageConfig
from moh_vision.models.weights import create

KINDS = [ClsConfig, DitConfig, LanguageConfig, SampleConfig]
NEEDED = {SampleConfig: ["--checkpoint", "run", "--out", "images"]}
FLAGS = {
    ClsConfig: ["config", "print_config", "help", "dry_run", "fresh", "allow_change"],
    DitConfig: ["config", "print_config", "help", "dry_run", "fresh", "allow_change"],
    LanguageConfig: ["config", "print_config", "help", "dry_run", "fresh", "allow_change"],
    SampleConfig: ["config", "print_config", "help"],
}
LETTERS = string.ascii_lowercase + string.digits + "_."


def parse(kind, *argv):
    return parse_config(kind, [*NEEDED.get(kind, []), *argv], "test")


def own_types(kind):
    """Those that a configuration before it in KINDS has not."""
    seen = types(ClsConfig) if kind in (DitConfig, LanguageConfig) else {}
    return {key: hint for key, hint in types(kind).items() if seen.get(key) != hint}


FEW = ["some", pytest.param("all", marks=pytest.mark.reliability)]  # keys: jsonargparse takes 0.1 s to look at one


def types(kind, prefix=""):
    """Dotted key -> its type."""
    hints, found = typing.get_type_hints(kind), {}
    for f in dataclasses.fields(kind):
        inner = dataclasses.is_dataclass(hints[f.name])
        found.update(types(hints[f.name], f"{prefix}{f.name}.") if inner else {prefix + f.name: hints[f.name]})
    return found


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
    own = [*_leaf_keys(kind), *FLAGS[kind]]
    of = {}  # an edit may be one from two keys
    for key in own:
        for wrong in set(edits(key, letters)) - set(own):
            of.setdefault(wrong, set()).add(key)
    for wrong, right in of.items():
        message = _unknown_key(wrong, own)
        assert any(message == f"unknown key '{wrong}', did you mean '{key}'?" for key in right), (right, message)
    print(f"{len(own)} keys, {len(of)} edits, {sum(len(r) > 1 for r in of.values())} of them of two keys")
    assert len(of) > 5 * sum(map(len, own))


@pytest.mark.parametrize("kind", KINDS)
def test_every_misspelt_key_is_refused_on_the_command_line_and_in_a_file(kind, tmp_path):
    """For each key and flag some of its edits, through the whole of the parser."""
    own, file, tried = [*_leaf_keys(kind), *FLAGS[kind]], tmp_path / "c.yaml", 0
    sections = {key.partition(".")[0] for key in own if "." in key}
    rng = cases(3 * len(own), f"misspelt keys of {kind.__name__}")
    for key in own if kind is not DitConfig else own_types(kind):
        possible = sorted(e for e in set(edits(key, "aeq_.")) - set(own) if e.strip("_") and e not in sections)
        for wrong in rng.sample(possible, 3):
            with pytest.raises(ValueError, match="unknown key") as error:
                parse(kind, f"--{wrong}", "1")
            message = str(error.value)
            assert f"did you mean '{key}'?" in message and "\n" not in message, (key, message)
            tried += 1
        if key in FLAGS[kind]:
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
    assert tried >= 70


def test_one_edit_is_nearer_than_many_letters_in_common():
    message = _unknown_key("optim.ets", list(_leaf_keys(ClsConfig)))
    assert message == "unknown key 'optim.ets', did you mean 'optim.eps'?"


# ---------------------------------------------------------------- types


def wrong_values(hint):
    """Values, as YAML, that are not of a type."""
    allowed = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,)
    plain = {a for a in allowed if isinstance(a, type)}
    origins = {typing.get_origin(a) for a in allowed}
    wrong = [] if str in plain else ["zebra", "''", "2001-01-01"]
    wrong += ["[[x]]"] if origins & {list, tuple} else ["[1, 2, 3]"]
    shares = typing.Union[float, str] in [inner for a in allowed for inner in typing.get_args(a)]
    texts = [a for a in allowed if a == typing.List[str]]
    wrong += [] if shares or texts else ["[a, b]"]  # the model refuses wrong ends of budget_range
    wrong += [] if dict in origins else ["{a: 1}"]
    if int in plain and float not in plain:
        wrong += ["1.5", "true", ".inf"]
    if float in plain:
        wrong += ["true"]
    if type(None) not in plain:
        wrong += ["null"]
    literals = [value for a in allowed if typing.get_origin(a) is typing.Literal for value in typing.get_args(a)]
    if not plain & {int, float, str} and 7 not in literals:
        wrong += ["7"]
    return wrong


def some_of(pairs, share, what):
    return pairs if share == "all" else cases(5, f"{what} of {len(pairs)}").sample(pairs, 5)


@pytest.mark.parametrize("share", FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_wrong_type_is_refused(kind, share, tmp_path):
    """The message holds the key, the value and what is expected."""
    file = tmp_path / "c.yaml"
    wrong = [(key, text) for key, hint in own_types(kind).items() for text in wrong_values(hint)]
    assert len(wrong) > 3 * len(own_types(kind))
    for key, text in some_of(wrong, share, "values of a wrong type"):
        section, _, leaf = key.rpartition(".")
        file.write_text(f"{section}: {{{leaf}: {text}}}\n" if section else f"{leaf}: {text}\n")
        needed = [] if key == "checkpoint" else NEEDED.get(kind, [])
        with pytest.raises(ValueError) as error:
            parse_config(kind, [*needed, "--config", str(file)], "test")
        message = str(error.value)
        if (key, text) == ("checkpoint", "null"):
            assert message == "the following arguments are required: checkpoint"
            continue
        shown = {"true": "True", ".inf": "inf", "''": "", "2001-01-01": "2001"}
        value = shown.get(text, text.strip("[]{}")[:1])
        assert f'"{key}"' in message and value in message and "\n" not in message, (key, text, message)
        assert "xpected" in message, (key, text, message)


# ---------------------------------------------------------------- ranges

POSITIVE = ["0", "-1"]
NOT_NEGATIVE = ["-1"]
SHARE = ["-0.1", "1", "1.5"]
OUT_OF_RANGE = {
    "data.merges": ["-1"],
    "data.target_merges": ["-1"],
    "data.words": ["-1"],
    "data.vocab_size": ["1", "-1"],
    "data.max_tokens": ["7", "-1"],
    "data.max_length": ["0", "-1"],
    "data.max_ratio": ["1", "-1"],
    "data.share": ["0", "1.5", "-1"],
    "data.block": ["1", "-1"],
    "data.context": ["-1", "128"],
    "data.mask_prob": ["0", "1", "-0.5"],
    "optim.momentum": ["0", "1", "-0.5"],
    "average": ["0", "-1"],
    "keep_weights_every": NOT_NEGATIVE,
    "head_budget": ["[]", "[[1, -1]]"],
    "patience": ["-1"],
    "generate.beam": ["0", "-1"],
    "generate.length_penalty": ["-1"],
    "generate.max_length": ["0", "-1"],
    "generate.batch_size": ["0", "-1"],
    "max_steps": POSITIVE, "seed": ["-1", str(2**63)], "log_every": POSITIVE, "save_every": POSITIVE,
    "keep_checkpoints": POSITIVE, "balance_weight": ["-0.1", ".inf", ".nan"], "label_smoothing": SHARE,
    "moa_balance_weight": ["-0.1", ".nan"], "z_weight": ["-0.1", ".inf"],
    "block_descent.period": POSITIVE, "block_descent.gate_lr": ["0", "-1", ".inf"],
    "calibrate_images": NOT_NEGATIVE, "eval_every": NOT_NEGATIVE, "label_drop": SHARE,
    "model.embed_dim": POSITIVE, "model.depth": POSITIVE, "model.num_heads": POSITIVE, "model.patch_size": POSITIVE,
    "model.head_budget": ["[]", "[[1, -1]]"],
    "data.img_size": POSITIVE, "data.samples": POSITIVE, "data.shuffle_shards": POSITIVE, "data.workers": NOT_NEGATIVE,
    "data.max_bad_fraction": [*SHARE, ".nan"], "data.repeats": POSITIVE, "data.crop_scale": ["[0, 1]", "[0.5, 0.1]", "[0.1, 2]"],
    "data.color_jitter": ["-1", ".inf"], "data.erase_prob": ["-0.1", "1.1"], "data.crop_pct": ["0", "1.1"],
    "data.eval_batch_size": POSITIVE,
    "optim.lr": ["0", "-1", ".nan", ".inf"], "optim.weight_decay": ["-1", ".inf"], "optim.betas": ["[-1, 0.9]", "[0.9, 1]"],
    "optim.batch_size": POSITIVE, "optim.accumulation": POSITIVE, "optim.clip_norm": ["-1", ".nan"],
    "optim.warmup_steps": NOT_NEGATIVE, "optim.min_lr": ["-1", "1"], "optim.epochs": ["0", "-1", ".inf"],
    "optim.warmup_epochs": ["-1", ".inf"], "optim.cooldown_epochs": ["-1", ".inf"], "optim.warmup_lr": ["-1", "1"],
    "optim.eps": ["0", ".inf"], "optim.layer_decay": ["0", "1.1"],
    "mix.mixup": ["-1", ".inf"], "mix.cutmix": ["-1", ".nan"], "mix.prob": ["-0.1", "1.1"], "mix.switch_prob": ["-0.1", "1.1"],
    "distill.task_loss_weight": ["-0.1", ".inf"], "distill.distill_loss_weight": ["0", "-1", ".nan"], "distill.temperature": ["0", ".inf"],
    "repa.block": POSITIVE, "repa.weight": ["0", "-1", ".inf"],
    "ema.decay": SHARE, "flow.shift": ["0", "-1", ".inf"], "min_snr_gamma": ["0", "-1", ".nan"],
    "num_images": POSITIVE, "steps": ["0", "1001"], "cfg_scale": ["-1", ".inf"], "guide_channels": POSITIVE,
    "cfg_interval": ["[0.5, 0.1]", "[-1, 1]", "[0, 2]"], "batch_size": POSITIVE, "grid_columns": POSITIVE,
    "grid": ["grid.jpg"], "denoising": ["strip.jpg"], "head_usage": ["usage"],
    **{f"{s}.{k}": v for s in ("preview", "score") for k, v in dict(
        every=NOT_NEGATIVE, images=POSITIVE, steps=["0", "1001"], cfg_scale=["-1", ".nan"], seed=["-1", str(2**63)]).items()},
    "preview.columns": POSITIVE,
}  # fmt: skip


@pytest.mark.parametrize("share", FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_out_of_its_range_is_refused(kind, share):
    ranged, wrong = (".betas", "crop_scale", "cfg_interval", "grid", "denoising", "head_usage"), []
    for key, hint in own_types(kind).items():
        if {int, float} & {hint, *typing.get_args(hint)} or key.endswith(ranged):
            assert key in OUT_OF_RANGE, f"a new number, {key}: what is its range?"
            scores_alone = kind is LanguageConfig and key == "max_steps"  # 0 steps: what is loaded is scored
            wrong += [(key, text) for text in (NOT_NEGATIVE if scores_alone else OUT_OF_RANGE[key])]
    for key, text in some_of(wrong, share, "values out of range"):
        with pytest.raises(ValueError, match="out of range") as error:
            parse(kind, f"--{key}={text}")
        message = str(error.value)
        assert message.startswith(key) and message.rpartition(": ")[2], (key, text, message)
        assert text.strip(".[]").split(",")[0].rstrip("0.") in message and "\n" not in message, (key, text, message)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_are_finite(number):
    for kind, key in ((MixConfig, "mixup"), (OptimConfig, "weight_decay"), (OptimConfig, "lr")):
        with pytest.raises(ValueError, match=f"{number} is out of range"):
            kind(**{key: number})


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


def test_pairs_as_python_writes_them():
    assert parse(ClsConfig, "--model.head_budget", "[(1, 2), (2, 2)]")[0].model.head_budget == [[1, 2], [2, 2]]
    for wrong in ("[(1, 2), 3]", "[(1, x)]", "[(1, 2)"):
        assert parse(ClsConfig, "--model.head_budget", wrong)[0].model.head_budget == wrong  # which the model refuses


def test_arguments_that_the_data_decide():
    model = parse(ClsConfig, "--model.kwargs", "{num_classes: 5, drop_rate: 0.1}")[0].model
    assert model.decided(num_classes=5, in_chans=1) == dict(num_classes=5, in_chans=1)
    with one_line("model.kwargs.num_classes 5 has no effect: the data and other keys make it 10"):
        model.decided(num_classes=10)


def test_half_precision_on_a_processor():
    AcceleratorState._reset_state(True)  # of the tests before
    with one_line('fp16 needs a GPU; on a CPU it is "no" or "bf16"'):
        make_accelerator("fp16")
    AcceleratorState._reset_state(True)


def test_a_configuration_of_another_script():
    with one_line("train_text.py takes this file; .*wt103_base.yaml: unknown key"):
        parse(ClsConfig, "--config", "text/wt103_base")
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
        assert parse(ClsConfig, f"--output={text}")[0].output == text


@pytest.mark.parametrize("value", ["other.yaml", "5", "[1]", "null", "{dpeth: 3}"])
def test_a_section_as_a_whole_holds_known_keys(tmp_path, value, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text("depth: 3\n")
    with pytest.raises(ValueError, match="is a section of keys|unknown key 'model.dpeth', did you mean 'model.depth'"):
        parse(ClsConfig, "--model", value)
    assert parse(ClsConfig, "--model", "{depth: 3}")[0].model.depth == 3


@pytest.mark.parametrize("saved", [None, 5, "x", [1]])
def test_a_saved_configuration_that_is_none(saved):
    with pytest.raises(ValueError, match="config.yaml that is there holds no keys and values"):
        changed_keys(saved, parse(ClsConfig)[0].tree(), [])

"""Every key of every configuration obeys what its field declares: its type, its range, what it needs, and its help."""

import contextlib
import dataclasses
import math
import re
import string
import typing

import pytest

from moh_vision.attention import ROUTERS
from moh_vision.attention.routers import MoHRouter
from moh_vision.classification.config import ClsConfig, ClsDataConfig, ValidateConfig
from moh_vision.diffusion.config import DitConfig, OpenedDitConfig, SampleConfig
from moh_vision.engine.command_line import dump, groups_of, load, parse_config
from moh_vision.engine.config import BlockDescentConfig, OptimConfig
from moh_vision.engine.keys import as_type, deciding, idle_keys, keys_of, unknown_key
from moh_vision.language.config import LanguageConfig
from tests.support import refusals
from tests.support.refusals import one_line, refuse

CONFIG_CLASSES = [
    ClsConfig,
    DitConfig,
    LanguageConfig,
    SampleConfig,
    ValidateConfig,
    OpenedDitConfig,
]
# Options without which a configuration is refused.
NEEDED = {SampleConfig: ["--checkpoint", "run", "--out", "images"]}
NEEDED.update(dict.fromkeys((ValidateConfig, OpenedDitConfig), ["--checkpoint", "run"]))
every_class = pytest.mark.parametrize("config_class", CONFIG_CLASSES)


def parse(config_class, *argv):
    return parse_config(config_class, [*NEEDED.get(config_class, []), *argv], "test")


def leaves(hint):
    """Return a type and the types in it."""
    if not hasattr(hint, "__args__"):
        return {hint}
    return {hint}.union(*map(leaves, typing.get_args(hint)))


def section_of(config, section):
    """Return a section of a configuration; "" is the configuration itself."""
    return getattr(config, section) if section else config


def changed(config, values):
    """Set keys of a configuration, unchecked, and return the configuration."""
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        setattr(section_of(config, section), field, value)
    return config


@every_class
def test_every_key_says_what_it_is(config_class):
    keys = keys_of(config_class)
    for name, found in keys.items():
        assert found.text.endswith((".", ")")), f"{name}: its text"
        # A help text must name its subject: the key's name is in another column.
        assert not re.match("(Of|As|At|Its|Not|There|How many)\\b", found.text), (
            f"{name}: {found.text}"
        )
        needed = {other for need in found.options["needs"] for other in deciding(need)}
        assert needed <= set(keys), name
        numbers = leaves(found.hint) & {int, float}
        assert not numbers or {"gt", "ge"} & set(found.options), (
            f"a new number, {name}: what is its range?"
        )


# ---------------------------------------------------------------- misspelt keys

LETTERS = string.ascii_lowercase + string.digits + "_."


def edits(key, letters):
    """Yield every key one edit away: with one letter deleted, inserted or replaced, or two neighbours swapped."""
    for i in range(len(key) + 1):
        yield from (key[:i] + letter + key[i:] for letter in letters)
    for i in range(len(key)):
        yield key[:i] + key[i + 1 :]
        yield from (key[:i] + letter + key[i + 1 :] for letter in letters)
        yield key[:i] + key[i + 1 : i + 2] + key[i] + key[i + 2 :]


@pytest.mark.parametrize("letters", ["e.", pytest.param(LETTERS, marks=pytest.mark.reliability)])
@every_class
def test_every_key_misspelt_by_one_edit_is_corrected(config_class, letters):
    """The error for a misspelt key or flag suggests one key, from which it is one edit away."""
    keys = {name: key for _, group in groups_of(config_class) for name, key in group.items()}
    meant = {}  # misspelt key -> keys one edit away: there may be two
    for key in keys:
        for wrong in set(edits(key, letters)) - set(keys):
            meant.setdefault(wrong, set()).add(key)
    for wrong, right in meant.items():
        message = unknown_key(wrong, keys)
        suggestions = [f"unknown key '{wrong}', did you mean '{key}'?" for key in right]
        assert message in suggestions
    ambiguous = sum(len(right) > 1 for right in meant.values())
    print(f"{len(keys)} keys, {len(meant)} edits, {ambiguous} of them of two keys")
    assert len(meant) > 5 * sum(map(len, keys))


# ---------------------------------------------------------------- types

VALUES = [
    "zebra",
    "''",
    "2001-01-01",
    "[1, 2, 3]",
    "[[x]]",
    "[a, b]",
    "{a: 1}",
    "1.5",
    "7",
    "true",
    "null",
    ".inf",
]


def is_of(hint, value):
    """Return whether a type accepts a value."""
    with contextlib.suppress(TypeError):
        as_type(hint, value)
        return True
    return False


@pytest.mark.parametrize(
    "hint, fine, wrong",
    [
        (int, [3], [True, 3.0, "3", None]),
        (float, [3.0, 3], [True, "3", 10**400]),
        (str, ["3"], [3, None]),
        (bool, [True], [1, "true"]),
        (int | None, [3, None], [3.5]),
        (typing.Literal["no", "7"], ["no", "7"], ["non", 7, False]),
        (tuple[float, float], [(1.0, 2.0), [1, 2]], [[1], [1, "x"], 1]),
        (list[str], [["a"]], [["a", 1], "a"]),
        (dict[str, typing.Any], [{"a": [1]}], [[1], 5]),
        (float | str, [1, "x"], [[1], None]),
    ],
    ids=str,
)
def test_types(hint, fine, wrong):
    assert all(is_of(hint, value) for value in fine)
    assert not any(is_of(hint, value) for value in wrong)


@every_class
def test_a_value_of_another_type_is_refused_in_a_file(config_class, tmp_path):
    """The message holds the key, the value and what is expected."""
    file = tmp_path / "c.yaml"
    tried = 0
    for name, found in keys_of(config_class).items():
        if not found.options["kept"]:
            continue
        for text in VALUES:
            value = load(text, "")
            if is_of(found.hint, value) or name == "checkpoint" and value is None:
                continue
            section, _, leaf = name.rpartition(".")
            if section:
                file.write_text(f"{section}: {{{leaf}: {text}}}\n")
            else:
                file.write_text(f"{leaf}: {text}\n")
            argv = []
            if "checkpoint" in keys_of(config_class) and name != "checkpoint":
                argv = ["--checkpoint", "run"]
            got = "null" if value is None else str(value)
            with one_line(f"{file} {name} Expected {got}"):
                parse_config(config_class, [*argv, "--config", str(file)], "test")
            tried += 1
    assert tried > 3 * len(keys_of(config_class))


# ---------------------------------------------------------------- ranges


def bounds_of(found, section):
    """Return (bound's name, number) for each bound of a key. A bound that names another key has that key's value."""
    bounds = [
        (name, found.options[name]) for name in ("gt", "ge", "lt", "le") if name in found.options
    ]
    return [(name, getattr(section, b) if isinstance(b, str) else b) for name, b in bounds]


def outside(found, section):
    """Return (values just outside of a key's range, values at its ends)."""
    options = found.options
    step = 1 if int in leaves(found.hint) else 0.001
    # Added to a bound, the first makes a value that is out of range, the second one that is not.
    beyond = dict(gt=0, ge=-step, lt=0, le=step)
    inside = dict(gt=step, ge=0, lt=-step, le=0)
    bounds = bounds_of(found, section)
    wrong = [number + beyond[name] for name, number in bounds]
    fine = [number + inside[name] for name, number in bounds]
    if float in leaves(found.hint):
        wrong += [math.inf, math.nan]
    if tuple in map(typing.get_origin, (found.hint, *typing.get_args(found.hint))):
        low = min(fine)
        high = max(fine)
        wrong = [[value, high] for value in wrong] + [[low, value] for value in wrong]
        fine = [[low, high]]
        if options.get("rising"):
            wrong.append([high, low])
    if "ends" in options:
        wrong += ["x.jpg", ".pngx"]
        fine += [f"x{ending}" for ending in options["ends"]]
    return wrong, fine


@every_class
def test_a_value_out_of_its_range_is_refused(config_class):
    config = parse(config_class)
    tried = 0
    for name, found in keys_of(config_class).items():
        section = section_of(config, name.rpartition(".")[0])
        wrong, fine = outside(found, section)
        for value in wrong:
            text = value if isinstance(value, str) else dump(value)
            allowed = found.limits or "a finite number"
            if "num_images" in name:
                allowed = ""
            with one_line(f"{name} {found.as_type(value, name)} {allowed}"):
                parse(config_class, f"--{name}={text}")
            tried += 1
        for value in fine:
            found.check(found.as_type(value, name), name, section)
    assert tried > 2


def test_a_section_that_code_makes_is_checked_too():
    refuse("lr inf", OptimConfig, lr=math.inf)
    refuse("data.repeats int x", ClsDataConfig, repeats="x")


def test_a_list_has_one_value_at_least():
    for config_class, name in ((ClsConfig, "model.head_budget"), (SampleConfig, "classes")):
        refuse(f"{name} [] one", parse, config_class, f"--{name}=[]")
    # Numbers are checked at any depth.
    with one_line("model.head_budget [(1, -1)] 0"):
        parse(ClsConfig, "--model.head_budget", "[[1, -1]]")


def test_whole_numbers_are_compared_as_such():
    """As floats, 2**63 - 1 and 2**63 would be equal."""
    assert parse(ClsConfig, "--seed", str(2**63 - 1)).seed == 2**63 - 1
    for wrong in (2**63, 10**400):
        refuse(f"seed {2**63 - 1}", parse, ClsConfig, "--seed", str(wrong))


# ---------------------------------------------------------------- keys without effect


def another_value(hint, value):
    """Return a value of a key of this type that is not `value`."""
    if isinstance(value, (int, float)):
        return value + 1
    if typing.get_origin(hint) is typing.Literal:
        return next((literal for literal in typing.get_args(hint) if literal != value), "other")
    return "other"


def set_and_unset(hint):
    """Return a value with which a key of this type counts as set, and one with which it does not."""
    if list[str] in leaves(hint):
        some = ["x"]
    else:
        examples = {bool: True, int: 1, float: 0.5, str: "x"}
        some = next(value for leaf, value in examples.items() if leaf in leaves(hint))
    if type(None) in typing.get_args(hint):
        return some, None
    return some, type(some)()


def met(condition, keys):
    """Return (key, value that meets a condition, value that does not).

    A condition is "key", "not key", "key=pattern" or "key!=pattern".
    """
    name, sign, pattern = condition.removeprefix("not ").partition("=")
    hint = keys[name.rstrip("!")].hint
    if not sign:
        some, none = set_and_unset(hint)
        if condition.startswith("not "):
            return name, none, some
        return name, some, none
    value = pattern.replace("*", "x")
    if pattern == "null" or str not in leaves(hint):
        value = load(value, "")
    other = another_value(hint, value)
    if name.endswith("!"):
        return name.rstrip("!"), other, value
    return name, value, other


@every_class
def test_a_key_has_no_effect_without_what_it_needs(config_class):
    keys = keys_of(config_class)
    tried = 0

    def is_idle(name, need, values):
        config = changed(parse(config_class), values)
        return (name, deciding(need)) in [(idle, keys) for idle, _, keys in idle_keys(config)]

    for name, found in keys.items():
        for need in found.options["needs"]:
            conditions = [met(condition, keys) for condition in need.split(" or ")]
            unmet = {other: no for other, _, no in conditions}
            assert is_idle(name, need, unmet), (name, need)
            for other, yes, _ in conditions:  # each condition alone is enough
                assert not is_idle(name, need, {**unmet, other: yes}), (name, need, other)
            tried += 1
    assert tried > 40 or config_class in (ValidateConfig, OpenedDitConfig, SampleConfig)


BUDGET = "model.head_budget budget_range"
VISION = (ClsConfig, DitConfig)
TRAINING = (ClsConfig, DitConfig, LanguageConfig)
UNIFORM = {"router": "mae", "mode": "uniform"}
STACKS = ("encoder_attention", "decoder_attention", "cross_attention")
USERS_ROUTERS = {  # name -> its attributes beside those of MoH's
    "with_moa": dict(aux_loss="moa"),
    "without": dict(aux_loss=""),
    "all": dict(all_heads=True),
}
# Effects that depend on the router or the optimiser, which `needs` cannot express.
# Case -> (configurations, values, keys without effect, keys with an effect).
IDLE = {
    "noise": ((DitConfig,), {"objective": "noise"}, "flow.predict flow.shift objective_kwargs", "learn_sigma min_snr_gamma"),
    "flow": ((DitConfig,), {"objective": "flow"}, "learn_sigma min_snr_gamma objective_kwargs", "flow.predict flow.shift"),
    "dense DiT": (VISION, {"model.name": "dit_small_patch2"}, f"{BUDGET} model.scope balance_weight", ""),
    "mae": (VISION, {"model.router": "mae"}, f"{BUDGET} balance_weight z_weight", "model.scope block_descent.mode"),
    "gated": (VISION, {"model.router": "gated"}, f"{BUDGET} balance_weight z_weight block_descent.mode", "model.scope"),
    "moh": (VISION, {"model.router": "moh"}, "z_weight moa_balance_weight block_descent.gate_lr", f"{BUDGET} balance_weight"),
    "moa": (VISION, {"model.router": "moa"}, "balance_weight", f"{BUDGET} z_weight moa_balance_weight"),
    "a user's router": ((ClsConfig,), {"model.router": "mine"}, "block_descent.mode", f"{BUDGET} balance_weight z_weight"),
    "mae argmax": ((ClsConfig,), {"model.router": "mae", "model.router_kwargs": {"mode": "argmax"}}, "block_descent.mode", ""),
    "a user's router with MoA's loss": ((ClsConfig,), {"model.router": "with_moa"}, "balance_weight block_descent.mode", f"{BUDGET} z_weight moa_balance_weight"),
    "a user's router without a loss": ((ClsConfig,), {"model.router": "without"}, "balance_weight z_weight moa_balance_weight", BUDGET),
    "a user's router that runs all heads": ((ClsConfig,), {"model.router": "all"}, BUDGET, "balance_weight"),
    "mae in kwargs": (VISION, {"model.kwargs": {"router": "mae"}}, f"{BUDGET} balance_weight", "block_descent.mode"),
    "uniform mae in kwargs": (VISION, {"model.kwargs": {"router": "mae", "router_kwargs": {"mode": "uniform"}}}, "block_descent.mode", ""),
    "mode in kwargs": (VISION, {"model.router": "mae", "model.kwargs": {"router_kwargs": {"mode": "uniform"}}}, "block_descent.mode", ""),
    "converted": ((ClsConfig,), {"model.pretrained": "x", "model.convert": {"router": "query_norm"}}, "z_weight", f"{BUDGET} balance_weight"),
    "dense text": ((LanguageConfig,), {}, f"{BUDGET} balance_weight z_weight block_descent.mode", ""),
    "moh text": ((LanguageConfig,), {"model.name": "clm_moh_small_75"}, "z_weight", f"{BUDGET} balance_weight"),
    # It may turn out to be a run with routers.
    "pretrained text": ((LanguageConfig,), {"model.name": "clm_pretrained"}, "z_weight", f"{BUDGET} balance_weight"),
    "moa in cross-attention": ((LanguageConfig,), {"model.kwargs": {"cross_attention": {"router": "moa"}}}, "balance_weight", "z_weight"),
    "uniform mae": ((LanguageConfig,), {"model.name": "mt_uni_mae_7"}, "block_descent.mode", ""),
    "uniform mae for soft": ((LanguageConfig,), {"model.name": "mt_mae_7", "model.kwargs": {"attention": UNIFORM}}, "block_descent.mode", ""),
    "uniform mae for dense": ((LanguageConfig,), {"model.kwargs": {"attention": UNIFORM}}, "block_descent.mode", ""),
    "uniform mae beside soft": ((LanguageConfig,), {"model.name": "mt_mae_7", "model.kwargs": {"cross_attention": UNIFORM}}, "", "block_descent.mode"),
    "soft mae for uniform": ((LanguageConfig,), {"model.name": "mt_uni_mae_7", "model.kwargs": {"attention": {"router": "mae"}}}, "", "block_descent.mode"),
    "uniform mae in every stack": ((LanguageConfig,), {"model.name": "mt_mae_7", "model.kwargs": dict.fromkeys(STACKS, UNIFORM)}, "block_descent.mode", ""),
    "dense in every stack": ((LanguageConfig,), {"model.name": "mt_moh_75", "model.kwargs": dict.fromkeys(STACKS, {"router": "dense"})}, f"{BUDGET} balance_weight", ""),
    "a user's router in text": ((LanguageConfig,), {"model.kwargs": {"attention": {"router": "with_moa"}}}, "balance_weight block_descent.mode", f"{BUDGET} z_weight"),
    "dense for moh": ((LanguageConfig,), {"model.name": "mt_moh_75", "model.kwargs": {"attention": {"router": "dense"}}}, "balance_weight", ""),
    "nobcd": ((LanguageConfig,), {"model.name": "mt_nobcd"}, "", "block_descent.mode block_descent.gate_lr"),
    "nesterov": (TRAINING, {"optim.name": "nesterov"}, "optim.betas optim.eps", "optim.momentum"),
    "adan": (TRAINING, {"optim.name": "adan"}, "optim.betas optim.momentum", "optim.eps"),
    "muon": (TRAINING, {"optim.name": "muon"}, "", "optim.betas optim.momentum"),
}  # fmt: skip


@pytest.mark.parametrize("case", IDLE)
def test_what_depends_on_the_router_and_the_optimiser(case, monkeypatch):
    for name, attributes in USERS_ROUTERS.items():
        monkeypatch.setitem(ROUTERS, name, type(name, (MoHRouter,), attributes))
    config_classes, values, idle, effective = IDLE[case]
    for config_class in config_classes:
        found = {name for name, *_ in idle_keys(changed(config_class(), values))}
        assert set(idle.split()) <= found, config_class
        assert not set(effective.split()) & found, config_class


# ---------------------------------------------------------------- help, and keys that a wing declares again


def helped(config_class, argv, capsys):
    """Return the help that these arguments print."""
    with pytest.raises(SystemExit, match="0"):
        parse_config(config_class, argv, "script.py")
    return capsys.readouterr().out


@every_class
def test_every_key_and_its_default_are_shown_in_80_columns(config_class, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    every = helped(config_class, ["--help"], capsys).splitlines()
    lines = [line for line in every if line.startswith("  --")]
    assert [line for line in every if line.startswith("  ") and len(line) > 80] == []
    named = [line.split()[0][2:] for line in lines]
    assert len(named) == len(set(named))
    assert set(named) == {*keys_of(config_class), "config", "print_config", "help"}
    if config_class is DitConfig:
        text = " ".join(" ".join(every).split())
        assert "--model.name moh_dit_small_patch2_75 Model name in timm's registry" in text
        left_out = '; left out: "ddim", or for a velocity "euler"'
        assert f"--preview.sampler Sampler, as in sample.py{left_out} --preview.steps 50" in text


def test_nobody_reads_the_help_to_its_end(monkeypatch):
    """With standard output closed, as after `| head`, the help ends without a traceback."""
    with refusals.unread(monkeypatch), pytest.raises(SystemExit, match="0"):
        parse_config(ClsConfig, ["--help"], "script.py")


@pytest.mark.parametrize(
    "config_class, names, shown",
    [
        pytest.param(
            ClsConfig,
            "model.head-budget",
            ["as `python -m moh_vision search` writes it"],
            id="key",
        ),
        pytest.param(
            ClsConfig,
            "ema",
            ["--ema.decay 0.0\n  float, at least 0 and below 1\n", "--ema.warmup false"],
            id="section",
        ),
        pytest.param(
            ClsConfig,
            "optim.min_lr model.head-budget",
            ["float, at least 0 and at most optim.lr", "--model.head_budget "],
            id="two keys",
        ),
        pytest.param(
            LanguageConfig,
            "generate.length_penalty",
            ["to this power. Needs model.name mt_*; generate.beam other than 1.\n"],
            id="needs",
        ),
    ],
)
def test_the_whole_text_of_keys_and_sections(config_class, names, shown, capsys):
    text = helped(config_class, ["--help", *names.split()], capsys)
    assert all(words in text for words in shown) and "--mix" not in text and text.endswith(".\n")
    refuse("--help modle", parse_config, ClsConfig, ["--help", "modle"], "script.py")


def test_a_key_with_another_default_keeps_its_text_and_range():
    lr = keys_of(OptimConfig)["lr"]
    language_lr = keys_of(LanguageConfig)["optim.lr"]
    assert lr.default == 1e-3
    assert language_lr.default == 7e-4
    assert lr.options == language_lr.options
    assert lr.text == language_lr.text
    assert keys_of(LanguageConfig)["max_steps"].options["ge"] == 0
    assert keys_of(DitConfig)["max_steps"].options["ge"] == 1
    assert keys_of(DitConfig)["preview.seed"].options["needs"] == ["preview.every"]
    assert DitConfig().model.name == "moh_dit_small_patch2_75"
    assert parse(DitConfig, "--model.depth", "3").model.name == "moh_dit_small_patch2_75"
    # Block descent has the defaults of Peng 2020.
    assert BlockDescentConfig() == BlockDescentConfig(mode="bcd", period=5, gate_lr=1.0)
    assert [f.name for f in dataclasses.fields(ClsDataConfig)].count("augment") == 1


@pytest.mark.parametrize(
    "value",
    [
        "no",
        "1e3",
        "1:30",
        "007",
        "null",
        "true",
        "",
        "0x1f",
        "2001-01-01",
        1e-5,
        -0.0,
        10**20,
        None,
    ],
)
def test_what_is_saved_is_read_back(value):
    assert load(dump({"a": value, "b": [value]}), "") == {"a": value, "b": [value]}

"""Every key of every configuration, from what its own field says: type, range, what it needs, and its help."""

import contextlib
import dataclasses
import math
import re
import string
import typing

import pytest

from moh_vision.classification.config import ClsConfig, ClsDataConfig, ValidateConfig
from moh_vision.diffusion.config import DitConfig, OpenedDitConfig, SampleConfig
from moh_vision.engine.command_line import dump, groups_of, load, parse_config
from moh_vision.engine.config import BlockDescentConfig, OptimConfig
from moh_vision.engine.keys import as_type, deciding, idle_keys, keys_of, unknown_key
from moh_vision.language.config import LanguageConfig
from tests.support import refusals
from tests.support.refusals import one_line, refuse

KINDS = [ClsConfig, DitConfig, LanguageConfig, SampleConfig, ValidateConfig, OpenedDitConfig]
NEEDED = {SampleConfig: ["--checkpoint", "run", "--out", "images"]}
NEEDED.update(dict.fromkeys((ValidateConfig, OpenedDitConfig), ["--checkpoint", "run"]))
every_kind = pytest.mark.parametrize("kind", KINDS)


def parse(kind, *argv):
    return parse_config(kind, [*NEEDED.get(kind, []), *argv], "test")


def leaves(hint):
    """The types in a type."""
    return (
        {hint}.union(*map(leaves, typing.get_args(hint))) if hasattr(hint, "__args__") else {hint}
    )


def changed(config, values):
    """The configuration with other values, whatever they contradict."""
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        setattr(getattr(config, section) if section else config, field, value)
    return config


@every_kind
def test_every_key_says_what_it_is(kind):
    keys = keys_of(kind)
    for name, found in keys.items():
        assert found.text.endswith((".", ")")), f"{name}: its text"
        # A text stands alone: what it is of may be in another column.
        assert not re.match("(Of|As|At|Its|Not|There|How many)\\b", found.text), (
            f"{name}: {found.text}"
        )
        assert {other for need in found.options["needs"] for other in deciding(need)} <= set(
            keys
        ), name
        numbers = leaves(found.hint) & {int, float}
        assert not numbers or {"gt", "ge"} & set(found.options), (
            f"a new number, {name}: what is its range?"
        )


# ---------------------------------------------------------------- misspelt keys

LETTERS = string.ascii_lowercase + string.digits + "_."


def edits(key, letters):
    """Every key one edit away: a letter lost, added, exchanged, or two swapped."""
    for i in range(len(key) + 1):
        yield from (key[:i] + letter + key[i:] for letter in letters)
    for i in range(len(key)):
        yield key[:i] + key[i + 1 :]
        yield from (key[:i] + letter + key[i + 1 :] for letter in letters)
        yield key[:i] + key[i + 1 : i + 2] + key[i] + key[i + 2 :]


@pytest.mark.parametrize("letters", ["eq.", pytest.param(LETTERS, marks=pytest.mark.reliability)])
@every_kind
def test_every_key_misspelt_by_one_edit_is_corrected(kind, letters):
    """All edits of all keys and flags: the right one is suggested, and alone."""
    own = {name: key for _, keys in groups_of(kind) for name, key in keys.items()}
    of = {}  # an edit may be one from two keys
    for key in own:
        for wrong in set(edits(key, letters)) - set(own):
            of.setdefault(wrong, set()).add(key)
    for wrong, right in of.items():
        message = unknown_key(wrong, own)
        assert any(message == f"unknown key '{wrong}', did you mean '{key}'?" for key in right), (
            right,
            message,
        )
    print(
        f"{len(own)} keys, {len(of)} edits, {sum(len(r) > 1 for r in of.values())} of them of two keys"
    )
    assert len(of) > 5 * sum(map(len, own))


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
    with contextlib.suppress(TypeError):
        as_type(hint, value)
        return True
    return False


@pytest.mark.parametrize("hint, fine, wrong", [
    (int, [3], [True, 3.0, "3", None]), (float, [3.0, 3], [True, "3", 10**400]), (str, ["3"], [3, None]), (bool, [True], [1, "true"]),
    (int | None, [3, None], [3.5]), (typing.Literal["no", "7"], ["no", "7"], ["non", 7, False]),
    (tuple[float, float], [(1.0, 2.0), [1, 2]], [[1], [1, "x"], 1]), (list[str], [["a"]], [["a", 1], "a"]),
    (dict[str, typing.Any], [{"a": [1]}], [[1], 5]), (float | str, [1, "x"], [[1], None]),
])  # fmt: skip
def test_types(hint, fine, wrong):
    assert all(is_of(hint, value) for value in fine) and not any(
        is_of(hint, value) for value in wrong
    )


@every_kind
def test_a_value_of_another_type_is_refused_in_a_file(kind, tmp_path):
    """The message holds the key, the value and what is expected."""
    file, tried = tmp_path / "c.yaml", 0
    for name, found in keys_of(kind).items():
        if not found.options["kept"]:
            continue
        for text in VALUES:
            value = load(text, "")
            if is_of(found.hint, value) or name == "checkpoint" and value is None:
                continue
            section, _, leaf = name.rpartition(".")
            file.write_text(f"{section}: {{{leaf}: {text}}}\n" if section else f"{leaf}: {text}\n")
            argv = (
                ["--checkpoint", "run"]
                if "checkpoint" in keys_of(kind) and name != "checkpoint"
                else []
            )
            with one_line(f'^{file}: key "{name}": Expected ') as error:
                parse_config(kind, [*argv, "--config", str(file)], "test")
            got = "null" if value is None else str(value)
            assert str(error.value).endswith(f"Got value: {got}")
            tried += 1
    assert tried > 3 * len(keys_of(kind))


# ---------------------------------------------------------------- ranges


def outside(found, section):
    """Values that are just out of a key's range, and others at its ends."""
    options, step = found.options, 1 if int in leaves(found.hint) else 0.001
    bounds = {name: options[name] for name in ("gt", "ge", "lt", "le") if name in options}
    bounds = {name: getattr(section, b) if isinstance(b, str) else b for name, b in bounds.items()}
    beyond, inside = dict(gt=0, ge=-step, lt=0, le=step), dict(gt=step, ge=0, lt=-step, le=0)
    wrong, fine = ([b + by[name] for name, b in bounds.items()] for by in (beyond, inside))
    if float in leaves(found.hint):
        wrong += [math.inf, math.nan]
    if tuple in map(typing.get_origin, (found.hint, *typing.get_args(found.hint))):
        low, high = min(fine), max(fine)
        wrong, fine = (
            [[value, high] for value in wrong] + [[low, value] for value in wrong],
            [[low, high]],
        )
        wrong += [[high, low]] if options.get("rising") else []
    fine += [f"x{ending}" for ending in options.get("ends", ())]
    return wrong + ["x.jpg", ".pngx"] * ("ends" in options), fine


@every_kind
def test_a_value_out_of_its_range_is_refused(kind):
    config, tried = parse(kind), 0
    for name, found in keys_of(kind).items():
        section = getattr(config, name.rpartition(".")[0]) if "." in name else config
        wrong, fine = outside(found, section)
        for value in wrong:
            text = value if isinstance(value, str) else dump(value)
            with one_line(f"^{name} .* is out of range: .") as error:
                parse(kind, f"--{name}={text}")
            tried += 1
            assert "num_images" in name or str(error.value).endswith(
                found.limits or "a finite number"
            )
        for value in fine:
            found.check(found.as_type(value, name), name, section)
    assert tried > 2


def test_every_section_is_checked_however_it_is_made():
    refuse("lr inf is out of range", OptimConfig, lr=math.inf)
    refuse('key "data.repeats": Expected int. Got value: x', ClsDataConfig, repeats="x")


def test_a_list_has_one_value_at_least():
    for kind, name in ((ClsConfig, "model.head_budget"), (SampleConfig, "classes")):
        refuse(f"{name} \\[\\] is out of range: at least one", parse, kind, f"--{name}=[]")
    with one_line(
        r"model.head_budget \[\(1, -1\)\] is out of range: at least 0"
    ):  # numbers at any depth
        parse(ClsConfig, "--model.head_budget", "[[1, -1]]")


def test_whole_numbers_are_compared_as_such():
    assert parse(ClsConfig, "--seed", str(2**63 - 1)).seed == 2**63 - 1
    for wrong in (2**63, 10**400):
        refuse("seed 9223372036854775808|seed 1000", parse, ClsConfig, "--seed", str(wrong))


# ---------------------------------------------------------------- keys without effect


def met(condition, keys):
    """(key, value that meets a condition, value that does not)"""
    negated, name, sign, pattern = (
        condition.startswith("not "),
        *condition.removeprefix("not ").partition("="),
    )
    differs, name = name.endswith("!"), name.rstrip("!")
    hint, others = keys[name].hint, typing.get_args(keys[name].hint)
    if sign:
        text = pattern.replace("*", "x")
        value = load(text, "") if pattern == "null" or str not in leaves(hint) else text
        literals = others if typing.get_origin(hint) is typing.Literal else ()
        other = next((v for v in literals if v != value), "other")
        other = value + 1 if isinstance(value, (int, float)) else other
        return name, *((other, value) if differs else (value, other))
    some = next(
        v for kind, v in {bool: True, int: 1, float: 0.5, str: "x"}.items() if kind in leaves(hint)
    )
    some = ["x"] if list[str] in leaves(hint) else some
    none = None if type(None) in others else type(some)()
    return name, *((none, some) if negated else (some, none))


@every_kind
def test_a_key_has_no_effect_without_what_it_needs(kind):
    keys, tried = keys_of(kind), 0
    for name, found in keys.items():
        for need in found.options["needs"]:
            conditions = [met(condition, keys) for condition in need.split(" or ")]
            unmet = {other: no for other, _, no in conditions}
            for other, yes in [
                (None, None),
                *((other, yes) for other, yes, _ in conditions),
            ]:  # each of them is enough
                config = changed(parse(kind), {**unmet, other: yes} if other else unmet)
                idle = (name, deciding(need)) in [(n, d) for n, _, d in idle_keys(config)]
                assert idle == (other is None), (name, need, other)
            tried += 1
    assert tried > 40 or kind in (ValidateConfig, OpenedDitConfig, SampleConfig)


MODEL = "model.head_budget budget_range"
# (scripts, values, keys without effect, keys with one): what no `needs` says, because it depends on the router or the optimiser
IDLE = [
    ((ClsConfig, DitConfig), {"model.name": "dit_small_patch2"}, f"{MODEL} model.scope balance_weight", ""),
    ((ClsConfig, DitConfig), {"model.router": "mae"}, f"{MODEL} balance_weight z_weight", "model.scope block_descent.mode"),
    ((ClsConfig, DitConfig), {"model.router": "moh"}, "z_weight moa_balance_weight block_descent.gate_lr", f"{MODEL} balance_weight"),
    ((ClsConfig, DitConfig), {"model.router": "moa"}, "balance_weight", f"{MODEL} z_weight moa_balance_weight"),
    ((ClsConfig,), {"model.router": "mine"}, "block_descent.mode", f"{MODEL} balance_weight z_weight"),
    ((ClsConfig,), {"model.router": "mae", "model.router_kwargs": {"mode": "argmax"}}, "block_descent.mode", ""),
    ((ClsConfig,), {"model.pretrained": "x", "model.convert": {"router": "query_norm"}}, "z_weight", f"{MODEL} balance_weight"),
    ((LanguageConfig,), {}, f"{MODEL} balance_weight z_weight block_descent.mode", ""),
    ((LanguageConfig,), {"model.name": "clm_moh_small_75"}, "z_weight", f"{MODEL} balance_weight"),
    ((LanguageConfig,), {"model.name": "clm_pretrained"}, "z_weight", f"{MODEL} balance_weight"),  # perhaps a run with routers
    ((LanguageConfig,), {"model.kwargs": {"cross_attention": {"router": "moa"}}}, "balance_weight", "z_weight"),
    ((LanguageConfig,), {"model.name": "mt_uni_mae_7"}, "block_descent.mode", ""),
    ((LanguageConfig,), {"model.name": "mt_nobcd"}, "", "block_descent.mode block_descent.gate_lr"),
    ((ClsConfig, DitConfig, LanguageConfig), {"optim.name": "nesterov"}, "optim.betas optim.eps", "optim.momentum"),
    ((ClsConfig, DitConfig, LanguageConfig), {"optim.name": "adan"}, "optim.betas optim.momentum", "optim.eps"),
    ((ClsConfig, DitConfig, LanguageConfig), {"optim.name": "muon"}, "", "optim.betas optim.momentum"),
]  # fmt: skip


@pytest.mark.parametrize("kinds, values, idle, awake", IDLE, ids=str)
def test_what_depends_on_the_router_and_the_optimiser(kinds, values, idle, awake):
    for kind in kinds:
        found = {name for name, *_ in idle_keys(changed(kind(), values))}
        assert set(idle.split()) <= found and not set(awake.split()) & found, kind


# ---------------------------------------------------------------- help, and keys that are said again


def helped(kind, argv, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_config(kind, argv, "script.py")
    return capsys.readouterr().out


@every_kind
def test_every_key_and_its_default_are_shown_in_80_columns(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    every = helped(kind, ["--help"], capsys).splitlines()
    lines = [line for line in every if line.startswith("  --")]
    assert [line for line in every if line.startswith("  ") and len(line) > 80] == []
    named = [line.split()[0][2:] for line in lines]
    assert len(named) == len(set(named)) and set(named) == {
        *keys_of(kind),
        "config",
        "print_config",
        "help",
    }
    if kind is DitConfig:
        text = " ".join(" ".join(every).split())
        assert "--model.name moh_dit_small_patch2_75 Model name in timm's registry" in text
        left_out = '; left out: "ddim", or with objective flow "euler"'
        assert f"--preview.sampler Sampler, as in sample.py{left_out} --preview.steps 50" in text


def test_nobody_reads_the_help_to_its_end(monkeypatch):
    """As after `| head`: no line about a broken pipe."""
    with refusals.unread(monkeypatch), pytest.raises(SystemExit, match="0"):
        parse_config(ClsConfig, ["--help"], "script.py")


@pytest.mark.parametrize("kind, names, shown", [
    (ClsConfig, "model.head-budget", ["as `python -m moh_vision search` writes it"]),
    (ClsConfig, "ema", ["--ema.decay 0.0\n  float, at least 0 and below 1\n", "--ema.warmup false"]),
    (ClsConfig, "optim.min_lr model.head-budget", ["float, at least 0 and at most optim.lr", "--model.head_budget "]),
    (LanguageConfig, "generate.length_penalty", ["to this power. Needs model.name mt_*; generate.beam other than 1.\n"]),
])  # fmt: skip
def test_the_whole_text_of_keys_and_sections(kind, names, shown, capsys):
    text = helped(kind, ["--help", *names.split()], capsys)
    assert all(words in text for words in shown) and "--mix" not in text and text.endswith(".\n")
    refuse(
        "--help modle: no such key or section",
        parse_config,
        ClsConfig,
        ["--help", "modle"],
        "script.py",
    )


def test_a_key_that_is_said_again_keeps_the_rest():
    lr, mine = keys_of(OptimConfig)["lr"], keys_of(LanguageConfig)["optim.lr"]
    assert (
        (lr.default, mine.default) == (1e-3, 7e-4)
        and lr.options == mine.options
        and lr.text == mine.text
    )
    assert (
        keys_of(LanguageConfig)["max_steps"].options["ge"] == 0
        and keys_of(DitConfig)["max_steps"].options["ge"] == 1
    )
    assert keys_of(DitConfig)["preview.seed"].options["needs"] == ["preview.every"]
    assert (
        parse(DitConfig, "--model.depth", "3").model.name
        == DitConfig().model.name
        == "moh_dit_small_patch2_75"
    )
    assert BlockDescentConfig() == BlockDescentConfig(
        mode="bcd", period=5, gate_lr=1.0
    )  # Peng 2020
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

"""Where skipping heads pays is measured with a model's own calls, and `auto` follows."""

import copy
import json
import logging
import re

import pytest
import torch
from torch import nn

import moh_vision
from moh_vision.attention import (
    GroupMixtureMlp,
    HeadBudget,
    HeadMixtureAttention,
    kernels,
    trial,
)
from moh_vision.attention.executors import Executor, Sequences, measurement_table, reasons
from moh_vision.attention.executors.measurement_table import MeasurementTable, Row
from moh_vision.attention.executors.plan import say
from moh_vision.attention.kernels import route as routing_kernels
from moh_vision.attention.measure import collect, compiled_layers
from moh_vision.attention.routing import Call
from tests.support.attend_backends import CPP, CPP16
from tests.support.refusals import refuse
from tests.support.small_runs import same
from tests.support.small_transnext import scramble, small


@pytest.fixture
def folder(monkeypatch, cache):
    """A cache folder of rows; measuring is on."""
    monkeypatch.setenv("MOH_VISION_MEASURE", "auto")
    measurement_table.use_table(None)
    yield cache / "measured"
    measurement_table.use_table(None)


@pytest.fixture
def takes(folder, monkeypatch):
    """Return takes(ratio): the clock says so of every executor that skips; returns the calls that it was asked for."""

    def set_ratio(ratio):
        asked = []

        def timed(call, left):
            asked.append(call)
            return ratio, 0.0

        monkeypatch.setattr(trial, "timed", timed)
        return asked

    return set_ratio


def layer_of(active=2, training=False, **kwargs):
    budget = HeadBudget(4, 8, 0, active)
    return HeadMixtureAttention(32, budget, scope="sample", **kwargs).train(training)


def tokens(batch=4):
    return torch.randn(batch, 9, 32)


def picked(model, *inputs, **named):
    """Return the names of the executors that a model's layers take in a call."""
    names = []
    make = Executor.__init__

    def count(self, *given):
        names.append(type(self).__name__)
        make(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "__init__", count)
        with torch.set_grad_enabled(model.training):
            model(*inputs, **named)
    return names


SKIPS = {"cpp": "WholeSequences", "torch": "Sequences"}


def test_auto_follows_what_was_measured(path, takes, capsys):
    layer = layer_of()
    x = tokens()
    assert picked(layer, x) == ["Masked"]  # too small for the rule, and never measured
    asked = takes(0.5)
    rows = moh_vision.measure(layer, x)
    assert [row[1:] for row in rows] == [(9, 9, 4, 2, SKIPS[path], 0.5)]
    call, executor, whole = capsys.readouterr().out.splitlines()
    assert call == "inference, 4 sequences of 9 tokens, 2 of 4 heads run: heads are skipped"
    words = dict(cpp="per sequence, C++", torch="per sequence, PyTorch")[path]
    assert executor.split("  ", 2)[1] == words
    assert executor.endswith("0.50 of the time of all heads")
    times = r"[\d.e+-]+ ms, with all heads [\d.e+-]+ ms; skipping takes [\d.]+ of the time"
    assert re.fullmatch(f"the whole model, forward: {times}", whole)
    assert picked(layer, x) == [SKIPS[path]]
    assert picked(layer.train(), x) == ["Masked"]  # training was not measured
    takes(0.96)
    moh_vision.measure(layer, x)
    assert picked(layer, x) == ["Masked"]
    assert picked(layer.eval(), x) == [SKIPS[path]]  # the row of inference was known
    assert len(asked) == 1

    measurement_table.use_table(None)  # as in a process that starts later
    assert picked(layer, x) == [SKIPS[path]] and picked(layer.train(), x) == ["Masked"]


TOOK = {
    "cpp": "0.96 of the time of all heads",
    "torch": f"{reasons.NO_OPERATOR} (attention runs",
}


def test_the_table_names_every_executor_that_was_refused(path, takes, capsys):
    takes(0.96)
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), attn_drop=0.1)
    moh_vision.measure(layer, tokens())
    training, *of_training, inference, _, _, _, per_token = capsys.readouterr().out.splitlines()
    sizes = "4 sequences of 9 tokens, 2 of 4 heads run"
    assert training == f"training, {sizes}: all heads are computed"
    assert [re.split(r"  +", line.strip()) for line in of_training] == [
        ["per sequence, C++", reasons.CHOSEN_PER_TOKEN],
        ["per sequence, PyTorch", reasons.CHOSEN_PER_TOKEN],
        ["attention alone", f"{reasons.NO_OPERATOR} (dropout)"],
        ["per token, C++", f"{reasons.NO_OPERATOR} (dropout)"],
    ]
    assert inference == f"inference, {sizes}: all heads are computed"
    assert per_token.strip().startswith("per token, C++")
    assert TOOK[path] in per_token


def test_the_time_of_the_whole_model_leaves_it_as_it_was(takes, capsys):
    """A call in training has gradients; keys have a length of their own, and batch norms keep their statistics."""
    takes(0.5)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(32)
            self.layer = layer_of(training=True)

        def forward(self, x):
            return self.layer(self.norm(x.transpose(1, 2)).transpose(1, 2), context=x[:, :5])[0]

    model = Model()
    x = tokens()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moh_vision.measure(model, x)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("training, 4 sequences of 9 tokens that look at 5, 2 of 4 heads run")
    assert last.startswith("the whole model, forward and backward: ")
    assert same(model, before) and model.training and model.layer.executor == "auto"
    assert all(p.grad is None for p in model.parameters())
    moh_vision.measure(model.eval(), x)
    assert "the whole model, forward: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "rows, calls",  # batch, active heads and ratio of what is measured; calls and whether they skip heads
    [
        ([(4, 2, 0.5)], {(4, 2): True, (3, 2): True, (5, 2): False, (4, 3): False, (4, 1): True}),
        (
            [(2, 2, 0.5), (4, 2, 1.5), (4, 3, 0.5)],
            {(1, 2): True, (2, 1): True, (3, 2): False, (3, 1): False, (4, 3): True, (1, 3): True},
        ),
    ],
)
def test_a_smaller_batch_and_fewer_heads_follow_the_row_of_the_nearest(rows, calls, takes):
    x = torch.randn(5, 9, 32)
    for batch, active, ratio in rows:
        takes(ratio)
        moh_vision.measure(layer_of(active), x[:batch])
    assert {call: picked(layer_of(call[1]), x[: call[0]]) != ["Masked"] for call in calls} == calls


def test_rows_that_are_added_replace_those_of_the_same_sizes():
    """Rows stand by active heads, then by batch: the first row that a call fits into is the call's."""
    few = ("a", 9, 9, 4, 2)
    many = ("a", 9, 9, 8, 2)
    more_heads = ("a", 9, 9, 4, 3)
    table = MeasurementTable([Row(*many, "Masked", 1.5)])
    table.add([Row(*more_heads, "Tokens", 0.5), Row(*few, "Tokens", 0.5)])
    before = measurement_table.generation()
    table.add([Row(*many, "Tokens", 0.9)])
    assert (
        measurement_table.generation() != before
    )  # plans that were made with the table are dropped
    assert table.rows == [
        Row(*few, "Tokens", 0.5),
        Row(*many, "Tokens", 0.9),
        Row(*more_heads, "Tokens", 0.5),
    ]
    record = table.as_record()
    assert list(record) == ["device", "rows"]
    again = MeasurementTable.from_record(json.loads(json.dumps(record)))
    assert again.rows == table.rows


def test_other_calls_do_not_follow(takes):
    takes(0.5)
    layer = layer_of()
    x = tokens()
    moh_vision.measure(layer, x)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    assert picked(layer, x) != ["Masked"]
    assert picked(layer, x[:, :8]) == ["Masked"]
    assert picked(layer, x, attn_mask=mask) == ["Masked"]
    with torch.autocast("cpu", torch.bfloat16):
        assert picked(layer, x) == ["Masked"]


@pytest.mark.parametrize("path", ["torch"], indirect=True)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "fault", ["output", "gradient", "unread memory", "a head that no token chose", "raises"]
)
def test_an_executor_that_is_not_right_is_never_taken(
    fault, training, path, takes, monkeypatch, caplog
):
    takes(0.1)
    attend = Sequences.attend

    def wrong(self, q, k, v):
        o = attend(self, q, k, v)
        if fault == "raises":
            raise torch.OutOfMemoryError("out of\nmemory")
        if fault == "output":
            return o * 1.01
        if fault == "gradient":
            return o + 0.1 * (o - o.detach())
        if fault == "unread memory":
            return o + 0 * torch.empty(1000)[:1]
        return o if self.call.routing.active[..., -1].any() else o + 1

    monkeypatch.setattr(Sequences, "attend", wrong)
    layer = layer_of(training=training)
    x = tokens()
    rows = moh_vision.measure(layer, x)
    row = next(row for row in rows if ("training" in row.call) == training)
    if fault == "gradient" and not training:
        assert row[5:] == ("Sequences", 0.1)
    else:
        assert row[5:] == ("Masked", None) and picked(layer, x) == ["Masked"]
        said = caplog.messages[0]
        assert "Sequences is not taken for 4 x 9 tokens: " in said and "\n" not in said


def test_what_is_measured_for_real(path, folder):
    """Time all executors of a CPU by the clock; a layer, MAE's statistics and the draws that follow stay as they were."""
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), attn_drop=0.1)
    argmax = dict(router="mae", router_kwargs=dict(mode="argmax"))
    model = nn.ModuleList([layer, HeadMixtureAttention(32, HeadBudget(4, 8, 4, 0), **argmax)])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    x = tokens(3)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    state = torch.random.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        in_16_bits = moh_vision.measure(layer, x[:2])
    assert all(row.ratio is not None for row in in_16_bits)
    rows = moh_vision.measure(layer, x, attn_mask=mask)
    # Dropout of the matrix has no operator; inference has no dropout.
    assert len(rows) == (path == "cpp")
    assert all(row.ratio > 0 for row in rows)
    assert moh_vision.measure(model[1], x)
    assert layer.training and layer.executor == "auto" and not layer._forward_pre_hooks
    assert same(model, before)
    assert x.grad is None and not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("path", ["triton"], indirect=True)
def test_the_interpreter_of_triton(path, takes):
    """The kernels of a GPU are compared before they are taken."""
    takes(0.5)
    layer = HeadMixtureAttention(32, HeadBudget(2, 16, 0, 1)).eval()
    x = torch.randn(1, 5, 32)
    rows = moh_vision.measure(layer, x)
    assert [row[5:] for row in rows] == [("InPlace", 0.5)]
    assert picked(layer, x) == ["InPlace"]
    table = json.loads(json.dumps(measurement_table.current_table().as_record()))
    measurement_table.use_table(dict(table, device="another processor"))
    for executor in ("InPlace", "Sequences", "Masked"):  # each of them may call Triton
        call, *sizes, _, ratio = table["rows"][0]
        row = [call.replace(" cpu ", " cuda "), *sizes, executor, ratio]
        other = dict(rows=[row], device="another card")
        refuse("measured another card", measurement_table.use_table, other)


@pytest.mark.parametrize("path", ["triton"], indirect=True)
@pytest.mark.parametrize(
    "module, name",
    [(routing_kernels, "_routing"), (kernels, "attend_product")],
    ids=["router", "attention of one product"],
)
def test_kernels_are_held_to_pytorch_and_not_to_other_kernels(
    module, name, path, takes, monkeypatch
):
    """A router that is wrong is so for all heads too; the operator of one product is not called where hooks are."""
    takes(0.5)
    right = getattr(module, name)

    def wrong(*given):
        answer = right(*given)
        if module is routing_kernels:
            return answer._replace(weights=1.01 * answer.weights)
        return 1.01 * answer

    monkeypatch.setattr(module, name, wrong)
    layer = HeadMixtureAttention(32, HeadBudget(2, 16, 0, 1)).eval()
    x = torch.randn(1, 5, 32)
    rows = moh_vision.measure(layer, x)
    assert [row[5:] for row in rows] == [("Masked", None)]
    assert kernels.path() == "triton"


@pytest.mark.parametrize("backend", [CPP, CPP16[0]], ids=str)
def test_no_head_is_chosen_by_rounding_where_results_are_compared(backend, takes, monkeypatch):
    """PyTorch sums a router's logits in another order than an operator does: both get the same bits."""
    takes(0.5)
    run = trial.run
    logits = []

    def run_and_note(layer, call, inputs, executor):
        answer = run(layer, call, inputs, executor)
        with torch.autocast(*call.autocast):
            logits.append(layer(*inputs[0], **inputs[1])[1].logits)
        return answer

    monkeypatch.setattr(trial, "run", run_and_note)
    dtype = backend.dtype
    layer = HeadMixtureAttention(192, HeadBudget(6, 32, 1, 2), executor="auto", dtype=dtype).eval()
    with backend.running():
        moh_vision.measure(layer, 5 * torch.randn(2, 64, 192, dtype=dtype))
    assert len(logits) == 4 and torch.equal(*logits[:2])


# Case -> path of the operators, and the arguments of a call. Without gradients another executor would be the first.
WITH_GRADIENTS = {
    "a mask that learns": ("cpp", dict(attn_mask=torch.randn(9, 9))),
    "looked-up products": ("triton", dict(condition=torch.randn(2, 32))),
}


@pytest.mark.parametrize("case", WITH_GRADIENTS)
def test_calls_of_training_are_measured_as_they_run(case, takes):
    """With gradients, though the pass that collects the calls records none."""
    path, named = WITH_GRADIENTS[case]
    if "attn_mask" in named:
        named["attn_mask"].requires_grad_()
    takes(0.5)
    layer = layer_of(training=True)
    x = torch.randn(2, 128 if path == "triton" else 9, 32)
    with kernels.using(path):
        calls = {}
        collect(calls, layer, lambda: layer(x, **named), training=True)
        ((words, _),) = calls
        measurement_table.use_table({})
        layer(x, **named)
        assert [call.rpartition(", ")[0] for call in measurement_table.unmeasured()] == [words]


@pytest.mark.parametrize("batch", [4, 9])
def test_a_larger_batch_is_measured_also_where_it_equals_the_tokens(batch, takes):
    takes(0.5)
    layer = layer_of()
    calls = {}
    collect(calls, layer, lambda: layer(tokens(batch)), training=False, batch=3)
    assert [sizes for _, sizes in calls] == [(3 * batch, 9, 9, 2)]


def test_off_and_under_deterministic_algorithms_nothing_is_measured(takes, monkeypatch):
    asked = takes(0.5)
    layer = layer_of()
    x = tokens()
    torch.use_deterministic_algorithms(True)
    try:
        assert moh_vision.measure(layer, x) == []
    finally:
        torch.use_deterministic_algorithms(False)
    measurement_table.use_table(None)
    moh_vision.measure(layer, x)
    assert len(asked) == 1 and picked(layer, x) != ["Masked"]
    monkeypatch.setenv("MOH_VISION_MEASURE", "off")
    measurement_table.use_table(None)
    assert moh_vision.measure(layer, x) == []
    assert picked(layer, x) == ["Masked"] and len(asked) == 1
    monkeypatch.setenv("MOH_VISION_MEASURE", "no")
    refuse("MOH_VISION_MEASURE=no auto off", moh_vision.measure, layer, x)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{}", b"[]", b'{"rows": [[1, 2]]}'])
def test_a_damaged_cache_is_ignored_and_replaced(takes, content, caplog):
    takes(0.5)
    file = measurement_table.cache_file()
    file.parent.mkdir()
    file.write_bytes(content)
    moh_vision.measure(layer_of(), torch.randn(4, 9, 32))
    assert str(file) in caplog.messages[0] and caplog.records[0].levelname == "WARNING"
    assert len(json.loads(file.read_text())["rows"]) == 1


def test_a_cache_that_cannot_be_written(folder, takes, caplog):
    takes(0.5)
    folder.write_text("a file")
    layer = layer_of()
    x = tokens()
    moh_vision.measure(layer, x)
    assert "what was measured is not kept" in caplog.text
    assert picked(layer, x) != ["Masked"]


BAD_ROWS = {
    "a number for a call": [1, 2, 3, 4, 5, "Masked", None],
    "a number for a name": ["a", 1, 2, 3, 4, 5, 6],
    "a truth value": ["a", 1, True, 3, 4, "Masked", None],
    "eight entries": ["a", 1, 2, 3, 4, "Masked", None, 7],
    "a number for a row": 7,
}
BAD_TABLES = {
    "a mapping": {"a": [1, 2, 3, 4, "Masked", None]},
    "a text": "rows",
    "a number": 7,
    **{name: [row] for name, row in BAD_ROWS.items()},
}


@pytest.mark.parametrize("table", BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_malformed_table_is_refused(table):
    refuse(
        "rows auto call four numbers name ratio",
        measurement_table.use_table,
        dict(device="", rows=table),
    )


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
@pytest.mark.parametrize("ratio", [0.5, 1.1])
def test_every_kind_of_layer_of_a_transnext_is_measured_once(path, takes, ratio):
    takes(ratio)
    model = scramble(small())
    x = torch.randn(2, 3, 64, 64)
    pairs = {"AggregatedPairs", "CosinePairs"}
    rows = moh_vision.measure(model, x)
    assert len({row.call for row in rows}) == len(rows)
    assert any("pool" in row.call for row in rows)
    executors = {row.taken for row in rows}
    assert executors <= (pairs if ratio < 1 else {"Masked"})
    assert bool(pairs & set(picked(model, x))) == (ratio < 1)


@pytest.mark.parametrize("path", ["cpp"], indirect=True)
def test_compiled_calls_have_rows_of_their_own(path, takes, caplog):
    asked = takes(0.5)
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1))
    x = tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    rows = moh_vision.measure(compiled, x)
    (row,) = [row for row in rows if "training" in row.call]
    assert row.taken == "Tokens" and all(call.compiled for call in asked)
    assert picked(layer, x) == ["Masked"]
    say.cache_clear()
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        y = compiled(x)[0]
    assert [r.message for r in caplog.records] == ["auto picked Tokens: measured on this machine"]
    torch.testing.assert_close(y, layer(x)[0])


def test_layers_are_compiled_where_they_or_a_module_around_them_are():
    def blocks():
        return nn.Sequential(*(nn.Sequential(layer_of()) for _ in range(3)))

    plain = blocks()
    assert compiled_layers(plain) == set()
    wrapped = torch.compile(blocks(), backend="eager")
    assert len(compiled_layers(nn.Sequential(wrapped))) == 3
    plain[1].compile(backend="eager")
    assert compiled_layers(plain) == {plain[1][0]}
    assert compiled_layers(copy.deepcopy(plain)) == set()  # an EMA
    plain.compile(backend="eager")
    assert len(compiled_layers(plain)) == 3


def test_an_mlp_alone_is_measured(path, takes):
    takes(0.5)
    rows = moh_vision.measure(GroupMixtureMlp(32, HeadBudget(8, 16, 2, 3)).eval(), tokens())
    assert len(rows) == 1


def test_groups_of_an_mlp_are_measured_beside_heads(path, takes, capsys):
    """Its call is compared with all groups in plain PyTorch, and its line names groups by the words of heads."""
    takes(0.5)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), scope="sample")
            self.mlp = GroupMixtureMlp(32, HeadBudget(8, 16, 2, 3))

        def forward(self, x):
            return self.mlp(x + self.attn(x)[0])[0]

    block = Block().eval()
    rows = moh_vision.measure(block, tokens())
    executor = "GroupPairs" if path == "cpp" else "GroupsOfSequences"
    assert rows[-1][5:] == (executor, 0.5)
    assert "5 of 8 heads run: heads are skipped" in capsys.readouterr().out
    with torch.no_grad():
        call = Call(tokens(), block.mlp.route(tokens()))
        assert type(block.mlp.make_executor(call)).__name__ == executor

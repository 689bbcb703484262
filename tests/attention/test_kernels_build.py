"""Building, finding and loading the C++ operators, with tiny libraries that need no torch headers."""

import ctypes
import functools
import logging
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

from moh_vision.attention import GroupMixtureMlp, HeadBudget, HeadMixtureAttention, kernels
from moh_vision.attention.executors.products import KernelSlicedProducts, SlicedProducts
from moh_vision.attention.kernels import build as building
from moh_vision.attention.kernels.__main__ import main
from moh_vision.attention.kernels.route import LinearRouter
from moh_vision.attention.kernels.route import route as route_tokens
from moh_vision.attention.routing import Call
from tests.support.attend_backends import Launched
from tests.support.processes import FORKS
from tests.support.refusals import assert_says, refuse, refused

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is installed"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path, new_process):
    """A process that has asked for no path yet, an empty cache and one source file of a line."""
    for name in ("MOH_VISION_KERNELS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "cache"))
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(building, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(building, "_loaded", False)
    # The tiny libraries have no operators whose shapes and gradients could be registered.
    monkeypatch.setitem(
        sys.modules, "moh_vision.attention.kernels.library", types.ModuleType("library")
    )


@needs_compiler
def test_build_every_source_once_then_load(tmp_path, capsys, caplog):
    (tmp_path / "csrc" / "two.cpp").write_text(
        '#include "two.h"\nextern "C" int two() { return TWO; }\n'
    )
    (tmp_path / "csrc" / "two.h").write_text("#define TWO 2\n")
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        assert main([]) == 0
        library_path = building.library_path()
        first_line, second_line = capsys.readouterr().out.splitlines()
        assert first_line == "building the C++ operators: up to a minute"
        assert second_line.startswith("built the C++ operators with ") and library_path.is_file()
        library = ctypes.CDLL(str(library_path))
        first = library_path.stat()
        assert (library.one(), library.two()) == (1, 2)
        assert main([]) == 0 and library_path.stat() == first
        assert capsys.readouterr().out == f"the C++ operators are built already: {library_path}\n"
        assert main(["--force"]) == 0 and library_path.stat().st_ino != first.st_ino
        assert kernels.path() == kernels.path() == "cpp"
    assert caplog.messages == [
        "attention runs on the C++ operators; MOH_VISION_KERNELS=off skips them"
    ]
    assert [file.name for file in library_path.parent.iterdir()] == [library_path.name]
    (tmp_path / "csrc" / "two.h").write_text("#define TWO 3\n")
    assert building.library_path() != library_path


@needs_compiler
@pytest.mark.parametrize(
    "line, said",
    [
        ("int one() { return nothing; }", "nothing"),
        ("int away(); int one() { return away(); }", "away"),
    ],
    ids=["syntax", "symbol"],
)
def test_errors_of_the_compiler_are_one_line(tmp_path, capsys, line, said):
    """A function that no library has is found while linking; otherwise it would fail when the library is loaded."""
    (tmp_path / "csrc" / "one.cpp").write_text(line)
    error = refused(capsys, main)
    library_path = building.library_path()
    assert_says(error, f"compile one.cpp {said} CXX")
    assert not library_path.exists() and not building.load()
    report = library_path.with_name("compiler.log")
    assert str(report) in error and "one.cpp" in report.read_text()


def test_what_cannot_be_built_is_one_line(monkeypatch, tmp_path, capsys):
    script = tmp_path / "compiler"

    def compiler(lines):
        """Make CXX a script, in which $out is the file to write."""
        script.write_text(
            f'#!/bin/sh\nfor word; do [ "$last" = -o ] && out=$word; last=$word; done\n{lines}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    assert_says(refused(capsys, main, "--forced"), "kernels --forced --force")
    compiler('echo half > "$out"; echo "x.cpp:1:1: error: no memory"; exit 1')
    assert_says(refused(capsys, main), f"{script} x.cpp:1:1 memory compiler.log CXX")
    assert not building.library_path().exists()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.setenv("CXX", "g++-99 -m64")
        assert_says(refused(capsys, main), "kernels CXX=g++-99 unset")
        patch.delenv("CXX")
        assert_says(refused(capsys, main), "kernels C++ install g++ CXX")
        assert kernels.path() == "torch"
    compiler(f'touch {tmp_path}/asked; echo > "$out"')
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "file"))
    error = refused(capsys, main)
    assert_says(error, f"{tmp_path}/file/kernels directory MOH_VISION_CACHE folder")
    assert not (tmp_path / "asked").exists()  # found before anything is compiled
    assert not building.load()


def test_a_damaged_library_counts_as_absent(caplog, capsys):
    library_path = building.library_path()
    library_path.parent.mkdir(parents=True)
    library_path.write_bytes(b"half")
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        assert kernels.path() == kernels.path() == "torch"
    warning, info = caplog.records
    assert (
        warning.levelname == "WARNING"
        and str(library_path) in warning.message
        and "--force" in warning.message
    )
    assert info.message.startswith(
        "attention runs in plain PyTorch; `python -m moh_vision.attention.kernels` builds"
    )
    assert_says(refused(capsys, main), "kernels library loaded PyTorch")


def test_the_variable_and_use(monkeypatch, caplog):
    def forward(x):
        return x + 1 if kernels.path() == "cpp" else x - 1

    monkeypatch.setenv("MOH_VISION_KERNELS", "on")
    refuse("MOH_VISION_KERNELS=on auto off", kernels.path)
    monkeypatch.delenv("MOH_VISION_KERNELS")
    refuse("path 'cpp' 'triton' 'torch' None 'c'", kernels.use, "c")
    refuse("C++ built moh_vision.attention.kernels", kernels.use, "cpp")
    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    assert kernels.path() == "torch" and compiled(torch.zeros(1)) == -1
    monkeypatch.setattr(building, "load", lambda: True)
    assert kernels.path() == "torch"  # a library that was built meanwhile changes nothing by itself
    kernels.use("cpp")
    assert kernels.path() == "cpp" and compiled(torch.zeros(1)) == 1
    kernels.use(None)
    assert kernels.path() == "torch"
    building.find.cache_clear()  # as in a process that starts later
    monkeypatch.setenv("MOH_VISION_KERNELS", "off")
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        assert kernels.path() == "torch"
    assert "because of MOH_VISION_KERNELS=off" in caplog.text
    kernels.use("cpp")  # a resumed run says what it needs
    assert kernels.path() == "cpp"


def test_a_compiled_layer_asks_for_the_path_first(monkeypatch, caplog):
    """What is logged then, once, must not end the compilation; a library builds nothing and says how."""
    monkeypatch.delenv("MOH_VISION_BUILD")
    layer = HeadMixtureAttention(32, HeadBudget(4, 8, 1, 1), executor="packed")
    with caplog.at_level(logging.WARNING):
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert (
            compiled(torch.randn(1, 5, 32))[0].shape
            == layer(torch.randn(1, 5, 32))[0].shape
            == (1, 5, 32)
        )
    (line,) = caplog.messages
    assert "`python -m moh_vision.attention.kernels` builds C++ operators" in line


def _what_is_loaded(queue):
    # By the file's name alone: the folder of a clone is called moh_vision too, and torchvision lies in its environment.
    names = [Path(library).name for library in torch.ops.loaded_libraries]
    loaded = [name for name in names if "moh_vision" in name]
    queue.put((loaded, building.find.cache_info().misses))


def test_importing_builds_and_loads_nothing():
    """A fork of a process that has imported every wing has loaded no library and not even looked for one."""
    queue = FORKS.Queue()
    process = FORKS.Process(target=_what_is_loaded, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == ([], 0)
    process.join()


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("MOH_VISION_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for variable, folder in (
        ("HOME", ".cache/moh_vision"),
        ("XDG_CACHE_HOME", "moh_vision"),
        ("MOH_VISION_CACHE", ""),
    ):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert building.library_path().parents[1] == tmp_path / variable / folder / "kernels"


def test_a_build_is_of_one_instruction_set(monkeypatch):
    builds = {}
    for capability in ("AVX512", "AVX2", "DEFAULT", "SVE256"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        flags = [flag for flag in building._flags() if flag.startswith("-march")]
        builds.setdefault(building.library_path().parent.name, []).append((building.isa(), *flags))
    default = [("default",)] * 2
    assert list(builds.values()) == [
        [("avx512", "-march=x86-64-v4")],
        [("avx2", "-march=x86-64-v3")],
        default,
    ]


@pytest.fixture
def check(monkeypatch):
    """Triton's kernels, which the first call tries, as on a GPU."""
    pytest.importorskip("triton")
    from moh_vision.attention.kernels.gpu import check

    monkeypatch.setattr(check, "DEVICES", ("cuda", "cpu"))
    for name in ("_tried", "_warn"):
        monkeypatch.setattr(check, name, functools.cache(getattr(check, name).__wrapped__))
    building.use("triton")
    yield check
    building.use(None)


@pytest.fixture
def replaced(check, monkeypatch):
    """replaced(name, function): what is tried in place of an operator; it gets that before its arguments."""

    def replace(name, function):
        operators = {name: functools.partial(function, getattr(check.OPS, name))}
        monkeypatch.setattr(check, "OPS", Operators(check.OPS, operators))

    return replace


class Operators:
    def __init__(self, real, replacements):
        self.real = real
        self.replacements = replacements

    def __getattr__(self, name):
        return self.replacements.get(name) or getattr(self.real, name)


def layer_and_tokens(executor):
    torch.manual_seed(0)
    return HeadMixtureAttention(
        32, HeadBudget(4, 16, 1, 1), executor=executor, device="cpu"
    ), torch.randn(2, 9, 32)


def output_and_launches(layer, x):
    with Launched() as launched:
        y = layer(x)[0]
    return y, launched.names


def raises(*_):
    raise RuntimeError("no registers\nare left")


def spoils(index):
    """The operator with an output that is a little off."""

    def run(operator, *given):
        outputs = list(operator(*given))
        outputs[index] = outputs[index] * 1.05
        return outputs

    return run


def drops_last(operator, *given):
    token, offsets = operator(*given)
    return token, offsets.clamp(max=int(offsets[-1]) - 1)


BROKEN = [  # what is broken, how, what a layer of all heads and one that skips launch then, and what is said
    (
        "project_and_route",
        spoils(0),
        (["route", "weigh"], ["route", "pairs", "attend_product"]),
        "project_and_route on cpu in float32 (product (released): 5e-02 off, 1e-04 is allowed)",
    ),
    (
        "project_and_route_backward",
        spoils(3),
        (["route", "weigh"], ["route", "pairs", "attend_product"]),
        "project_and_route on cpu in float32 (gradients of the router's weight (released): 5e-02",
    ),
    (
        "weigh",
        raises,
        (["project_and_route"], ["route_and_attend"]),
        "weigh on cpu in float32 (RuntimeError: no registers are left)",
    ),
    (
        "weigh_backward",
        spoils(1),
        (["project_and_route"], ["route_and_attend"]),
        "weigh on cpu in float32 (gradients of gates: 5e-02 off",
    ),
    (
        "pairs",
        drops_last,
        (["project_and_route", "weigh"], ["project_and_route", "weigh"]),
        "pairs on cpu (offsets: ",
    ),
]


@pytest.mark.parametrize("name, function, launched, said", BROKEN, ids=[case[0] for case in BROKEN])
def test_a_kernel_that_is_wrong_on_a_gpu_is_left_to_pytorch(
    name, function, launched, said, replaced, caplog
):
    """That kernel and no other; one line says which."""
    replaced(name, function)
    for executor, names in zip(("masked", "packed"), launched):
        layer, x = layer_and_tokens(executor)
        for _ in range(2):
            y, got = output_and_launches(layer, x)
            assert got == names
        building.use("torch")
        torch.testing.assert_close(y, layer(x)[0])
        building.use("triton")
    (line,) = caplog.messages
    assert said in line and "\n" not in line


@pytest.mark.parametrize("wrong", ["choice", "gradient", "NaN"])
def test_a_router_that_is_wrong_in_one_dtype_runs_in_others(wrong, check, replaced, caplog):
    def route(operator, x, *rest):
        weights, active, *outputs = operator(x, *rest)
        if x.dtype == torch.float32 and wrong == "choice":
            active = active.flip(-1)
        if x.dtype == torch.float32 and wrong == "NaN":
            weights[0, 0, 0] = torch.nan
        return weights, active, *outputs

    def route_backward(operator, *given):
        dx, dweight = operator(*given)
        return (-dx if dx.dtype == torch.float32 and wrong == "gradient" else dx), dweight

    replaced("route", route)
    replaced("route_backward", route_backward)
    router = LinearRouter(torch.randn(6, 32), 4, 2, 2, "released")
    for dtype, names in ((torch.float32, []), (torch.float16, ["route"]), (torch.float32, [])):
        with Launched() as launched:
            route_tokens(torch.randn(2, 9, 32).to(dtype), router)
        assert launched.names == names
    (line,) = caplog.messages
    what = dict(choice="choice of heads", gradient="gradients of tokens", NaN="gates")[wrong]
    assert f"route on cpu in float32 ({what} (" in line


@pytest.mark.parametrize(
    "kernel, executor, without, then",
    [
        ("weigh", "masked", ["project_and_route"], ["project_and_route", "weigh"]),
        # Its plan is made again too.
        (
            "project_and_route",
            "packed",
            ["route", "pairs", "attend_product"],
            ["route_and_attend"],
        ),
    ],
)
def test_a_gpu_without_memory_says_nothing_of_a_kernel(
    kernel, executor, without, then, check, replaced, caplog
):
    """It is tried again; what it was in the way of is computed by other operators, or by PyTorch."""
    full = [True]

    def run(operator, *given):
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return operator(*given)

    replaced(kernel, run)
    layer, x = layer_and_tokens(executor)
    for _ in range(2):
        assert output_and_launches(layer, x)[1] == without
    assert len(caplog.messages) == 1 and "it is tried again" in caplog.messages[0]
    full.clear()
    for _ in range(2):
        assert output_and_launches(layer, x)[1] == then


def test_slices_that_are_wrong_are_left_to_pytorch(check, replaced, caplog):
    memory = []

    def slice_rows(operator, *given):
        if not memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        rows, bias = operator(*given)
        return rows.flip(0) if memory == ["wrong"] else rows, bias

    def products():
        layer = GroupMixtureMlp(32, HeadBudget(4, 16, 1, 1), executor="packed", device="cpu")
        x = torch.randn(2, 9, 32)
        with torch.no_grad():
            executor = layer.make_executor(Call(x, layer.route(x, torch.randn(32))))
        return type(executor.products)

    replaced("slice_rows", slice_rows)
    assert products() is SlicedProducts
    memory.append("right")
    assert products() is KernelSlicedProducts
    memory[:] = ["wrong"]
    check._tried.cache_clear()
    assert products() is SlicedProducts
    assert "slice on cpu in float32 (rows of a weight: " in caplog.messages[-1]


def first_call(layer, x, where):
    """The names of the operators that run."""
    if where == "autocast, inference mode":
        with torch.inference_mode(), torch.autocast("cpu", torch.float16):
            return output_and_launches(layer, x)[1]
    if where in ("checkpoint", "reentrant checkpoint"):
        x.requires_grad_()
        with Launched() as launched:
            run_once = functools.partial(
                torch.utils.checkpoint.checkpoint, use_reentrant=where != "checkpoint"
            )
            run_once(lambda x: layer(x)[0], x).square().sum().backward()
        return launched.names
    graphs = []

    def backend(graph, inputs):
        graphs.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compile(layer, fullgraph=True, backend=backend)(x)[0].sum().backward()
    return [name.split(".")[1] for name in graphs if name.startswith("moh_vision_triton")]


@pytest.mark.parametrize(
    "where",
    ["autocast, inference mode", "checkpoint", "reentrant checkpoint", "torch.compile"],
)
def test_kernels_are_tried_wherever_the_first_call_is(where, check, caplog):
    layer, x = layer_and_tokens("packed")
    names = first_call(layer, x, where)
    assert names[0] == "route_and_attend"
    assert check._tried.cache_info().currsize == 2
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "error, path, said",
    [
        (ValueError("no C compiler"), "torch", "ValueError: no C compiler"),
        (torch.OutOfMemoryError("CUDA out of memory"), "triton", ""),
    ],
    ids=str,
)
def test_a_gpu_on_which_triton_does_not_run(error, path, said, check, replaced, monkeypatch, caplog):  # fmt: skip
    def pairs(*_):
        raise error

    replaced("pairs", pairs)
    problem = check.problem
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(building, "fused_attention", lambda: "PyTorch's own attention is none")
    monkeypatch.setattr(check, "problem", lambda: problem("cpu"))
    monkeypatch.setattr(building, "_runs_triton", building._runs_triton.__wrapped__)
    building.use(None)
    assert building.path("cuda") == path and said in caplog.text
    if path == "torch":
        refuse("Triton's GPU TRITON_INTERPRET=1", building.use, "triton")


@needs_compiler
def test_the_command_compares_all_kernels_on_a_gpu(replaced, monkeypatch, capsys):
    """A line for each says whether it may run; then the C++ operators are built."""
    from moh_vision.attention.kernels.gpu import numerics

    monkeypatch.setattr(numerics, "DEVICE", "cpu")
    # Triton's interpreter multiplies bfloat16 as integers.
    monkeypatch.setattr(numerics, "SHORT", dict(float16=torch.float16))
    monkeypatch.setattr(numerics, "WIDTHS", (16, 24))
    monkeypatch.setattr(numerics, "CALLS", {"causal": 19, "a bool mask": 19})
    for name, answer in (
        ("is_available", True),
        ("get_device_name", "Card"),
        ("get_device_capability", (9, 0)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    replaced("weigh_backward", raises)

    def attend_product(operator, product, *rest):
        o, lse = operator(product, *rest)
        return (o * 1.1 if product.dtype == torch.float16 and rest[-1] is not None else o), lse

    monkeypatch.setattr(
        numerics,
        "OPS",
        Operators(
            numerics.OPS,
            dict(attend_product=functools.partial(attend_product, numerics.OPS.attend_product)),
        ),
    )
    assert main([]) == 0
    head, *kernels_said, building_line, built = capsys.readouterr().out.splitlines()
    assert building_line == building.BUILDING
    assert head.startswith(f"Card, capability 9.0, torch {torch.__version__}, triton ")
    assert built.startswith("built the C++ operators with ")
    said = {}
    for line in kernels_said:
        kernel, numbers, text = re.split(" {2,}", line)
        said[kernel, numbers] = text
    names = "route", "project_and_route", "weigh", "slice", "attend, D = 16", "attend, D = 24"
    every = {(name, numbers) for name in names for numbers in ("float16", "float32", "tf32")}
    assert said.keys() == every | {("pairs", "any")}
    for (kernel, numbers), text in said.items():
        if kernel == "weigh":
            assert text == "error: RuntimeError: no registers are left"
        elif kernel.startswith("attend") and numbers == "float16":
            assert text == "differs: outputs (a bool mask): 1e-01 off, 2e-02 is allowed"
        else:
            assert re.fullmatch(r"may run, at most \de[-+]\d\d off", text), (kernel, text)


def test_a_cpu_beside_a_gpu_does_not_run_triton(monkeypatch):
    monkeypatch.setattr(building, "_runs_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    building.use("triton")
    assert building.path("cuda") == "triton" and building.path("cpu") == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    building.use("triton")
    assert building.path("cpu") == "triton"

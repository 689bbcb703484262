"""Building, finding and loading the C++ operators, with tiny libraries that need no torch headers."""

import ctypes
import functools
import logging
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from processes import FORKS
from refusals import refuse, refused

from moh_vision.attention import HeadBudget, HeadMixtureAttention, kernels
from moh_vision.attention.kernels import build as building
from moh_vision.attention.kernels.__main__ import main

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is installed"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has asked for no path yet, an empty cache and one source file of a line."""
    for name in ("MOH_VISION_KERNELS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "cache"))
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(building, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(building, "_loaded", False)
    monkeypatch.setattr(building, "_used", None)
    # The tiny libraries have no operators whose shapes and gradients could be registered.
    monkeypatch.setitem(
        sys.modules, "moh_vision.attention.kernels.library", types.ModuleType("library")
    )
    # A cache of its own: what this process found for the tests of other files stays.
    monkeypatch.setattr(building, "_find", functools.cache(building._find.__wrapped__))


@needs_compiler
def test_build_every_source_once_then_load(tmp_path, capsys, caplog):
    (tmp_path / "csrc" / "two.cpp").write_text(
        '#include "two.h"\nextern "C" int two() { return TWO; }\n'
    )
    (tmp_path / "csrc" / "two.h").write_text("#define TWO 2\n")
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        assert main([]) == 0
        place = building.library_path()
        first_line, second_line = capsys.readouterr().out.splitlines()
        assert first_line == "building the C++ operators: up to a minute"
        assert second_line.startswith("built the C++ operators with ") and place.is_file()
        library, first = ctypes.CDLL(str(place)), place.stat()
        assert (library.one(), library.two()) == (1, 2)
        assert main([]) == 0 and place.stat() == first
        assert capsys.readouterr().out == f"the C++ operators are built already: {place}\n"
        assert main(["--force"]) == 0 and place.stat().st_ino != first.st_ino
        assert kernels.path() == kernels.path() == "cpp"
    assert caplog.messages == [
        "attention runs on the C++ operators; MOH_VISION_KERNELS=off skips them"
    ]
    assert [file.name for file in place.parent.iterdir()] == [place.name]
    (tmp_path / "csrc" / "two.h").write_text("#define TWO 3\n")
    assert building.library_path() != place


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
    error, place = refused(capsys, main), building.library_path()
    assert "cannot compile the operators: " in error and said in error
    assert not place.exists() and not building.load()
    report = place.with_name("compiler.log")
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

    assert "kernels: error: unknown argument --forced, did you mean --force?\n" == refused(
        capsys, main, "--forced"
    )
    compiler('echo half > "$out"; echo "x.cpp:1:1: error: no memory"; exit 1')
    assert "x.cpp:1:1: error: no memory (all of it: " in refused(capsys, main)
    assert not building.library_path().exists()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.setenv("CXX", "g++-99 -m64")
        assert refused(capsys, main).startswith("kernels: error: CXX=g++-99: no such compiler")
        patch.delenv("CXX")
        assert refused(capsys, main).startswith(
            "kernels: error: no C++ compiler is found; install g++"
        )
        assert kernels.path() == "torch"
    compiler(f'touch {tmp_path}/asked; echo > "$out"')
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOH_VISION_CACHE", str(tmp_path / "file"))
    error = refused(capsys, main)
    assert "Not a directory; set MOH_VISION_CACHE to a folder that can be written" in error
    assert not (tmp_path / "asked").exists()  # found before anything is compiled
    assert not building.load()


def test_a_damaged_library_counts_as_absent(caplog, capsys):
    place = building.library_path()
    place.parent.mkdir(parents=True)
    place.write_bytes(b"half")
    with caplog.at_level(logging.INFO, "moh_vision.attention"):
        assert kernels.path() == kernels.path() == "torch"
    warning, info = caplog.records
    assert (
        warning.levelname == "WARNING"
        and str(place) in warning.message
        and "--force" in warning.message
    )
    assert info.message.startswith(
        "attention runs in plain PyTorch; `python -m moh_vision.attention.kernels` builds"
    )
    assert "the library cannot be loaded" in refused(capsys, main)


def test_the_variable_and_use(monkeypatch, caplog):
    def forward(x):
        return x + 1 if kernels.path() == "cpp" else x - 1

    monkeypatch.setenv("MOH_VISION_KERNELS", "on")
    refuse("MOH_VISION_KERNELS=on: only auto .* and off", kernels.path)
    monkeypatch.delenv("MOH_VISION_KERNELS")
    refuse("'cpp', 'triton', 'torch' or None, not 'c'", kernels.use, "c")
    refuse("`python -m moh_vision.attention.kernels` builds them", kernels.use, "cpp")
    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    assert kernels.path() == "torch" and compiled(torch.zeros(1)) == -1
    monkeypatch.setattr(building, "load", lambda: True)
    assert kernels.path() == "torch"  # a library that was built meanwhile changes nothing by itself
    kernels.use("cpp")
    assert kernels.path() == "cpp" and compiled(torch.zeros(1)) == 1
    kernels.use(None)
    assert kernels.path() == "torch"
    building._find.cache_clear()  # as in a process that starts later
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
    queue.put((loaded, building._find.cache_info().misses))


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


@pytest.mark.parametrize(
    "broken, said",
    [
        ("compiler", "ValueError: no C compiler"),
        ("choice", "chooses other heads"),
        (
            "float32",
            "gradients of the weight are not those of PyTorch (released, tokens torch.float32",
        ),
        (
            "renormalised",
            "gradients of tokens are not those of PyTorch (renormalised, tokens torch.float32",
        ),
    ],
)
def test_kernels_that_do_not_work_on_a_gpu_are_left_out(broken, said, monkeypatch, caplog):
    pytest.importorskip("triton")
    from moh_vision.attention.kernels.gpu import check

    def route(x, weight, *router):
        if broken == "compiler":
            raise ValueError("no C compiler")
        x, weight = x.view_as(x), weight.view_as(weight)
        if str(weight.dtype) == f"torch.{broken}":
            weight.register_hook(lambda grad: 1.05 * grad)
        elif broken in router:
            x.register_hook(torch.neg)
        return operators.route(x, weight, *router)

    problem, operators, pairs = check.problem, check.OPS, kernels.eager.pairs
    monkeypatch.setattr(building.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(check, "problem", lambda: problem("cpu"))
    monkeypatch.setattr(check, "OPS", types.SimpleNamespace(route=route))
    if broken == "choice":
        monkeypatch.setattr(kernels.eager, "pairs", lambda active: pairs(~active))
    monkeypatch.setattr(building, "_runs_triton", building._runs_triton.__wrapped__)
    assert building.path("cuda") == "torch" and said in caplog.text
    refuse("need a GPU", building.use, "triton")


def test_kernels_are_tried_wherever_the_first_call_is(monkeypatch):
    """Under autocast, without gradients, in a checkpointed part or while torch.compile traces."""
    pytest.importorskip("triton")
    from moh_vision.attention.kernels.gpu import check

    monkeypatch.setattr(check, "CASES", check.CASES[:1])
    said = []

    def first_call(x):
        said.append(check.problem("cpu"))
        return x.sin().sin()

    with torch.autocast("cpu"), torch.inference_mode():
        first_call(torch.ones(1))
    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(first_call, x, use_reentrant=False).sum().backward()
    tried = torch.compiler.assume_constant_result(lambda: said.append(check.problem("cpu")))
    torch.compile(lambda x: (tried(), x.sin())[1], backend="aot_eager", fullgraph=True)(x)
    assert len(said) >= 4 and not any(said)


def test_a_cpu_beside_a_gpu_does_not_run_triton(monkeypatch):
    monkeypatch.setattr(building, "_runs_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    building.use("triton")
    assert building.path("cuda") == "triton" and building.path("cpu") == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    building.use("triton")
    assert building.path("cpu") == "triton"

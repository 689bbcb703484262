"""Compile, find and load the C++ operators, and choose the path of operators for a process: C++, Triton or PyTorch.

`python -m moh_vision.attention.kernels` compiles the C++ operators once on the user's machine and stores them in the
user's cache folder. They are never required: without them plain PyTorch does the same work, only slower.
"""

import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from filelock import lock_descriptor
from torch.nn.attention import SDPBackend

from moh_vision.common.io import cache_folder, whole_file

log = logging.getLogger("moh_vision.attention")

COMMAND = "python -m moh_vision.attention.kernels"
BUILDING = "building the C++ operators: up to a minute"
VARIABLE = "MOH_VISION_KERNELS"
# Environment variable. "auto": the first model that runs on a CPU builds the operators. Commands set it to "auto", some to
# "later" until their set-up is done.
BUILD = "MOH_VISION_BUILD"
SOURCES = Path(__file__).with_name("csrc")
# The operators are compiled for the instruction set that torch's own kernels use. ATEN_CPU_CAPABILITY=avx2 restricts
# both to AVX2.
ISA = {"AVX512": "avx512", "AVX2": "avx2"}
ISA_FLAGS = {"avx512": ["-march=x86-64-v4"], "avx2": ["-march=x86-64-v3"], "default": []}

# Type of device -> its paths, the preferred one first.
PATHS = {
    "cpu": ("cpp", "torch"),
    "cuda": ("triton", "torch"),
}

_used: str | None = None  # the argument of `use`
_interprets = False  # whether Triton's interpreter runs, on tensors of any device; set by `use`
_failed_trials = 0  # see `failed_trials`
_loaded = False  # whether the C++ operators are in this process


def path(device: str = "cpu") -> str:
    """Return the path of this process on a type of device.

        "cpp"     compiled C++ operators, on a CPU
        "triton"  Triton's kernels, on a GPU; in Triton's interpreter also on a CPU, for tests
        "torch"   the same functions in plain PyTorch

    If `use` has not been called, it is the first of these that is available. The first call chooses the path for the
    rest of the process, even if the library is built meanwhile. It logs the choice under `moh_vision.attention`, as a
    WARNING if C++ operators could be built.
    """
    if device not in PATHS:
        return "torch"
    if _used in PATHS[device]:
        return _used
    if _used == "triton" and _interprets:
        return _used
    return _found(device)


@torch.compiler.assume_constant_result
def about(device: str = "cpu") -> str:
    """Return the line that `path` logs if `use` is not called: the path that it finds, and how to change it."""
    return find(device, os.environ.get(BUILD))[1]


def use(path: str | None) -> None:
    """Set the path of this process on the devices that have it, whatever the environment variable says.

    Args:
        path: "cpp", "triton" or "torch"; None: the path that the function `path` finds.
    """
    global _used, _interprets
    if path not in ("cpp", "triton", "torch", None):
        raise ValueError(f"the operators' path is 'cpp', 'triton', 'torch' or None, not {path!r}")
    if path == "cpp" and not load():
        raise ValueError(
            f"the C++ operators are not built for this torch and processor; `{COMMAND}` builds them"
        )
    if path == "triton" and not _runs_triton():
        raise ValueError(
            "Triton's kernels need a GPU that runs them and the package triton, or TRITON_INTERPRET=1"
        )
    _used = path
    _interprets = os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def using(path: str) -> Iterator[None]:
    """Return a context in which the process uses a path, see `use`."""
    before = _used
    use(path)
    try:
        yield
    finally:
        use(before)


@functools.cache
def _runs_triton() -> bool:
    """Return whether Triton's kernels can run in this process, and register them if so. On a GPU one kernel is tried."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    try:
        # The import needs the package triton, which torch for GPUs brings.
        from moh_vision.attention.kernels.gpu.check import problem
    except ImportError:
        return False
    if not on_gpu:
        return True
    found = problem()
    if found is None:
        return True
    log.warning(
        f"Triton's kernels do not work on this GPU ({found}): attention computes all heads there"
    )
    return False


@torch.compiler.assume_constant_result  # the result, like the path, does not change in a process
def works(kernel: str, device: torch.device, *dtypes: torch.dtype) -> bool:
    """Return whether a Triton kernel computes the same as PyTorch on a device, see `gpu.check.works`."""
    global _failed_trials
    answer = _gpu_check().works(kernel, device, *dtypes)
    if answer is None:
        _failed_trials += 1
        return False
    return answer


@functools.cache  # an import statement takes a microsecond at each call of a layer
def _gpu_check() -> ModuleType:
    from moh_vision.attention.kernels.gpu import check  # imports Triton

    return check


def failed_trials() -> int:
    """Return how often a kernel could not be tried in this process, for want of memory for example; see `works`."""
    return _failed_trials


@torch.compiler.assume_constant_result  # the path does not change in a process
def _found(device: str) -> str:
    return find(device, os.environ.get(BUILD))[0]


@functools.cache
def find(device: str, builds: str | None) -> tuple[str, str]:
    """Choose the path for a type of device and log it; return the path and the line that was logged.

    The first answer is that of the process, until `find.cache_clear()`.

    builds: the value of the environment variable BUILD.
    """
    wish = os.environ.get(VARIABLE, "") or "auto"
    if wish not in ("auto", "off"):
        raise ValueError(
            f"{VARIABLE}={wish}: only auto (take the operators that are there) and off (skip them)"
        )
    path = "torch"
    level = logging.INFO
    if wish == "off":
        text = (
            f"in plain PyTorch because of {VARIABLE}=off; without it, on operators that are there"
        )
    elif device == "cuda" and _runs_triton():
        path = "triton"
        text = f"on Triton's kernels; {VARIABLE}=off skips them"
    elif device == "cuda":
        text = "in plain PyTorch; the package triton brings kernels for a GPU, where they work"
    elif load() or (builds == "auto" and _built() and load()):
        path = "cpp"
        text = f"on the C++ operators; {VARIABLE}=off skips them"
    else:
        text = f"in plain PyTorch; `{COMMAND}` builds C++ operators, which are faster on a CPU"
        if device == "cpu" and builds is None:  # nobody has decided yet whether to build them
            level = logging.WARNING
    line = f"attention runs {text}"
    if device == "cuda":
        line += f"; {fused_attention()}"
    log.log(level, line)
    return path, line


def fused_attention() -> str:
    """Return a text on the backend of PyTorch's own attention on this GPU, in 16 bits without a mask, and on cuDNN.

    Users need the version of cuDNN because CUDA libraries of the system on LD_LIBRARY_PATH can replace torch's cuDNN, and
    PyTorch may then take a slower backend.
    """
    q = torch.empty(1, 8, 256, 64, device="cuda", dtype=torch.float16)
    backend = SDPBackend(torch._fused_sdp_choice(q, q, q)).name.lower()
    return f"PyTorch's own attention is {backend}, cuDNN {torch.backends.cudnn.version()}"


def load() -> bool:
    """Load the library if it exists; return whether its operators are in this process.

    It never raises: a library that cannot be loaded counts as missing, and a WARNING names the file and the error.
    """
    global _loaded
    library = library_path()
    if not _loaded and os.path.isfile(library):
        try:
            torch.ops.load_library(library)
            import moh_vision.attention.kernels.library  # noqa: F401  registers shapes and gradients

            _loaded = True
        # The loader raises OSError; registering the operators may raise anything.
        except Exception as error:
            log.warning(
                f"{library} cannot be loaded ({error}); `{COMMAND} --force` builds it again"
            )
    return _loaded


def library_path() -> Path:
    """Return CACHE/kernels/KEY/moh_vision_kernels.so; the key depends on torch, the processor and the source code."""
    return cache_folder() / "kernels" / key() / "moh_vision_kernels.so"


def build() -> str:
    """Compile csrc/*.cpp into the library and rename it into the cache: other processes see the whole file or none.

    An older library is replaced; processes that have loaded it keep it.

    Returns:
        The command of the compiler that was used.
    """
    compiler = _compiler()
    library = library_path()
    report = library.with_name("compiler.log")
    try:
        with whole_file(library, shared=True) as file, tempfile.TemporaryDirectory() as scratch:
            compiled = _compile(compiler, Path(scratch), report)
            file.write(compiled.read_bytes())
    except OSError as error:
        raise ValueError(
            f"{error.filename or library}: {error.strerror}; set MOH_VISION_CACHE to a folder that can be written"
        ) from None
    return shlex.join(compiler)


def _built() -> bool:
    """Build the library if it is missing, a compiler is found, and no earlier build has failed.

    If several processes call this, one builds and the others wait.

    Returns:
        Whether the library exists.
    """
    library = library_path()
    failure = library.with_name("compiler.log")
    try:
        _compiler()
    except ValueError:
        return False
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.with_name(".lock"), "w") as lock:
            lock_descriptor(lock.fileno())  # released when the file is closed
            if not (library.is_file() or failure.is_file()):
                print(f"{BUILDING}, once; {BUILD}=off skips it", flush=True)
                start = time.perf_counter()
                build()
                elapsed = time.perf_counter() - start
                print(f"built the C++ operators in {elapsed:.0f} s: {library}", flush=True)
    except (ValueError, OSError) as error:
        print(f"the C++ operators are not built: {error}", flush=True)
    return library.is_file()


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: $CXX if it is set, else the first of c++, g++ and clang++ that exists."""
    if sys.platform != "linux":
        raise ValueError(
            f"the C++ operators are built on Linux, not on {sys.platform}. All works without, only slower on a CPU"
        )
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if not shutil.which(named[0]):
            raise ValueError(
                f"CXX={named[0]}: no such compiler; unset CXX or name one that is installed"
            )
        return named
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise ValueError(
        "no C++ compiler is found; install g++ or name one in CXX. All works without, only slower on a CPU"
    )


def _compile(compiler: list[str], scratch: Path, report: Path) -> Path:
    """Compile the sources in parallel processes and link them; return the path of the library, in `scratch`."""
    home = Path(torch.__file__).parent
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    headers = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    commands = [
        [*compiler, *_flags(), *headers, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: _run(command, report), commands))
    library = scratch / "library.so"
    # With "-z defs" a function that this torch does not export fails here, and not when the library is loaded.
    link = ["-shared", "-fopenmp", "-Wl,-z,defs", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([*compiler, *map(str, objects), *link, "-o", str(library)], report)
    report.unlink(missing_ok=True)  # an earlier build may have failed and left it
    return library


def _run(command: list[str], report: Path) -> None:
    """Run a compiler; if it fails, write its whole output to `report` and raise ValueError with the first error."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        report.write_text(f"{shlex.join(command)}\n{done.stdout}")
        lines = done.stdout.splitlines() or [f"exit code {done.returncode}"]
        errors = [line for line in lines if "error:" in line or "undefined reference" in line]
        first = errors[0] if errors else lines[-1]
        raise ValueError(
            f"{command[0]} cannot compile the operators: {first.strip()[:300]} (all of it: {report}); "
            "another compiler can be named in CXX. All works without, only slower on a CPU"
        )


def isa() -> str:
    """Return the instruction set that torch's own kernels use: "avx512", "avx2" or "default"."""
    return ISA.get(torch.backends.cpu.get_cpu_capability(), "default")


def _flags() -> list[str]:
    """Return the compiler's flags: torch's C++ standard and ABI, and the instruction set."""
    # torch's headers need the C++ standard that torch was compiled with: 201703 or 202002.
    found = re.search(r"C\+\+ Version: 20(\d\d)", torch.__config__.show())
    standard = found[1] if found else 20
    return [
        "-O3",
        "-fPIC",
        "-fopenmp",
        f"-std=c++{standard}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-DAT_PER_OPERATOR_HEADERS",  # one header per operator, not one of all: much faster to compile
        "-ffp-contract=fast",
        *ISA_FLAGS[isa()],
    ]


def key() -> str:
    """Return the name of a build: torch, the instruction set, and a hash of the sources and the compiler's flags."""
    digest = hashlib.sha256(" ".join([platform.machine(), *_flags()]).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(b"\0" + source.name.encode() + b"\0" + source.read_bytes())
    return f"{torch.__version__}-{isa()}-{digest.hexdigest()[:12]}"

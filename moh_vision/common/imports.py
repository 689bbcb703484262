"""Import files of a user's own, which add routers, objectives, samplers or data sets to the package's tables.

A file is code. So only files that the command line names are imported: neither a configuration nor the folder of a run or
of a published model can name one, because others may have written it.
"""

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from moh_vision.common.errors import class_and_message


def import_files(files: Sequence[str]) -> None:
    """Import Python files in this order, each once, however often it is named.

    A file becomes the module with its name, and its folder the last one of `sys.path`: so it may import its neighbours,
    and worker processes find what they are sent of it.
    """
    for file in files:
        _import_file(Path(file).resolve(), f"--imports {file}")


def _import_file(path: Path, where: str) -> None:
    name = path.stem
    if not path.is_file():
        raise ValueError(f"{where}: no such file")
    if path.suffix != ".py" or not name.isidentifier():
        raise ValueError(f"{where}: expected a Python file, whose name is one of a module: NAME.py")
    loaded = sys.modules.get(name)
    if loaded and _resolved(getattr(loaded, "__file__", None)) == path:
        return
    # The file itself may be found, too: in the current folder.
    found = None if loaded else importlib.util.find_spec(name)
    if loaded or (found and _resolved(found.origin) != path):
        raise ValueError(f"{where}: there is another module {name}; give the file another name")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        del sys.modules[name]
        raise ValueError(f"{where}{_line_of(error, path)}: {class_and_message(error)}") from None


def _resolved(file: str | None) -> Path | None:
    """Return the path of a module's file without links; None for a module without a file."""
    if file is None:
        return None
    return Path(file).resolve()


def _line_of(error: BaseException, path: Path) -> str:
    """Return ", line N": the last line of the file that an error came through; "" if there is none."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    if not lines:
        return ""
    return f", line {lines[-1]}"


def trained_with(config: dict) -> str:
    """Return the end of a message on a name that no table has: which files the run of a configuration imported, or ""."""
    files = config.get("imports")
    if not isinstance(files, list) or not files:
        return ""
    named = " ".join(f"--imports {file}" for file in files)
    return f"; the run was trained with {named}, which is code: give it, if you trust it"

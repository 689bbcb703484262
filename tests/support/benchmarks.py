"""Import scripts of benchmarks/ by their bare names, as they import one another."""

import importlib
import sys
from types import ModuleType

from tests.support.paths import ROOT


def benchmark(name: str) -> ModuleType:
    """Import benchmarks/NAME.py and return the module."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)

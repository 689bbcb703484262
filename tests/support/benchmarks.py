"""The scripts in benchmarks/, which import one another as scripts do, by their last names."""

import importlib
import sys
from types import ModuleType

from tests.support.paths import ROOT


def benchmark(name: str) -> ModuleType:
    """Import a script, such as "attention"."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)

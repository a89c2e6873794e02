"""Scripts of `tools/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    """`load("release/isolation")` imports a script."""

    def load(name: str) -> ModuleType:
        path = TOOLS / f"{name}.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses look up their module
        spec.loader.exec_module(module)
        return module

    return load

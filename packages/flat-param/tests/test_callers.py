"""Functions of torch and of other libraries that are recognised by their names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from flat_param.sharded.tensor import _callers

TABLE = [each for each in vars(_callers).values() if isinstance(each, _callers.Callers)]
NAMES = sorted(name for callers in TABLE for name in callers.who if not name.startswith("*"))


@pytest.mark.parametrize("name", NAMES)
def test_recognised_function_exists_in_installed_library(name: str) -> None:
    """A saver that was renamed would write the elements of one rank."""
    package, *rest, function = name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    path = Path(spec.origin).parent.joinpath(*rest).with_suffix(".py")
    assert ("" if function == "*" else f"def {function}(") in path.read_text(encoding="utf-8")

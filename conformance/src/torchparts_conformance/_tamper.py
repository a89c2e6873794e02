"""Edge: notices when code under test has replaced what judges it.

An implementation runs in the process that judges it, so it can put its own function in the place of
one of torch's comparisons, of pytest, of the standard library's or of the suite. What is still in
such a place at the end of a run is found here; what was put back before that is not.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

_JUDGES = ("torchparts_conformance", "_pytest", "pytest", "pluggy", "builtins", "math", "hashlib")
_COMPARISONS = ("torch", "torch.Tensor", "torch.testing", "torch.testing._comparison")
_COMPARED_BY = ("allclose", "assert_close", "equal", "isclose", "is_tensor", "item", "tolist")
_Code = tuple[Any, Any]


class Guard:
    """What judges, as it was when the guard was made."""

    def __init__(self) -> None:
        # What is not imported yet cannot be seen to be replaced.
        import_module("pytest")
        import torch

        self._before = dict(_judging_code(torch))

    def replaced(self) -> list[str]:
        """Name what is not what it was."""
        import torch

        after = dict(_judging_code(torch))
        return [name for name, code in self._before.items() if not _same(code, after.get(name))]


def _same(before: _Code, after: _Code | None) -> bool:
    return after is not None and before[0] is after[0] and before[1] is after[1]


def _judging_code(torch: types.ModuleType) -> Iterator[tuple[str, _Code]]:
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in _JUDGES and isinstance(module, types.ModuleType):
            yield from _code_in(name, module)
    for place in _COMPARISONS:
        owner = torch.Tensor if place == "torch.Tensor" else sys.modules[place]
        for word in _COMPARED_BY:
            if hasattr(owner, word):
                yield f"{place}.{word}", _code(getattr(owner, word))


def _code_in(name: str, module: types.ModuleType) -> Iterator[tuple[str, _Code]]:
    """Give the functions of a module, and the methods of the classes it defines."""
    for word, value in list(vars(module).items()):
        if callable(value):
            yield f"{name}.{word}", _code(value)
        if isinstance(value, type) and value.__module__ == name:
            for method, inner in list(vars(value).items()):
                if callable(inner) or isinstance(inner, (classmethod, staticmethod, property)):
                    yield f"{name}.{word}.{method}", _code(inner)


def _code(value: Any) -> _Code:
    """Give a function, and its code, which can be replaced as well."""
    return value, getattr(value, "__code__", None)

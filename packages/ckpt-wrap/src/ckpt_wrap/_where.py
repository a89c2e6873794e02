"""Which module an error is about, and how a message names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


def owner(function: Callable[..., Any]) -> nn.Module | None:
    """The module a function is, or is a method of."""
    candidate = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return candidate if isinstance(candidate, nn.Module) else None


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward, in its class or itself; `nn.ModuleList` has none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def count_elements(module: nn.Module) -> int:
    """Elements of a module's parameters; lazy ones have none yet."""
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))


def describe(function: Callable[..., Any], name: str) -> str:
    """The qualified name and the class of a function's module, or as much of it as is known.

    Example:
        >>> describe(nn.Linear(1, 1), "layers.0"), describe(nn.Linear(1, 1), "")
        ("'layers.0' (Linear)", 'Linear')
    """
    module = owner(function)
    named: Any = function if module is None else type(module)
    kind = getattr(named, "__name__", repr(named))
    return f"{name!r} ({kind})" if name else kind


class Where:
    """A call, for messages: its text is the module, as `describe` names it."""

    __slots__ = ("_function", "_name", "made_by")

    def __init__(self, function: Callable[..., Any], name: str, made_by: str) -> None:
        self._function = function
        self._name = name
        self.made_by = made_by  # the function of this package that the user called

    def __str__(self) -> str:
        return describe(self._function, self._name)

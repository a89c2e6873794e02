"""The errors this package raises, and how their messages name a module.

A message begins with `ckpt_wrap.<function>: `, and says how to go on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.utils.checkpoint import CheckpointError

F = TypeVar("F", bound=Callable[..., Any])


class CkptWrapError(Exception):
    """Base class of every error raised by this package."""


class ModuleError(CkptWrapError, TypeError):
    """The argument is not a module, or not one that can be checkpointed or offloaded."""


class OptionError(CkptWrapError, ValueError):
    """An option is unknown, has a wrong value or contradicts another option."""


class PolicyError(CkptWrapError, ValueError):
    """A policy selects nothing, or is not a policy."""


class RecomputeError(CkptWrapError, CheckpointError):
    """Recomputing a module in backward did not repeat what its forward did.

    Also a `torch.utils.checkpoint.CheckpointError`, hence a `RuntimeError`.
    """


class OffloadError(CkptWrapError, RuntimeError):
    """A tensor could not be moved to host memory or disk, or was changed after it was moved."""


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Have errors raised inside say what they were about."""
    try:
        yield
    except CkptWrapError as error:
        raise type(error)(f"{error} This was for {what}.") from error


def explain_arguments(function: F) -> F:
    """Decorator: arguments that the function does not take raise `OptionError`."""
    signature = inspect.signature(function)
    names = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise OptionError(
                f"ckpt_wrap.{function.__name__}: {error}. Pass the module, and options by name: "
                f"{', '.join(names)}."
            ) from None
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]  # it has the signature of the function


def takes(function: Callable[..., Any], *args: object) -> bool:
    """Whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True


def owner(function: Callable[..., Any]) -> nn.Module | None:
    """The module a function is, or is a method of."""
    candidate = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return candidate if isinstance(candidate, nn.Module) else None


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


def require_module(value: object, function: str) -> None:
    """Raise `ModuleError` unless `value` is an `nn.Module` that has been initialised."""
    if not isinstance(value, nn.Module):
        several = isinstance(value, (list, tuple, set, dict))
        advice = "Call it for each module." if several else "Pass the module itself."
        raise ModuleError(
            f"ckpt_wrap.{function}: module is {value!r} of type {type(value).__name__}, but it "
            f"must be an nn.Module. {advice}"
        )
    if not hasattr(value, "_modules"):
        raise ModuleError(
            f"ckpt_wrap.{function}: module of class {type(value).__name__} is not initialised, "
            "but nn.Module.__init__ must have run. Call super().__init__() in its __init__."
        )


def require_forward(module: nn.Module, function: str, name: str = "") -> None:
    """Raise `ModuleError` if `module` has no forward, as `nn.ModuleList` has none."""
    if not has_forward(module):
        raise ModuleError(
            f"ckpt_wrap.{function}: module {describe(module, name)} has no forward, but only a "
            "module that is called can be checkpointed or offloaded. Wrap its items instead, one "
            "by one."
        )


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward, in its class or itself; `nn.ModuleList` has none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)

"""The errors of this package, and how their messages name a module.

A message begins with `ckpt_wrap.<function>: ` and ends with what to do.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError


class CkptWrapError(Exception):
    """Base class of every error raised by this package.

    Each message names the function, the module, what is accepted, and what to do.
    """


class ModuleError(CkptWrapError, TypeError):
    """The argument is not a module, or not one that can be checkpointed or offloaded.

    Also a `TypeError`. Nothing was changed.
    """


class OptionError(CkptWrapError, ValueError):
    """An option is unknown, has a wrong value or contradicts another option.

    Also a `ValueError`. Nothing was changed.
    """


class PolicyError(CkptWrapError, ValueError):
    """A policy or a rule selects nothing, or is invalid.

    Also a `ValueError`. Nothing was changed.
    """


class RecomputeError(CkptWrapError, CheckpointError):
    """Recomputation in backward cannot repeat the forward, or did not.

    Raised before a wrong gradient is returned; gradients of later layers may be accumulated
    already. Also a `torch.utils.checkpoint.CheckpointError`, hence a `RuntimeError`.
    """


class OffloadError(CkptWrapError, RuntimeError):
    """A tensor could not be moved to host memory or disk, or was changed after it was saved.

    Also a `RuntimeError`.
    """


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Add a prefix to errors that are raised inside."""
    try:
        yield
    except CkptWrapError as error:
        raise type(error)(f"{error} This was for {what}.") from error


def owner(function: Callable[..., Any]) -> nn.Module | None:
    """Return the module that a function is, or is a method of."""
    candidate = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return candidate if isinstance(candidate, nn.Module) else None


def describe(function: Callable[..., Any], name: str = "") -> str:
    """Return qualified name and class of a function's module, as far as they are known.

    Example:
        >>> describe(nn.Linear(1, 1), "layers.0"), describe(nn.Linear(1, 1))
        ("'layers.0' (Linear)", 'Linear')
    """
    module = owner(function)
    named: Any = function if module is None else type(module)
    kind = getattr(named, "__name__", repr(named))
    return f"{name!r} ({kind})" if name else kind


def path_of(module: nn.Module, root: nn.Module | None) -> str:
    """Return the qualified name of a module below another."""
    named = () if root is None else root.named_modules()
    return next((path for path, candidate in named if candidate is module), "")


def require_module(value: object, function: str) -> None:
    """Raise `ModuleError` unless `value` is an `nn.Module`."""
    if not isinstance(value, nn.Module):
        several = isinstance(value, (list, tuple, set, dict))
        advice = "Call it for each module." if several else "Pass the module itself."
        raise ModuleError(
            f"ckpt_wrap.{function}: module is {reprlib.repr(value)} of type "
            f"{type(value).__name__}, but it must be an nn.Module. {advice}"
        )


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward, in its class or itself; `nn.ModuleList` has none."""
    if isinstance(module, torch.jit.ScriptModule):  # it has a descriptor that only works there
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)

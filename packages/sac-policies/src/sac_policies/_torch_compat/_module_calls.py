"""What runs where Python calls a module: its forward, or what torch.compile has made of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_COMPILED_CALL = "_compiled_call_impl"
"""What `Module.compile` puts in the place of forward and hooks.

Lost without the name: blocks that were compiled in place are taken for others.
"""


def called_at(module: nn.Module) -> str:
    """Return the attribute that a call of a module from Python ends at.

    Example:
        >>> called_at(nn.Linear(2, 2))
        'forward'
    """
    return "forward" if vars(module).get(_COMPILED_CALL) is None else _COMPILED_CALL


def original(module: nn.Module) -> nn.Module:
    """Return what `torch.compile(module)` was given; other modules as they are.

    Example:
        >>> original(nn.Linear(2, 2))
        Linear(in_features=2, out_features=2, bias=True)
    """
    dynamo = sys.modules.get("torch._dynamo")  # long to import, and nothing is compiled without
    kind = getattr(dynamo, "OptimizedModule", ())
    return original(module._orig_mod) if isinstance(module, kind) else module


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module run compiled code, hooks of what it was included.

    Example:
        >>> is_compiled(nn.Linear(2, 2))
        False
    """
    return original(module) is not module or called_at(module) != "forward"


@contextmanager
def around_calls(
    module: nn.Module, begin: Callable[[Any, Any], None], end: Callable[[Any], None]
) -> Iterator[None]:
    """Have functions run at each call of a module, outside of what is compiled.

    Hooks would be a part of compiled code, and are passed by where `forward` is called by its name.

    Args:
        module: whose calls.
        begin: is given the arguments before a call, by position and by name.
        end: is given what came out of it, None where it raised.
    """
    place = called_at(module)
    inner, was_there = getattr(module, place), place in vars(module)

    def outer(*args: Any, **kwargs: Any) -> Any:
        begin(args, kwargs)
        out = None
        try:
            out = inner(*args, **kwargs)
        finally:
            end(out)
        return out

    setattr(module, place, outer)
    try:
        yield
    finally:
        if was_there:
            setattr(module, place, inner)
        else:
            delattr(module, place)

"""Calls of a module from Python: its forward, or its compiled version."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

_COMPILED_CALL = "_compiled_call_impl"
"""What `Module.compile` puts in the place of forward and hooks."""
CALL_PLACES = frozenset({"forward", _COMPILED_CALL})
"""Attributes that a call of a module runs."""


def called_at(module: nn.Module) -> str:
    """Return the name of the attribute that a call of a module runs."""
    return "forward" if vars(module).get(_COMPILED_CALL) is None else _COMPILED_CALL


def original(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile(module)`; other modules unchanged."""
    dynamo = sys.modules.get("torch._dynamo")  # slow to import
    kind = getattr(dynamo, "OptimizedModule", ())
    return original(module._orig_mod) if isinstance(module, kind) else module


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module run compiled code that includes its hooks."""
    return original(module) is not module or called_at(module) != "forward"


def is_taggable(module: nn.Module) -> bool:
    """Whether a module, or the one inside its compiled wrapper, has its class's forward."""
    return "forward" not in vars(original(module))


def graph_breaks() -> int:
    """Return how often torch.compile has broken a graph in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return sum(dynamo.counters["graph_break"].values()) if dynamo else 0


def compiled_in(root: nn.Module) -> list[nn.Module]:
    """List the compiled modules of a tree, none inside another."""
    kind = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    if kind is None:
        return []
    found, waiting = [], [root]
    while waiting:
        module = waiting.pop()
        if isinstance(module, kind) or vars(module).get(_COMPILED_CALL) is not None:
            found.append(module)
        else:
            waiting += [child for child in module._modules.values() if child is not None]
    return found


@contextmanager
def call_replaced(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Replace what a call of a module runs."""
    place = called_at(module)
    before, was_there = vars(module).get(place), place in vars(module)
    try:
        setattr(module, place, call)
        yield
    finally:
        if vars(module).get(place) is not call:  # an interrupt came first
            pass
        elif was_there:
            setattr(module, place, before)
        else:
            delattr(module, place)


@contextmanager
def around_calls(
    modules: Iterable[nn.Module],
    begin: Callable[[int, Callable[..., Any], Any, Any], object],
    end: Callable[[int, Any], object] = lambda *_: None,
) -> Iterator[None]:
    """Run functions at each call of some modules, outside of compiled code.

    Hooks would become part of compiled code, and direct calls of `forward` skip them.

    Args:
        modules: the modules.
        begin: called before a call, with the module's position, the function that runs, and its
            positional and keyword arguments.
        end: called with the module's position and the result, or None if the call raised.
    """

    def outer(number: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin(number, inner, args, kwargs)
        out = None
        try:
            out = inner(*args, **kwargs)
        finally:
            end(number, out)
        return out

    with ExitStack() as stack:
        for number, module in enumerate(modules):
            call = partial(outer, number, getattr(module, called_at(module)))
            stack.enter_context(call_replaced(module, call))
        yield

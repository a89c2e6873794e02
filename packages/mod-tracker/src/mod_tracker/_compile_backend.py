"""Backends for torch.compile that keep which module each operator of a graph comes from.

Compiled code has no modules, but the compiler's graphs have: each node says in which modules its
operator was called, and a node of the backward says so of the operator it is the backward of. What
is written down here is told, each time the code runs, to those who listen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from ._errors import OptionError
from ._torch_compat import Backend, Boxed, ModuleStack, eager_seen, inductor_seen, module_stack


@dataclass(frozen=True)
class GraphOperator:
    """An operator of a compiled graph.

    Attributes:
        operator: such as `torch.ops.aten.mm.default`.
        args: its arguments, tensors without data in place of those of the graph.
        kwargs: by keyword, likewise.
        out: its result, likewise.
        modules: the modules it was called in, the outermost first.
        of_forward: whether it is one of the forward's; in the graph of a backward it runs again.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    modules: ModuleStack
    of_forward: bool


@dataclass(frozen=True, eq=False)
class SeenGraph:
    """What is known of a compiled graph.

    Attributes:
        operators: in the order of the graph; None if sizes in it are not numbers.
    """

    operators: tuple[GraphOperator, ...] | None


GraphListener = Callable[[SeenGraph, Callable[[], Any]], Any]
"""Is given a graph and what runs it; returns what that returns."""

_listeners: list[GraphListener] = []


class listening(AbstractContextManager[None]):
    """Context in which a listener runs the graphs that this process compiled by these backends."""

    def __init__(self, listener: GraphListener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        _listeners.append(self._listener)

    def __exit__(self, *exc: object) -> None:
        if self._listener in _listeners:
            _listeners.remove(self._listener)


def backend_by_module(backend: Literal["inductor", "aot_eager"] = "inductor") -> Backend:
    """Return a backend for `torch.compile` with which FLOPs inside compiled code are by module.

    It compiles as the named backend does, again in each process. `profile_flops` then distinguishes
    the modules inside a compiled one, if sizes are fixed (`dynamic=False`) and the operators that
    compiled code calls have the FLOPs of the compiler's graph. Time and memory inside belong to the
    compiled module as a whole: a kernel may do the work of several modules.

    Raises:
        OptionError: another backend.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from mod_tracker import backend_by_module, profile_flops
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> backend = backend_by_module("aot_eager")
        >>> compiled = torch.compile(model, backend=backend, dynamic=False)
        >>> with profile_flops() as report:
        ...     compiled(torch.ones(1, 4)).sum().backward()
        >>> report["Sequential.1"].forward, report["Sequential.1"].backward
        (32, 64)
    """
    if backend == "inductor":
        return inductor_seen(_seen)
    if backend == "aot_eager":
        return eager_seen(_seen)
    raise OptionError(
        f"mod_tracker.backend_by_module: the backend {backend!r} is not known, but the graphs of "
        'two are: "inductor" and "aot_eager". Give one of them.'
    )


def _seen(graph: fx.GraphModule, run: Boxed) -> Boxed:
    seen = SeenGraph(_operators(graph))

    def call(args: list[Any]) -> Any:
        inner: Callable[[], Any] = partial(run, args)
        for listener in list(_listeners):
            inner = partial(listener, seen, inner)
        return inner()

    return call


class _UnknownSizeError(Exception):
    """A size of a graph's tensor is not a number."""


def _operators(graph: fx.GraphModule) -> tuple[GraphOperator, ...] | None:
    try:
        return tuple(
            GraphOperator(
                node.target,
                *fx.node.map_arg((node.args, node.kwargs), _value_of),
                _without_data(node.meta.get("val")),
                *module_stack(node),
            )
            for node in graph.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        )
    except _UnknownSizeError:
        return None


def _value_of(node: fx.Node) -> Any:
    return _without_data(node.meta.get("val"))


def _without_data(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_without_data, value))
    if not isinstance(value, torch.Tensor):
        return value
    if not all(type(size) is int for size in value.shape):
        raise _UnknownSizeError
    return torch.empty(value.shape, dtype=value.dtype, device="meta")

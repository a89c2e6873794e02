"""Hooks on accumulated gradients, the leaves of a graph, and the beginning of a backward."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import backward_id


def post_accumulate_hooks(leaf: torch.Tensor) -> dict[int, Any] | None:
    """Return the hooks of a leaf's `register_post_accumulate_grad_hook`; None without any."""
    return leaf._post_accumulate_grad_hooks


def set_post_accumulate_hooks(leaf: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Replace the hooks of a leaf's `register_post_accumulate_grad_hook`."""
    leaf._post_accumulate_grad_hooks = hooks


def optimizers_in_backward(parameter: torch.Tensor) -> list[Any]:
    """Return the optimizers that `apply_optimizer_in_backward` made for a parameter."""
    found: list[Any] = getattr(parameter, "_in_backward_optimizers", [])
    return found


def set_optimizers_in_backward(parameter: torch.Tensor, optimizers: list[Any]) -> None:
    """Replace the optimizers that `apply_optimizer_in_backward` made for a parameter."""
    parameter._in_backward_optimizers = optimizers  # type: ignore[attr-defined]


def graph_leaves(*roots: Any) -> list[torch.Tensor]:
    """Return the leaves that a backward from tensors or `GradientEdge`s gives gradients to."""
    tensors = [each for each in roots if isinstance(each, torch.Tensor)]
    found = [each for each in tensors if each.grad_fn is None and each.requires_grad]
    waiting: list[Any] = [
        each.grad_fn if isinstance(each, torch.Tensor) else each.node for each in roots
    ]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return found


Begins = Callable[[list[Any]], None]
"""Called with the roots of a backward: tensors, or `GradientEdge`s."""
_STARTS = ("backward", "grad")
_begins: dict[int, Begins] = {}
_torchs: dict[str, Callable[..., Any]] = {}
_lock = threading.Lock()


@contextmanager
def around_backwards(begins: Begins) -> Iterator[None]:
    """Call a function before each backward that this thread starts, but not inside of a backward.

    No hook of autograd is called then, so `torch.autograd.backward` and `grad` are replaced until
    the last thread has left.
    """
    here = threading.get_ident()
    with _lock:
        if not _begins:
            for name in _STARTS:
                _torchs[name] = getattr(torch.autograd, name)
                setattr(torch.autograd, name, _announced(_torchs[name]))
        before, _begins[here] = _begins.get(here), begins
    try:
        yield
    finally:
        with _lock:
            if before is None:
                del _begins[here]
            else:
                _begins[here] = before
            if not _begins:
                for name in _STARTS:
                    setattr(torch.autograd, name, _torchs.pop(name))


def _announced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def start(*args: Any, **kwargs: Any) -> Any:
        begins = _begins.get(threading.get_ident())
        if begins is not None and backward_id() < 0:
            roots: Any = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            is_many = isinstance(roots, (list, tuple)) and not hasattr(roots, "node")
            begins(list(roots) if is_many else [roots])
        return function(*args, **kwargs)

    return start

"""The autograd graph: numbers of nodes, the one that runs, hooks on them, the end of a backward.

Backward attribution needs four facts that torch has no public function for: the number the next
autograd node will get, the number of a node, the node that runs now, and whether a backward runs.
`probe` tries them once at import on a two-node graph. If any is missing or answers something else,
`EXACT_BACKWARD` is False: forward tracking stays complete, and a backward is simply not seen.

What is tried at import is tried in a thread of its own: the one that imports may be in inference
mode, under a mode that makes stand-ins, or in a backward, and the answers hold for the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ._look_up import look_up

NO_TASK = -1
"""What `graph_task` answers when no backward runs in this thread."""

Found = TypeVar("Found")

UNNUMBERED = 2**63
"""Gradient accumulation nodes carry the largest number there is; every other node is below this."""


def in_fresh_thread(function: Callable[[], Found]) -> Found:
    """Return what a function gives where no mode of torch is on and no backward runs.

    Where no thread can be started it is called in this one.
    """
    found: list[Found] = []
    thread = threading.Thread(target=lambda: found.append(function()), name="mod_tracker probe")
    try:
        thread.start()
    except RuntimeError:
        return function()
    thread.join()
    return found[0]


def _no_task() -> int:
    return NO_TASK


def _no_node() -> Any:
    return None


def _constant_number() -> int:
    return 0


def probe(
    next_number: Callable[[], int] | None,
    graph_task: Callable[[], int] | None,
    current_node: Callable[[], Any] | None,
) -> bool:
    """Whether the three functions tell the truth about a two-node graph.

    Args:
        next_number: number that the next autograd node of this thread will get.
        graph_task: id of the backward that runs in this thread, or `NO_TASK`.
        current_node: the autograd node that runs in this thread, or None.
    """
    if next_number is None or graph_task is None or current_node is None:
        return False
    seen: list[tuple[int, int]] = []
    try:
        with torch.enable_grad():
            first = torch.empty((), device="cpu", requires_grad=True).neg()
            expected = next_number()
            second = first.neg()
        first.register_hook(lambda _: seen.append((graph_task(), current_node()._sequence_nr())))
        numbered = second.grad_fn._sequence_nr() == expected  # type: ignore[union-attr]
        second.backward()
    except (AttributeError, TypeError, RuntimeError):
        return False
    right = [number for task, number in seen if task != NO_TASK]
    return numbered and graph_task() == NO_TASK and right == [expected - 1]


_next_number = look_up("_C._autograd._get_sequence_nr")
_graph_task = look_up("_C._current_graph_task_id")
_current_node = look_up("_C._current_autograd_node")

EXACT_BACKWARD: bool = in_fresh_thread(lambda: probe(_next_number, _graph_task, _current_node))
"""Whether backward attribution works on this torch."""

next_number: Callable[[], int] = _next_number if EXACT_BACKWARD else _constant_number
graph_task: Callable[[], int] = _graph_task if EXACT_BACKWARD else _no_task
current_node: Callable[[], Any] = _current_node if EXACT_BACKWARD else _no_node


LEAF_NODE: Any = look_up("_C._functions.AccumulateGrad")
"""Type of the nodes that keep hooks of this kind on their tensor, and do not look at their own."""


def carries(carrier: torch.Tensor, leaf_node: Any, function_mode: Any) -> bool:
    """Whether a node takes over the hooks that a foreign tensor carries, and keeps them.

    Args:
        carrier: a tensor that requires no gradient.
        leaf_node: type of the nodes of leaf tensors.
        function_mode: says whether a `TorchFunctionMode` is on; None if nothing does.
    """
    if function_mode is None:
        return False
    seen: list[Any] = []
    try:
        with torch.enable_grad():
            leaf = torch.ones(1, device="cpu", requires_grad=True)
            first, second = leaf * 2, leaf * 3
        node: Any = first.grad_fn
        hooks: Any = {0: lambda grad: seen.append((grad.item(), current_node()))}
        carrier._backward_hooks = hooks
        if carrier._backward_hooks is not hooks:
            return False  # a node that is given nothing would crash
        node._register_hook_dict(carrier)
        carrier._backward_hooks = {}
        (first * 7 + second).backward()
    except (AttributeError, TypeError, RuntimeError):
        return False
    known = type(node.next_functions[0][0]) is leaf_node
    return known and [(grad, at is node) for grad, at in seen] == [(7.0, True)]


_EMPTY: torch.Tensor = in_fresh_thread(lambda: torch.empty(0, device="cpu"))

_function_mode = look_up("_C._is_torch_function_mode_enabled")

CARRIES: bool = in_fresh_thread(
    lambda: carries(torch.empty((), device="cpu"), LEAF_NODE, _function_mode)
)
"""Whether `hook_gradient` may take the short way."""

in_function_mode: Callable[[], bool] = _function_mode if CARRIES else (lambda: True)
"""Whether a `TorchFunctionMode` is on, which would be asked to put hooks on a tensor."""


def new_carrier() -> torch.Tensor:
    """Return what carries hooks to nodes in one thread; no mode sees it being made."""
    return nn.Parameter(_EMPTY, requires_grad=False)


def hook_gradient(
    node: Any, output: int, carrier: torch.Tensor, hook: Callable[[Any], None]
) -> None:
    """Have `hook` called with the gradient of one output of a node, before the node runs.

    What `Tensor.register_hook` does, short of the dictionary and the handle that make it ten times
    as expensive. `torch.autograd.grad` for that output calls the hook, too.

    Args:
        node: an autograd node.
        output: which of its outputs.
        carrier: of this thread, from `new_carrier`. It is the first output of no node, so only
            hooks for first outputs can be carried.
        hook: its result must be None.
    """
    if output == 0 and not in_function_mode() and type(node) is not LEAF_NODE:
        carrier._backward_hooks = {0: hook}
        node._register_hook_dict(carrier)
    else:
        node.register_prehook(lambda grads: hook(grads[output]))


def number_asking() -> int:
    """Number of the node that runs now in this thread; `UNNUMBERED` if none does."""
    node = current_node()
    return UNNUMBERED if node is None else number_of(node)


keeps_graph: Callable[[], bool] = look_up("_C._autograd._get_current_graph_task_keep_graph") or (
    lambda: True
)
"""Whether the backward that runs keeps its graph, as one that makes a graph does."""


def number_of(node: Any) -> int:
    """Autograd's number of a node: creation order within the thread that created it."""
    number: int = node._sequence_nr()
    return number


def at_backward_end(callback: Callable[[], None]) -> bool:
    """Run `callback` when the backward that runs now ends without an error.

    Returns:
        False where torch offers no such queue; the callback is then never called.
    """
    queue = getattr(look_up("autograd.Variable._execution_engine"), "queue_callback", None)
    if queue is None or graph_task() == NO_TASK:
        return False
    queue(callback)
    return True


def node_creation_hook(
    callback: Callable[[Any], None],
) -> AbstractContextManager[Any] | None:
    """Context in which torch >= 2.14 tells `callback` each autograd node made in this thread.

    Returns:
        None where torch has no such hook.
    """
    hook = getattr(torch.autograd.graph, "node_creation_hook", None)
    return None if hook is None else cast("AbstractContextManager[Any]", hook(callback))

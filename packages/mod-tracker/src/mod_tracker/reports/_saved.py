"""Storages that autograd graphs keep alive for backward.

A graph is read once, when its backward begins: then it is complete, and nothing is freed yet. So no
saved-tensor hook is needed, which would not see values that torch's selective checkpoint caches or
that an autograd function keeps as attributes.

Tensors behind saved-tensor hooks, such as those of a checkpoint, are found by the references of the
packed value and of the hook. The search does not enter modules, optimizers, the globals of
functions, or the objects of methods other than the hook itself.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from .._attribution import FORWARD, KEPT_TASKS, Attribution
from .._edges import tensors_in
from .._torch_compat import (
    SAVED,
    UNNUMBERED,
    graph_task,
    inputs_saved_by,
    next_number,
    number_of,
    saved_by,
    value_in,
)
from ._allocations import device_of, storages_of
from ._rows import PhaseTotals

_NOT_ENTERED = (
    *(nn.Module, type, FrameType, ModuleType, GeneratorType, MethodType),
    torch.optim.Optimizer,
)


class Kept(NamedTuple):
    """A tensor that a graph keeps alive.

    Attributes:
        node: the first node, in order of creation, that keeps it.
        tensor: the tensor.
        is_saved: whether the node saved the tensor itself, and not something to make it from.
    """

    node: Any
    tensor: torch.Tensor
    is_saved: bool


def kept_by(
    roots: Iterable[Any], *, read: set[int] | None = None, first: int = 0
) -> Iterator[Kept]:
    """Yield the tensors that the graphs below some nodes keep alive.

    Args:
        roots: autograd nodes; None is ignored.
        read: numbers of nodes to leave out; gets the numbers of the nodes that are read.
        first: nodes with smaller numbers are left out.
    """
    seen: set[int] = set()
    for node in nodes_below(roots, set() if read is None else read, first):
        for tensor in tensors_in(getattr(node, "__dict__", None)):  # of an autograd function
            yield Kept(node, tensor, is_saved=True)
        waiting = list(saved_by(node))
        for value in waiting:
            if value.hook is None and isinstance(value.data, torch.Tensor):
                yield Kept(node, value.data, not value.of_checkpoint)
                continue
            for found in _reached([value.data, *_owner_of(value.hook)], seen):
                if isinstance(found, torch.Tensor):
                    yield Kept(node, found, is_saved=False)
                    waiting += inputs_saved_by(node_of(found))
                else:
                    waiting += value_in(found, of_checkpoint=True)


def nodes_below(roots: Iterable[Any], read: set[int], first: int) -> list[Any]:
    """Return the nodes of graphs in order of creation, without those of leaves.

    Args:
        roots: autograd nodes; None is ignored.
        read: numbers of nodes to leave out; gets the numbers of the nodes found.
        first: nodes with smaller numbers are left out.
    """
    found: dict[Any, int] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        number = number_of(node)
        if number >= UNNUMBERED or number < first or number in read:
            continue
        found[node] = number
        waiting += [reached for reached, _ in node.next_functions]
    read.update(found.values())
    return sorted(found, key=found.__getitem__)


def _owner_of(hook: Any) -> tuple[Any, ...]:
    """Return a hook, and its object if it is a method."""
    return (hook.__func__, hook.__self__) if isinstance(hook, MethodType) else (hook,)


def _reached(things: list[Any], seen: set[int]) -> Iterator[Any]:
    """Yield the tensors and `SAVED` values that objects refer to."""
    waiting = [one for one in things if id(one) not in seen]
    seen.update(map(id, waiting))
    while waiting:
        thing = waiting.pop()
        kind = type(thing)
        if kind is SAVED or issubclass(kind, torch.Tensor):
            yield thing
        elif not issubclass(kind, _NOT_ENTERED):
            inside = [one for one in _referred(thing) if id(one) not in seen]
            seen.update(map(id, inside))
            waiting += inside


def _referred(thing: Any) -> list[Any]:
    if type(thing) is FunctionType:
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
    return gc.get_referents(thing)


def in_python(kind: type) -> list[Any]:
    """Return the objects of a class, and of classes derived from it, that Python knows."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def node_of(tensor: torch.Tensor) -> Any:
    """Return the node that created a tensor, or None."""
    try:
        return tensor.grad_fn
    except Exception:  # a tensor subclass may raise anything
        return None


class SavedBytes:
    """Bytes that graphs keep for backward, by the module that keeps them first.

    Graphs from before this object was made are left out. A storage counts once for each backward.

    Args:
        attribution: of the tracker.
        is_used: whether an operator made or used the storage with this `id`. What else a hook
            refers to, such as the state of a generator or a whole data set, does not count.
    """

    def __init__(self, attribution: Attribution, is_used: Callable[[int], bool]) -> None:
        self._attribution, self._is_used = attribution, is_used
        self._first = next_number()
        self._read: set[int] = set()
        self._of_task: dict[int, dict[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._found: list[tuple[Any, tuple[str, ...], str, int]] = []

    def read(self, root: Any) -> None:
        """Read the graph below a node, whose backward begins."""
        number = UNNUMBERED if root is None else number_of(root)
        if self._first <= number < UNNUMBERED and number not in self._read:
            self._read_all([root])

    def read_rest(self) -> None:
        """Read the graphs of all tensors that Python holds, if some had no backward so far."""
        if next_number() > max(self._read, default=self._first - 1) + 1:
            self._read_all([node_of(tensor) for tensor in in_python(torch.Tensor)])

    def _read_all(self, roots: list[Any]) -> None:
        while len(self._of_task) > KEPT_TASKS:
            self._of_task.pop(next(iter(self._of_task)))
        counted = self._of_task.setdefault(graph_task(), {})
        for node, tensor, _ in kept_by(roots, read=self._read, first=self._first):
            stack = self._attribution.creator_of(node)[0].stack
            for part, storage in storages_of([tensor]):
                known = counted.get(id(storage))
                if (known is None or known() is not storage) and self._is_used(id(storage)):
                    ref = counted[id(storage)] = weakref.ref(storage)
                    self._found.append((ref, stack, device_of(part), storage.nbytes()))

    def totals(self, device: str, permanent: set[int]) -> PhaseTotals:
        """Return the bytes on a device, without `permanent` storages, which are given by `id`."""
        totals = PhaseTotals()
        for ref, stack, place, size in self._found:
            if place == device and id(ref()) not in permanent:
                totals.add(stack, FORWARD, size)
        return totals

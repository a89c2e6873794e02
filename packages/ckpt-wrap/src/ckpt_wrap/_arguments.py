"""Separate the tensors from call arguments, and rebuild the arguments for recomputation.

Tensors are found in tuples, lists, dicts, sets, deques and instances of classes written in Python,
such as dataclasses and caches. Before forward each of these is copied, with an index instead of
each tensor. An instance that has the same contents in recomputation is passed itself, so forward
may compare it by identity. Otherwise recomputation gets a new copy, filled with the tensors. So it
sees the contents before forward, and its own changes are dropped.

Instances of classes of torch, of the standard library and of classes written in C, modules, and
objects that cannot be copied are passed by reference.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from ckpt_wrap._random import source_of

DEPTH = 24  # of nested objects; deeper ones are passed by reference
LIMIT = 4096  # objects in one call; further ones are passed by reference

ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)
BUILTIN = frozenset({tuple, list, dict, set, OrderedDict, defaultdict, deque})
_CONTAINERS = (dict, list, tuple, set, deque)
_HEAP_TYPE = 1 << 9  # flag of classes written in Python
_MISSING = object()


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """Placeholder for a tensor: its position in the list of tensors."""

    index: int


class Arguments:
    """The arguments of a call, without their tensors.

    Attributes:
        tensors: the tensors, in the order in which they were found.
        generators: the random number generators.
        can_change: whether there are objects that forward can put a tensor into.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Any] = []
        copier = Copier(self._taken())
        self._args = [copier(arg) for arg in args]
        self._kwargs = {name: copier(arg) for name, arg in kwargs.items()}
        self._originals = copier.originals
        self.can_change = copier.can_change

    def _taken(self) -> Callable[[Any], Any]:
        positions: dict[int, TensorIndex] = {}

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                if source_of(leaf) is not None:
                    self.generators.append(leaf)
                return leaf
            if id(leaf) not in positions:
                positions[id(leaf)] = TensorIndex(len(self.tensors))
                self.tensors.append(leaf)
            return positions[id(leaf)]

        return take

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments with the contents before forward.

        Args:
            tensors: one for each of `self.tensors`.
        """
        copier = Copier(lambda leaf: tensors[leaf.index] if type(leaf) is TensorIndex else leaf)
        if self._originals:
            copier.keep(_Unchanged(self._originals, tensors).originals())
        kwargs = {name: copier(arg) for name, arg in self._kwargs.items()}
        return [copier(arg) for arg in self._args], kwargs


class Copier:
    """Copies nested values. Each object is copied once.

    Args:
        replace: called for tensors and for values that are not copied; returns what to use instead.
        follows: whether to copy objects of a class.
    """

    def __init__(
        self, replace: Callable[[Any], Any], follows: Callable[[Any], bool] | None = None
    ) -> None:
        self._replace = replace
        self._follows = is_followed if follows is None else follows
        self._made: dict[int, Any] = {}
        self.originals: list[tuple[Any, weakref.ref[Any]]] = []  # instances: the copy, the original
        self.can_change = False

    def keep(self, known: Iterable[tuple[Any, Any]]) -> None:
        """Use these results instead of new copies."""
        self._made.update((id(value), result) for value, result in known)

    def __call__(self, value: Any, depth: int = 0) -> Any:
        kind: Any = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, torch.Tensor) or depth > DEPTH or not self._follows(kind):
            return self._replace(value)
        if id(value) in self._made:
            return self._made[id(value)]
        if len(self._made) >= LIMIT:
            return value
        if isinstance(value, tuple):
            items = [self(item, depth + 1) for item in value]
            if all(map(is_, items, value)):
                return value
            new = self._made[id(value)] = _tuple(kind, items)
            return new
        try:
            new = copy.copy(value)
        except Exception:  # raised by its own copy methods
            return value
        if new is value:
            return value
        self._made[id(value)] = new
        self.can_change = True
        if kind not in BUILTIN and _may_refer(kind):
            self.originals.append((new, weakref.ref(value)))
        self._fill(new, depth + 1)
        return new

    def _fill(self, new: Any, depth: int) -> None:
        # Call the methods of the builtin classes: subclasses may override their own.
        if isinstance(new, dict):
            for key in list(dict.keys(new)):
                dict.__setitem__(new, key, self(dict.__getitem__(new, key), depth))
        elif isinstance(new, (list, deque)):
            put: Any = list.__setitem__ if isinstance(new, list) else deque.__setitem__
            for index, item in enumerate(new):
                put(new, index, self(item, depth))
        elif isinstance(new, set):
            items = [self(item, depth) for item in new]
            set.clear(new)
            set.update(new, items)
        if type(new) in BUILTIN:
            return
        for name in (*getattr(new, "__dict__", ()), *_slots(type(new))):
            part = getattr(new, name, None)
            other = self(part, depth)
            if other is not part:
                object.__setattr__(new, name, other)


class _Unchanged:
    """Finds originals that have the contents of their copies.

    The originals are held weakly: a graph that holds a cache, which holds tensors with that graph,
    would never be freed.
    """

    def __init__(
        self, pairs: list[tuple[Any, weakref.ref[Any]]], tensors: Sequence[torch.Tensor]
    ) -> None:
        self._tensors = tensors
        self._alive = {
            id(made): (made, found) for made, ref in pairs if (found := ref()) is not None
        }
        self._asked: set[int] = set()  # copies whose contents are compared: they may contain cycles

    def originals(self) -> Iterator[tuple[Any, Any]]:
        """Copies and originals with the same contents."""
        for made, found in self._alive.values():
            self._asked = {id(made)}
            if self._same_contents(found, made):
                yield made, found

    def _same(self, now: Any, then: Any) -> bool:
        if type(then) is TensorIndex:
            return self._tensors[then.index] is now
        if now is then or (type(now) in ATOMS and type(now) is type(then) and now == then):
            return True
        if type(now) is not type(then) or isinstance(now, torch.Tensor):
            return False
        if type(then) not in BUILTIN and not isinstance(then, tuple):
            alive = self._alive.get(id(then))
            if alive is None or alive[1] is not now:
                return False
        if id(then) in self._asked:
            return True
        self._asked.add(id(then))
        return self._same_contents(now, then)

    def _same_contents(self, now: Any, then: Any) -> bool:
        kind: Any = next((k for k in _CONTAINERS if isinstance(then, k)), None)
        if kind is not None:
            if kind.__len__(now) != kind.__len__(then):
                return False
            if kind is set:
                if not set.issubset(now, then):
                    return False
            elif not all(map(self._same, kind.__iter__(now), kind.__iter__(then))):
                return False
            if kind is dict and not all(map(self._same, dict.values(now), dict.values(then))):
                return False
        if type(then) in BUILTIN:
            return True
        names = (*getattr(then, "__dict__", ()), *_slots(type(then)))
        return len(getattr(now, "__dict__", ())) == len(getattr(then, "__dict__", ())) and all(
            self._same(getattr(now, name, _MISSING), getattr(then, name, _MISSING))
            for name in names
        )


def _tuple(kind: Any, items: list[Any]) -> Any:
    try:
        return tuple.__new__(kind, items)  # a subclass may have another constructor
    except TypeError:  # a class written in C
        return kind(items)


def warn_if_grown(args: Sequence[Any], kwargs: dict[str, Any], known: set[int], where: str) -> None:
    """Warn if forward put a tensor that requires grad into an argument; `known` are ids."""
    for arg in (*args, *kwargs.values()):
        kind = type(arg).__name__
        found = () if kind in _warned else Arguments([arg], {}).tensors
        if any(tensor.requires_grad and id(tensor) not in known for tensor in found):
            _warned.add(kind)
            warnings.warn(
                f"ckpt_wrap.checkpoint_: module {where} stores a tensor that requires grad in an "
                f"argument ({kind}). The tensor stays in memory as long as the argument does, so "
                "checkpointing does not free it. Pass use_cache=False to a transformers model, or "
                "no cache, in training.",
                stacklevel=2,
            )


_warned: set[str] = set()  # classes of arguments with a warning


@functools.cache
def _may_refer_weakly(kind: Any) -> bool:
    return bool(kind.__weakrefoffset__)


@functools.cache
def _slots_of(kind: Any) -> frozenset[str]:
    return frozenset(
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
        and base.__flags__ & _HEAP_TYPE
        and name not in ("__dict__", "__weakref__")
    )


@functools.cache
def _follows(kind: Any) -> bool:
    """Whether to copy objects of this class; one with a finalizer may own something."""
    if kind in BUILTIN or kind is types.SimpleNamespace or issubclass(kind, tuple):
        return True
    if not kind.__flags__ & _HEAP_TYPE or hasattr(kind, "__del__"):
        return False
    if issubclass(kind, (torch.Tensor, nn.Module, type, enum.Enum, TensorIndex)):
        return False
    package = kind.__module__.partition(".")[0]
    return package == "__main__" or package not in {"torch", *sys.stdlib_module_names}


# Callers pass any class, which mypy does not accept as hashable.
is_followed: Callable[[Any], bool] = _follows
_slots: Callable[[Any], frozenset[str]] = _slots_of
_may_refer: Callable[[Any], bool] = _may_refer_weakly

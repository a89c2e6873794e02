"""What one container or instance holds, compared later, and put into a new one."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_CONTAINERS = (tuple, list, deque, dict, set)
_ATOMS = (int, float, bool, str, bytes, complex, type(None))
_VALUES = (int, float, str, bytes, complex)
_MADE = {object, *_CONTAINERS, *_VALUES, OrderedDict, defaultdict, types.SimpleNamespace}
_MISSING = object()
_HEAP_TYPE = 1 << 9  # in the flags of classes written in Python


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The items and attributes of one object.

    Args:
        value: the object itself, or None where only a new one is to be made.
        kind: its class.
        keys: of a dict.
        items: of a container; the state of a random generator.
        attributes: by name, those in slots included.
        extra: what its class is called with, to make a new one.
    """

    value: Any
    kind: Any
    keys: tuple[Any, ...]
    items: tuple[Any, ...]
    attributes: dict[str, Any]
    extra: tuple[Any, ...] = ()

    @property
    def is_tuple(self) -> bool:
        """Whether it is made with its items, not filled with them."""
        return issubclass(self.kind, tuple)

    def parts(self) -> Iterator[tuple[str, Any]]:
        """What it holds that may be or lead to a tensor, and how one gets there from it."""
        for index, item in enumerate(self.items):
            if type(item) not in _ATOMS:
                yield f"[{self.keys[index] if self.keys else index!r}]", item
        for name, attribute in self.attributes.items():
            if type(attribute) not in _ATOMS:
                yield f".{name}", attribute

    def mapped(self, change: Callable[[Any], Any]) -> State:
        """The same with all it holds replaced, and without the object."""
        if is_generator(self.kind):
            return dataclasses.replace(self, value=None)
        return dataclasses.replace(
            self,
            value=None,
            items=tuple(map(change, self.items)),
            attributes={name: change(value) for name, value in self.attributes.items()},
        )

    def can_be_made(self) -> bool:
        """Whether a new object of its class can be made."""
        try:
            return self.is_tuple or (_made_of(self.kind) and type(self.blank()) is self.kind)
        except Exception:  # whatever its class has against it
            return False

    def blank(self) -> Any:
        """A new object of its class that holds nothing."""
        if self.kind in (torch.Generator, random.Random):
            return self.kind(*self.extra)
        if issubclass(self.kind, _VALUES):
            base = next(b for b in _VALUES if issubclass(self.kind, b))
            return base.__new__(self.kind, *self.extra)
        new = self.kind.__new__(self.kind)
        if isinstance(new, deque):
            deque.__init__(new, (), *self.extra)
        elif isinstance(new, defaultdict):
            defaultdict.__init__(new, *self.extra)
        return new

    def tuple_of(self, change: Callable[[Any], Any]) -> Any:
        """The tuple it is, of the changed items."""
        return tuple.__new__(self.kind, map(change, self.items))

    def fill(self, new: Any, change: Callable[[Any], Any]) -> None:
        """Put the items and attributes, changed, into a new object.

        By the methods of the plain containers: a subclass may do something of its own in its.
        """
        if isinstance(new, torch.Generator):
            new.set_state(*self.items)
        elif isinstance(new, random.Random):
            new.setstate(*self.items)
        elif isinstance(new, dict):
            put: Any = OrderedDict.__setitem__ if isinstance(new, OrderedDict) else dict.__setitem__
            for index, key in enumerate(self.keys):
                put(new, key, change(self.items[index]))
        elif isinstance(new, (list, deque, set)):
            add: dict[Any, Any] = {list: list.extend, deque: deque.extend, set: set.update}
            kind = next(k for k in add if isinstance(new, k))
            add[kind](new, map(change, self.items))
        for name, attribute in self.attributes.items():
            object.__setattr__(new, name, change(attribute))


def _made_of(kind: Any) -> bool:
    """Whether what a new object starts from holds nothing but what `State` has of it."""
    builtin = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
    return builtin in _MADE or is_generator(kind)


def is_generator(kind: Any) -> bool:
    """Whether the class is one of random generators that can be had again."""
    return kind in (torch.Generator, random.Random)


def state_of(value: Any) -> State | None:
    """What an object holds now, or None where it is not followed."""
    kind = type(value)
    if not is_followed(kind):
        return None
    if is_generator(kind):
        return _generator_state(value)
    keys: tuple[Any, ...] = ()
    items: tuple[Any, ...] = ()
    if isinstance(value, dict):
        # An ordered one keeps its order beside the dict. No class's own methods are called.
        keys = tuple((OrderedDict if isinstance(value, OrderedDict) else dict).keys(value))
        items = tuple(dict.__getitem__(value, key) for key in keys)
    elif isinstance(value, _CONTAINERS):
        items = tuple(value)
    extra: tuple[Any, ...] = ()
    if isinstance(value, deque):
        extra = (value.maxlen,)
    elif isinstance(value, defaultdict):
        extra = (value.default_factory,)
    elif isinstance(value, _VALUES):
        extra = (value,)
    return State(value, kind, keys, items, _attributes(value), extra)


def _generator_state(value: Any) -> State:
    if isinstance(value, random.Random):
        return State(value, type(value), (), (value.getstate(),), {})
    return State(value, type(value), (), (value.get_state(),), {}, (value.device,))


def same_state(state: State) -> bool:
    """Whether the object holds what it held: the very same things, in the same order."""
    now = state_of(state.value)
    if now is None:
        return False
    if isinstance(state.value, torch.Generator):
        return torch.equal(*state.items, *now.items)
    if isinstance(state.value, random.Random):
        return bool(state.items == now.items)
    return (
        _same(state.keys, now.keys)
        and _same(state.items, now.items)
        and len(state.attributes) == len(now.attributes)
        and all(now.attributes.get(n, _MISSING) is v for n, v in state.attributes.items())
    )


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", ()))
    for name in _slots(type(value)):
        attribute = getattr(value, name, _MISSING)
        if attribute is not _MISSING:
            found[name] = attribute
    return found


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    """Names of the attributes that are in slots, private ones as they are really called."""
    return tuple(
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
        and base.__flags__ & _HEAP_TYPE
        and name not in ("__dict__", "__weakref__")
    )


@functools.cache
def _is_followed(kind: Any) -> bool:
    if kind in _CONTAINERS or kind in (OrderedDict, defaultdict, types.SimpleNamespace):
        return True
    if is_generator(kind):
        return True
    if kind in _ATOMS or issubclass(kind, (torch.Tensor, nn.Module, type, enum.Enum)):
        return False
    if not kind.__flags__ & _HEAP_TYPE:
        return False
    package = kind.__module__.partition(".")[0]
    return package != "torch" and (package == "__main__" or package not in sys.stdlib_module_names)


# Under these names callers may pass any class; mypy asks for a hashable otherwise.
is_followed: Callable[[Any], bool] = _is_followed
_slots: Callable[[Any], tuple[str, ...]] = _slots_of

"""What is remembered of each policy, without keeping a policy or its functions alive."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any, Generic, TypeVar
from weakref import ref

import torch

from ._policies import Policy

T = TypeVar("T")
_MOST = 256
_CONSTANT = (type(None), bool, int, float, str, bytes, type, torch.dtype, torch.device)


class PerPolicy(Generic[T]):
    """One object for each policy; equal policies share one.

    Policies are equal if their fields are. Functions and other objects in them count by identity,
    and are held weakly: a policy may be a method of the model.

    Args:
        make: makes the object of a policy, to which it does not refer.
    """

    def __init__(self, make: Callable[[Policy], T]) -> None:
        self._make = make
        self._by_object: dict[int, tuple[ref[Policy], T]] = {}
        self._by_key: OrderedDict[Hashable, tuple[T, list[Any]]] = OrderedDict()

    def of(self, policy: Policy) -> T:
        """Return the object of a policy."""
        at = id(policy)
        found = self._by_object.get(at)
        if found is not None and found[0]() is policy:
            return found[1]
        objects: list[object] = []
        key = _key_of(policy, objects)
        kept = self._by_key.get(key)
        if kept is None:
            kept = self._make(policy), [self._held(each, key) for each in objects]
            self._by_key[key] = kept
            while len(self._by_key) > _MOST:
                self._by_key.popitem(last=False)
        gone = ref(policy, lambda _: self._by_object.pop(at, None) and None)
        self._by_object[at] = gone, kept[0]
        return kept[0]

    def clear(self) -> None:
        """Forget all policies."""
        self._by_object.clear()
        self._by_key.clear()

    def _held(self, each: object, key: Hashable) -> Any:
        """Hold an object weakly if possible; its number may be another's once it is gone."""
        try:
            return ref(each, lambda _: self._by_key.pop(key, None) and None)
        except TypeError:
            return each


def _key_of(value: object, objects: list[object]) -> Hashable:
    """Return a key of a policy or of a part of one; collect what the key names by `id`."""
    kind = type(value)
    if isinstance(value, _CONSTANT):
        return kind, value
    if isinstance(value, (tuple, list)):
        return kind, tuple([_key_of(each, objects) for each in value])
    if isinstance(value, (set, frozenset)):
        return kind, frozenset([_key_of(each, objects) for each in value])
    if isinstance(value, MethodType):
        objects += (value.__self__, value.__func__)
        return kind, id(value.__self__), id(value.__func__)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return kind, tuple([_key_of(getattr(value, each.name), objects) for each in fields])
    objects.append(value)
    return kind, id(value)

"""Take the tensors out of call arguments, and build the arguments again for recomputation.

Tensors are found in tuples, lists, dicts, sets, deques and instances of classes written in Python,
such as dataclasses and caches. Instances of classes of torch and of the standard library, and
modules, are passed by reference.

Recomputation gets the contents that the arguments had before forward. Builtin containers are built
again. Another object is passed as it is while its contents are unchanged. Otherwise it is replaced
by a new object of its class with the old contents; a class whose objects hold more than items and
attributes, such as a deque, is an error then. Changes that recomputation makes to a new object are
dropped.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt_wrap._errors import RecomputeError, Where

DEPTH = 24  # of nested objects; deeper ones are passed by reference
LIMIT = 4096  # objects in one call; further ones are passed by reference

_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)
_BUILTIN = frozenset({tuple, list, dict, set, OrderedDict, defaultdict})
# Bases of objects that are made again.
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, types.SimpleNamespace, object)
_HEAP_TYPE = 1 << 9  # flag of classes written in Python
_MISSING = object()


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """Placeholder for a tensor: its position in the list of tensors."""

    index: int


class Contents(NamedTuple):
    """Shallow contents of an object: keys of a dict, items, attributes."""

    keys: tuple[Any, ...]
    items: tuple[Any, ...]
    attributes: dict[str, Any]

    def is_same(self, other: Contents) -> bool:
        """Whether both hold the same objects in the same order."""
        return self.attributes.keys() == other.attributes.keys() and all(
            len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
            for a, b in (
                (self.keys, other.keys),
                (self.items, other.items),
                (self.attributes.values(), [other.attributes[n] for n in self.attributes]),
            )
        )


class Node:
    """Template of one object: its contents before forward, and how to build it again.

    Attributes:
        keys, items, attributes: the contents, as templates.
        live: the object, as long as recomputation may get it unchanged.
        before: its contents before forward, to notice changes.
    """

    __slots__ = ("attributes", "before", "items", "keys", "kind", "live")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.live: Any = None
        self.before: Contents | None = None
        self.keys: tuple[Any, ...] = ()
        self.items: list[Any] = []
        self.attributes: dict[str, Any] = {}

    def parts(self) -> list[Any]:
        """Templates of items and attributes."""
        return [*self.items, *self.attributes.values()]

    def is_changed(self) -> bool:
        """Whether the object has other contents than before forward."""
        return self.before is None or not self.before.is_same(_contents(self.live))

    def forget(self) -> None:
        """Release the object, which recomputation does not get."""
        self.live = self.before = None

    def build(self, fill: _Filler) -> None:
        """Make the object with its contents, and note it before an item can refer to it."""
        if issubclass(self.kind, tuple):
            items = map(fill, self.items)
            fill.made[self] = (
                self.kind(*items) if hasattr(self.kind, "_fields") else self.kind(items)
            )
            return
        base = next(base for base in _BASES if issubclass(self.kind, base))
        try:
            # The methods of the builtin classes: subclasses may override their own.
            new = fill.made[self] = base.__new__(self.kind)
        except TypeError:
            raise TypeError(self.kind.__name__) from None
        if issubclass(base, dict):
            for key, item in zip(self.keys, self.items, strict=True):
                base.__setitem__(new, key, fill(item))
        elif base in (list, set):
            put: Any = base.update if base is set else base.extend
            put(new, map(fill, self.items))
        for name, part in self.attributes.items():
            object.__setattr__(new, name, fill(part))


class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        tensors: the tensors, in the order in which they were found.
        generators: the random number generators.
    """

    __slots__ = ("_args", "_kwargs", "_nodes", "_positions", "_watched", "generators", "tensors")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self._watched: list[Node] = []
        self._nodes: dict[int, Node] = {}
        self._positions: dict[int, int] = {}
        self._args = [self._flatten(arg, False, 0) for arg in args]
        self._kwargs = {name: self._flatten(arg, False, 0) for name, arg in kwargs.items()}
        # The ids are valid only while the arguments exist.
        self._nodes, self._positions = {}, {}

    def _flatten(self, value: Any, inside: bool, depth: int) -> Any:
        """The template of a value; `inside` an object that is passed by reference."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._positions:
                self._positions[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return TensorIndex(self._positions[id(value)])
        kind: Any = type(value)
        if kind is torch.Generator:
            self.generators.append(value)
            return value
        if kind in _ATOMS or depth > DEPTH or not _is_followed(kind):
            return value
        node = self._nodes.get(id(value))
        if node is not None:
            if inside and node.live is None:
                self._watch(node, value, _contents(value))
            return node
        if len(self._nodes) >= LIMIT:
            return value
        node = self._nodes[id(value)] = Node(kind)
        contents = _contents(value)
        inside = inside or not (kind in _BUILTIN or issubclass(kind, tuple))
        if inside:
            self._watch(node, value, contents)
        node.keys = contents.keys
        node.items = [self._flatten(item, inside, depth + 1) for item in contents.items]
        node.attributes = {
            name: self._flatten(part, inside, depth + 1)
            for name, part in contents.attributes.items()
        }
        return node

    def _watch(self, node: Node, value: Any, contents: Contents) -> None:
        node.live = value
        node.before = contents
        self._watched.append(node)

    def end(self, tensors: Sequence[torch.Tensor], where: Where) -> None:
        """Forward has ended: forget the objects that it changed, and warn if one has grown.

        Args:
            tensors: the tensors that the arguments had before forward.
            where: the module, for messages.
        """
        stale = self._stale()
        if stale:
            _warn_if_grown(stale, tensors, where)
        for node in stale:
            node.forget()

    def filled(
        self, tensors: Sequence[torch.Tensor], where: Where, *, rebuild: bool = False
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with these tensors, and otherwise with the contents before forward.

        Args:
            tensors: one for each of `self.tensors`.
            where: the module, for messages.
            rebuild: build every object that holds a tensor again, changed or not.

        Raises:
            RecomputeError: an object has to be made again, and its class does not allow that.
        """
        fill = _Filler(tensors, self._stale(rebuild=rebuild))
        try:
            return [fill(arg) for arg in self._args], {k: fill(v) for k, v in self._kwargs.items()}
        except TypeError as error:
            raise RecomputeError(
                f"ckpt_wrap.{where.made_by}: an argument of module {where} was changed since its "
                "forward started, and recomputation needs it as it was before, but an object of "
                f"class {error} cannot be made again. Pass a list, a dict or a dataclass instead, "
                "or leave this module out of checkpointing."
            ) from error

    def _stale(self, *, rebuild: bool = False) -> set[Node]:
        """Watched objects that have changed, and those that contain them."""
        stale = {
            node
            for node in self._watched
            if node.is_changed()
            or (rebuild and any(isinstance(part, TensorIndex) for part in node.parts()))
        }
        more = stale
        while more:
            more = {
                node
                for node in self._watched
                if node not in stale
                and any(isinstance(part, Node) and part in stale for part in node.parts())
            }
            stale |= more
        return stale


class _Filler:
    """Builds values from templates, each object once; a closure would be a reference cycle."""

    def __init__(self, tensors: Sequence[torch.Tensor], stale: set[Node]) -> None:
        self._tensors = tensors
        self._stale = stale
        self.made: dict[Node, Any] = {}

    def __call__(self, template: Any) -> Any:
        if isinstance(template, TensorIndex):
            return self._tensors[template.index]
        if not isinstance(template, Node):
            return template
        if template.live is not None and template not in self._stale:
            return template.live
        if template not in self.made:
            template.build(self)
        return self.made[template]


def _warn_if_grown(stale: set[Node], tensors: Sequence[torch.Tensor], where: Where) -> None:
    known = set(map(id, tensors))
    now = Arguments([node.live for node in stale], {})
    kinds = {node.kind.__name__ for node in stale if node.kind not in _BUILTIN}
    kind = ", ".join(sorted(kinds or {node.kind.__name__ for node in stale}))
    grown = any(tensor.requires_grad and id(tensor) not in known for tensor in now.tensors)
    if not grown or kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"ckpt_wrap.{where.made_by}: module {where} stores a tensor that requires grad in an "
        f"argument ({kind}). The tensor stays in memory as long as the argument does, so "
        "checkpointing does not free it. Pass use_cache=False to a transformers model, or no "
        "cache, in training.",
        stacklevel=2,
    )


_warned: set[str] = set()  # classes of arguments that a warning was given for


def _contents(value: Any) -> Contents:
    """The present keys, items and attributes of an object."""
    if isinstance(value, dict):
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        keys = tuple(base.keys(value))
        return Contents(keys, tuple(dict.__getitem__(value, k) for k in keys), _attributes(value))
    items = tuple(value) if isinstance(value, (tuple, list, set, deque)) else ()
    return Contents((), items, _attributes(value))


def _attributes(value: Any) -> dict[str, Any]:
    if type(value) in _BUILTIN and type(value) is not defaultdict:
        return {}
    found = dict(getattr(value, "__dict__", ()))
    for name in _slots(type(value)):
        attribute = getattr(value, name, _MISSING)
        if attribute is not _MISSING:
            found[name] = attribute
    return found


@functools.cache
def _slots_of(kind: Any) -> frozenset[str]:
    """Names of the attributes in slots of classes written in Python, and `default_factory`."""
    return frozenset(
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
        and (base.__flags__ & _HEAP_TYPE or base is defaultdict)
        and name not in ("__dict__", "__weakref__")
    )


@functools.cache
def _follows(kind: Any) -> bool:
    """Whether to look into objects of this class."""
    if kind is types.SimpleNamespace or issubclass(kind, tuple):
        return True
    if not kind.__flags__ & _HEAP_TYPE:
        return kind in _BUILTIN or kind is deque
    if issubclass(kind, (torch.Tensor, nn.Module, type, enum.Enum)):
        return False
    package = kind.__module__.partition(".")[0]
    return package == "__main__" or package not in {"torch", *sys.stdlib_module_names}


# Callers pass any class, which mypy does not accept as hashable.
_is_followed: Callable[[Any], bool] = _follows
_slots: Callable[[Any], frozenset[str]] = _slots_of

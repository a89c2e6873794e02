"""Take the tensors out of call arguments, and build the arguments again for recomputation.

Tensors are found in tuples, lists, dicts, sets, deques and instances of classes written in Python,
such as dataclasses and caches. Instances of classes of torch and of the standard library, and
modules, are passed by reference.

Recomputation gets the contents that the arguments had before forward. Containers and dataclasses
with tensors are always built again. Another object is passed as it is while its contents are
unchanged, and replaced by a copy with the old contents otherwise. Changes that recomputation makes
to such a copy are dropped.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import sys
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ckpt_wrap._errors import RecomputeError
from ckpt_wrap._where import Where

DEPTH = 24  # of nested objects; deeper ones are passed by reference
LIMIT = 4096  # objects in one call; further ones are passed by reference

_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)
_CONTAINERS = (tuple, list, dict, set, deque)
_HEAP_TYPE = 1 << 9  # flag of classes written in Python
_MISSING = object()


@dataclasses.dataclass(frozen=True, slots=True)
class TensorIndex:
    """Placeholder for a tensor: its position in the list of tensors."""

    index: int


class Contents:
    """The items and attributes of an object, or templates for them."""

    __slots__ = ("attributes", "items", "keys")

    def __init__(
        self, keys: tuple[Any, ...], items: Sequence[Any], attributes: dict[str, Any]
    ) -> None:
        self.keys = keys
        self.items = items
        self.attributes = attributes

    @classmethod
    def of(cls, value: Any) -> Contents:
        """The present contents of an object."""
        kind = type(value)
        if kind is torch.Generator:
            return cls((), (value.get_state(),), {})
        if isinstance(value, dict):
            # The methods of the builtin classes: subclasses may override their own.
            base = OrderedDict if isinstance(value, OrderedDict) else dict
            keys = tuple(base.keys(value))
            return cls(keys, [dict.__getitem__(value, key) for key in keys], _attributes(value))
        items = tuple(value) if isinstance(value, _CONTAINERS) else ()
        return cls((), items, {} if kind is tuple or kind is list else _attributes(value))

    def parts(self) -> Iterator[Any]:
        """Items and attributes."""
        yield from self.items
        yield from self.attributes.values()

    def same_as(self, other: Contents) -> bool:
        """Whether both hold the same objects in the same order."""
        return (
            _identical(self.keys, other.keys)
            and _identical(self.items, other.items)
            and self.attributes.keys() == other.attributes.keys()
            and all(other.attributes[name] is value for name, value in self.attributes.items())
        )


class Node:
    """Template of one object: its contents before forward, and how to build it again.

    Attributes:
        live: the object, as long as recomputation may get it unchanged.
        blank: an empty copy, where one is needed to build the object again.
    """

    __slots__ = ("before", "blank", "kind", "live", "template")

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.live: Any = None
        self.before: Contents | None = None
        self.blank: Any = None
        self.template = Contents((), (), {})

    def watch(self, value: Any, contents: Contents) -> None:
        """Keep the object, to notice changes of its contents."""
        self.live = value
        self.before = contents

    def is_changed(self) -> bool:
        """Whether the object has other contents than before forward."""
        if self.before is None:
            return True
        if self.kind is torch.Generator:
            return not torch.equal(self.before.items[0], self.live.get_state())
        return not self.before.same_as(Contents.of(self.live))

    def forget(self) -> None:
        """Let go of the object, which recomputation does not get."""
        if self.kind is torch.Generator:
            return
        if self.live is not None and self.blank is None and not issubclass(self.kind, tuple):
            self.blank = _blank(self.live)
        self.live = self.before = None

    def children(self) -> Iterator[Node]:
        """Templates of the objects inside."""
        return (part for part in self.template.parts() if isinstance(part, Node))

    def holds_tensors(self) -> bool:
        """Whether a tensor is in the object, or in a container in it that is always built again."""
        return any(
            isinstance(part, TensorIndex) or (isinstance(part, Node) and part.live is None)
            for part in self.template.parts()
        )

    def new(self) -> Any:
        """An empty object of the class."""
        if self.kind in (list, dict, set):
            return self.kind()
        blank = _blank(self.live) if self.blank is None else self.blank
        if blank is _MISSING:
            raise TypeError(self.kind.__name__)
        return blank if self.blank is None else copy.copy(blank)


class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        tensors: the tensors, in the order in which they were found.
    """

    __slots__ = ("_args", "_kwargs", "_nodes", "_positions", "_watched", "tensors")

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
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
        if kind in _ATOMS or depth > DEPTH or not _is_followed(kind):
            return value
        node = self._nodes.get(id(value))
        if node is None:
            if len(self._nodes) >= LIMIT:
                return value
            node = self._nodes[id(value)] = Node(value)
            self._fill_in(node, value, inside, depth)
        elif inside and node.live is None:
            self._watch(node, value)
        return node

    def _fill_in(self, node: Node, value: Any, inside: bool, depth: int) -> None:
        contents = Contents.of(value)
        by_reference = not isinstance(value, _CONTAINERS) and not dataclasses.is_dataclass(value)
        inside = inside or by_reference
        if inside:
            self._watch(node, value)
        if node.kind is not torch.Generator:
            node.template = Contents(
                contents.keys,
                [self._flatten(item, inside, depth + 1) for item in contents.items],
                {
                    name: self._flatten(part, inside, depth + 1)
                    for name, part in contents.attributes.items()
                },
            )
        if inside or (node.holds_tensors() and self._has_blank(node, value)):
            return
        self._watch(node, value)

    def _watch(self, node: Node, value: Any) -> None:
        node.watch(value, Contents.of(value))
        self._watched.append(node)

    def _has_blank(self, node: Node, value: Any) -> bool:
        """Whether the object can be built again without keeping it, which keeps its tensors."""
        if node.kind in (list, dict, set) or isinstance(value, tuple):
            return True
        node.blank = _blank(value)
        if node.blank is _MISSING:
            node.blank = None
        return node.blank is not None

    def end(self, tensors: Sequence[torch.Tensor], where: Where) -> None:
        """Forward has ended: forget the objects that it changed, and warn if one has grown.

        Args:
            tensors: the tensors that the arguments had before forward.
            where: the module, for messages.
        """
        if not self._watched:
            return
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
            RecomputeError: an object has to be copied, and its class does not allow that.
        """
        fill = _Filler(tensors, self._stale(rebuild=rebuild) if self._watched else set())
        try:
            return [fill(arg) for arg in self._args], {k: fill(v) for k, v in self._kwargs.items()}
        except TypeError as error:
            raise RecomputeError(
                f"ckpt_wrap.{where.made_by}: an argument of module {where} was changed since its "
                "forward started, and recomputation needs it as it was before, but an object of "
                f"class {error} cannot be copied. Give the class a working __copy__, or leave this "
                "module out of checkpointing."
            ) from error

    def _stale(self, *, rebuild: bool = False) -> set[Node]:
        """Objects that have changed, and the objects that contain them."""
        stale = {
            node
            for node in self._watched
            if node.live is None
            or node.is_changed()
            or (rebuild and any(isinstance(p, TensorIndex) for p in node.template.parts()))
        }
        grows = bool(stale)
        while grows:
            more = {
                n for n in self._watched if n not in stale and not stale.isdisjoint(n.children())
            }
            stale |= more
            grows = bool(more)
        return stale


def _warn_if_grown(stale: set[Node], tensors: Sequence[torch.Tensor], where: Where) -> None:
    known = set(map(id, tensors))
    now = Arguments([node.live for node in stale], {})
    kinds = {node.kind.__name__ for node in stale if not isinstance(node.live, _CONTAINERS)}
    kinds = kinds or {node.kind.__name__ for node in stale}
    kind = ", ".join(sorted(kinds))
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


class _Filler:
    """Builds values from templates, each object once."""

    def __init__(self, tensors: Sequence[torch.Tensor], stale: set[Node]) -> None:
        self._tensors = tensors
        self._stale = stale
        self._made: dict[Node, Any] = {}

    def __call__(self, template: Any) -> Any:
        if isinstance(template, TensorIndex):
            return self._tensors[template.index]
        if not isinstance(template, Node):
            return template
        if template.live is not None and template not in self._stale:
            return template.live
        if template not in self._made:
            self._build(template)
        return self._made[template]

    def _build(self, node: Node) -> None:
        contents = node.template
        if issubclass(node.kind, tuple):
            items = [self(item) for item in contents.items]
            self._made[node] = (
                node.kind(*items) if hasattr(node.kind, "_fields") else node.kind(items)
            )
            return
        new = self._made[node] = node.new()
        if node.kind is torch.Generator:
            assert node.before is not None
            new.set_state(node.before.items[0])
        elif isinstance(new, dict):
            put: Any = OrderedDict.__setitem__ if isinstance(new, OrderedDict) else dict.__setitem__
            for key, item in zip(contents.keys, contents.items, strict=True):
                put(new, key, self(item))
        elif isinstance(new, _CONTAINERS):
            base = next(kind for kind in _ADD if isinstance(new, kind))
            _ADD[base](new, map(self, contents.items))
        for name, part in contents.attributes.items():
            if name in _slots(node.kind):
                object.__setattr__(new, name, self(part))
            else:
                vars(new)[name] = self(part)


_ADD: dict[Any, Callable[[Any, Any], None]] = {
    list: list.extend,
    deque: deque.extend,
    set: set.update,
}


_CLEARED: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)


def _blank(value: Any) -> Any:
    """An empty object of the same class, or `_MISSING` if the class cannot be copied."""
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device)
    try:
        new = copy.copy(value)
    except Exception:  # whatever the class raises
        return _MISSING
    if new is value or type(new) is not type(value):
        return _MISSING
    clear = next((base.clear for base in _CLEARED if isinstance(new, base)), None)
    if clear is not None:
        clear(new)
    for name in _attributes(new):
        if name in _slots(type(new)):
            object.__delattr__(new, name)
    getattr(new, "__dict__", {}).clear()
    return new


def _identical(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", ()))
    for name in _slots(type(value)):
        attribute = getattr(value, name, _MISSING)
        if attribute is not _MISSING:
            found[name] = attribute
    return found


@functools.cache
def _slots_of(kind: Any) -> frozenset[str]:
    """Names of the attributes in slots of classes written in Python."""
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
    """Whether to look into objects of this class."""
    if kind in (torch.Generator, types.SimpleNamespace) or issubclass(kind, tuple):
        return True
    if not kind.__flags__ & _HEAP_TYPE:
        return kind in (list, dict, set, deque, OrderedDict, defaultdict)
    if issubclass(kind, (torch.Tensor, nn.Module, type, enum.Enum)):
        return False
    package = kind.__module__.partition(".")[0]
    if package == "__main__":
        return True
    return package != "torch" and package not in sys.stdlib_module_names


# Callers pass any class, which mypy does not accept as hashable.
_is_followed: Callable[[Any], bool] = _follows
_slots: Callable[[Any], frozenset[str]] = _slots_of

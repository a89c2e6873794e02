"""Contents of containers and objects: noted, compared, and given again in copies.

What is noted is which objects a container holds, not what these hold: each of them is noted for
itself. A copy is made of what changed and of all that holds it; the rest is given as it is.
"""

from __future__ import annotations

import copy
import enum
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..._errors import EngineError

ATOMS = frozenset(
    {*(type(None), bool, int, float, complex, str, bytes, range, slice, type(...))}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator}
)
_OPAQUE = (nn.Module, type, types.FunctionType, types.ModuleType, enum.Enum, torch.optim.Optimizer)

Content = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
"""Keys of a mapping, its values or the items of another container, and keys and values of the
object's own namespace."""


def is_opaque(value: Any) -> bool:
    """Whether a value stands for itself: nothing of it is noted (Rule 3 of `_arguments`)."""
    return isinstance(value, _OPAQUE) or not (
        isinstance(value, (torch.Tensor, list, tuple, dict, set, frozenset, deque))
        or getattr(value, "__dict__", None)
    )


def content_of(value: Any) -> Content:
    """Note which objects a value holds now."""
    keys: tuple[Any, ...] = ()
    items: tuple[Any, ...] = ()
    if isinstance(value, dict):
        # Of these two the first knows the order, and neither calls what a class has in its place.
        keys = tuple((OrderedDict if isinstance(value, OrderedDict) else dict).keys(value))
        items = tuple(dict.__getitem__(value, key) for key in keys)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        items = tuple(value)
    space = getattr(value, "__dict__", None) or {}
    return keys, items, (*space.keys(), *space.values())


def is_same(before: Content, after: Content) -> bool:
    """Whether two notes are of the same objects in the same places."""
    return all(
        len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
        for one, other in zip(before, after, strict=True)
    )


def parts_of(
    path: str, value: Any, containers: dict[int, tuple[Any, Content]]
) -> list[tuple[str, Any]]:
    """List what a value held when it was noted, each with the path to it, as one would write it."""
    noted = containers.get(id(value))
    if noted is None:
        return []
    keys, items, names = noted[1]
    half = len(names) // 2
    places: list[Any] = list(keys) if isinstance(value, dict) else list(range(len(items)))
    inside = [(f"{path}[{key!r}]", item) for key, item in zip(places, items, strict=True)]
    own = zip(names[:half], names[half:], strict=True)
    return inside + [(f"{path}.{name}", item) for name, item in own]


class Copies:
    """Containers as they were: copies of those that changed, and of those that hold such."""

    def __init__(
        self,
        containers: dict[int, tuple[Any, Content]],
        known: dict[int, Any],
        name_of: Callable[[Any], str],
    ) -> None:
        self._containers = containers
        self._known = known
        self._name_of = name_of
        self._changed = {
            key
            for key, (value, content) in containers.items()
            if not is_same(content, content_of(value))
        }
        self._spread()

    def _spread(self) -> None:
        """Add the containers of what changed, until there are no more."""
        found = True
        while found:
            found = False
            for key, (_, content) in self._containers.items():
                if key not in self._changed and any(
                    id(each) in self._changed or id(each) in self._known
                    for each in (*content[1], *content[2])
                ):
                    self._changed.add(key)
                    found = True

    def of(self, value: Any) -> Any:
        """Return `value` as it was."""
        if id(value) in self._known:
            return self._known[id(value)]
        if id(value) not in self._changed:
            return value
        original, content = self._containers[id(value)]
        try:
            return self._copy(original, content)
        except (TypeError, AttributeError, ValueError) as error:
            raise EngineError(
                f"sac_policies.checkpoint: {self._name_of(original)} of type "
                f"{type(original).__name__} was changed by its region and cannot be copied "
                f"({error}), but the recomputation needs it as it was. Pass the region only "
                'what it reads of it, or use engine="recipe".'
            ) from error

    def _copy(self, value: Any, content: Content) -> Any:
        keys, items, names = content
        if isinstance(value, (tuple, frozenset)):
            parts = [self.of(each) for each in items]
            made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            self._known[id(value)] = made
            return made
        made = copy.copy(value)
        self._known[id(value)] = made
        parts = [self.of(each) for each in items]
        if isinstance(value, dict):
            # Past what a subclass does when it is written to, but not past the order it keeps.
            base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            base.clear(made)
            for key, part in zip(keys, parts, strict=True):
                base.__setitem__(made, key, part)
        elif isinstance(value, (list, set, deque)):
            made.clear()
            made.extend(parts) if hasattr(made, "extend") else made.update(parts)
        space = getattr(made, "__dict__", None)
        if space is not None:
            half = len(names) // 2
            space.clear()
            space.update(zip(names[:half], map(self.of, names[half:]), strict=True))
        return made

"""What a region was given beside tensors, as it was before the region ran.

A cache that a region is given grows in its forward, or is written in place. The recomputation
would find it grown, and do other work than the forward.

Rule 1. Contents of containers and objects are noted before the forward. Where one has changed
        when backward recomputes, the region is given a copy as it was; others it gets themselves.
Rule 2. A tensor in them is copied before the region's first write to it. One that others wrote to
        after the region cannot be restored: a recomputation that reads it is refused by name.
Rule 3. Modules, functions, types and what has no contents stand for themselves.
Rule 4. A region inside one that is recomputed is run again with what it was given in the forward,
        as that was: the function around it may hold its containers itself, grown by now.
"""

from __future__ import annotations

import copy
import enum
import inspect
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..._errors import EngineError, MutationError
from ..._frames import user_line
from ..._tensors import tensors_in
from ..._torch_compat import storage_key
from .._engine_disabled import own_work

_ATOMS = frozenset(
    {*(type(None), bool, int, float, complex, str, bytes, range, slice, type(...))}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator}
)
_OPAQUE = (nn.Module, type, types.FunctionType, types.ModuleType, enum.Enum, torch.optim.Optimizer)

Content = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
"""Keys of a mapping, its values or the items of another container, and keys and values of the
object's own namespace."""


def only_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch's checkpoint restores these arguments without help."""
    return all(isinstance(each, torch.Tensor) or type(each) in _ATOMS for each in args) and all(
        type(each) in _ATOMS for each in kwargs.values()
    )


class Arguments:
    """Arguments of one call of one region."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        self._given = (args, kwargs)
        self._containers: dict[int, tuple[Any, Content]] = {}
        # With their version, and whether they took part in a graph.
        self._tensors: dict[int, tuple[torch.Tensor, int, bool]] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._note([*args, *kwargs.values()])

    def _note(self, pending: list[Any]) -> None:
        while pending:
            value = pending.pop()
            if type(value) in _ATOMS or id(value) in self._containers or _is_opaque(value):
                continue
            if isinstance(value, torch.Tensor):
                self._tensors[id(value)] = (value, value._version, value.requires_grad)
                continue
            content = _content_of(value)
            if any(content):
                self._containers[id(value)] = (value, content)
                pending += content[1]
                pending += content[2]
            elif isinstance(value, (list, dict, set, deque)):
                self._containers[id(value)] = (value, content)

    def before_write(self, written: list[torch.Tensor]) -> None:
        """Copy the tensors that share storage with those about to be written (Rule 2)."""
        storages = {storage_key(each) for each in written}
        for key, (tensor, version, _) in self._tensors.items():
            is_first = key not in self._copies and tensor._version == version
            if is_first and storage_key(tensor) in storages:
                with own_work():
                    self._copies[key] = tensor.detach().clone()

    def start_from(self, origin: Arguments) -> None:
        """Be given what `origin` was, as it was then: it is the same region's (Rule 4)."""
        args, kwargs = self._given
        with own_work():
            known = dict(origin._fresh_tensors(args))
        if not known and not origin._has_changed():
            return
        noted = {**self._containers, **origin._containers}
        again = _Copies(noted, known, origin._name_of)
        args = tuple(map(again.of, args))
        kwargs = {name: again.of(value) for name, value in kwargs.items()}
        self._given = (args, kwargs)
        self._containers, self._tensors = {}, {}
        self._note([*args, *kwargs.values()])

    def first(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the forward; tensors as given."""
        args, kwargs = self._given
        pairs = zip(given, args, strict=True)
        return tuple(now if isinstance(now, torch.Tensor) else own for now, own in pairs), kwargs

    def restored(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they were before the forward.

        Args:
            given: the positional arguments as torch restored them; tensors among them are so.

        Raises:
            EngineError: a changed object cannot be copied.
        """
        args, kwargs = self._given
        with own_work():
            known = dict(self._fresh_tensors(args))
        if not known and not self._has_changed():
            return given, kwargs
        again = _Copies(self._containers, known, self._name_of)
        positional = tuple(
            now if isinstance(now, torch.Tensor) else again.of(before)
            for now, before in zip(given, args, strict=True)
        )
        return positional, {name: again.of(value) for name, value in kwargs.items()}

    def _has_changed(self) -> bool:
        return any(
            not _is_same(content, _content_of(value))
            for value, content in self._containers.values()
        )

    def _fresh_tensors(self, args: tuple[Any, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        direct = {id(each) for each in args}
        for key, (tensor, version, needs_grad) in self._tensors.items():
            if tensor._version == version or key in direct:
                continue
            before = self._copies.get(key)
            if before is None:
                yield key, _Changed.standing_for(tensor, self._name_of(tensor))
                continue
            with torch.enable_grad():
                # Cloned from a leaf: the region may write to it, as it did before.
                yield key, before.clone().requires_grad_(needs_grad).clone()

    def _name_of(self, wanted: Any) -> str:
        args, kwargs = self._given
        try:
            bound = inspect.signature(self._function).bind_partial(*args, **kwargs).arguments
        except (TypeError, ValueError):
            bound = {**{str(at): each for at, each in enumerate(args)}, **kwargs}
        seen: set[int] = set()
        pending = [(f"argument {name}", value) for name, value in bound.items()]
        while pending:
            path, value = pending.pop(0)
            if value is wanted:
                return path
            if id(value) in seen:
                continue
            seen.add(id(value))
            pending += _parts(path, value, self._containers)
        return "an argument"


class _Changed(torch.Tensor):
    """Stands for a tensor whose contents are gone; whatever reads it is refused."""

    path: str

    @staticmethod
    def standing_for(tensor: torch.Tensor, name: str) -> _Changed:
        """Make one; `name` says which argument it is."""
        made = tensor.detach().as_subclass(_Changed)
        made.path = name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse to be read."""
        del types
        read = [each for each in tensors_in((args, kwargs)) if isinstance(each, _Changed)]
        raise MutationError(
            f"sac_policies.checkpoint: {read[0].path} was changed in place after its "
            f"region had run, but {getattr(func, '__name__', func)} of the recomputation reads it "
            f"as it was (at {user_line()}). Change it after backward, or hand the region a copy."
        )


class Call:
    """The function of a region: its first call is the forward, all others recompute."""

    def __init__(self, function: Callable[..., Any], arguments: Arguments) -> None:
        self._function = function
        self._arguments = arguments
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, again with its arguments as they were."""
        known = self._arguments
        args, kwargs = known.restored(args) if self._ran else known.first(args)
        self._ran = True
        return self._function(*args, **kwargs)


class _Copies:
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
            if not _is_same(content, _content_of(value))
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
                f"({error}), but the recomputation has to be given it as it was. Hand the region "
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


def _is_opaque(value: Any) -> bool:
    return isinstance(value, _OPAQUE) or not (
        isinstance(value, (torch.Tensor, list, tuple, dict, set, frozenset, deque))
        or getattr(value, "__dict__", None)
    )


def _content_of(value: Any) -> Content:
    keys: tuple[Any, ...] = ()
    items: tuple[Any, ...] = ()
    if isinstance(value, dict):
        keys, items = tuple(dict.keys(value)), tuple(dict.values(value))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        items = tuple(value)
    space = getattr(value, "__dict__", None) or {}
    return keys, items, (*space.keys(), *space.values())


def _is_same(before: Content, after: Content) -> bool:
    return all(
        len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
        for one, other in zip(before, after, strict=True)
    )


def _parts(
    path: str, value: Any, containers: dict[int, tuple[Any, Content]]
) -> list[tuple[str, Any]]:
    noted = containers.get(id(value))
    if noted is None:
        return []
    keys, items, names = noted[1]
    half = len(names) // 2
    places: list[Any] = list(keys) if isinstance(value, dict) else list(range(len(items)))
    inside = [(f"{path}[{key!r}]", item) for key, item in zip(places, items, strict=True)]
    own = zip(names[:half], names[half:], strict=True)
    return inside + [(f"{path}.{name}", item) for name, item in own]

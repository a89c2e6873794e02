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

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..._errors import MutationError
from ..._frames import user_line
from ..._tensors import tensors_in
from ..._torch_compat import storage_key
from .._engine_disabled import own_work
from ._containers import ATOMS, Content, Copies, content_of, is_opaque, is_same, parts_of


def only_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch's checkpoint restores these arguments without help."""
    return all(isinstance(each, torch.Tensor) or type(each) in ATOMS for each in args) and all(
        type(each) in ATOMS for each in kwargs.values()
    )


class _Place(int):
    """Where a tensor was among the arguments of a call: its number."""


_PARTED = (_Place, tuple)


class _HasContentsError(Exception):
    """A call is given what may have changed when it is made again."""


def parted(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]] | None:
    """Take the tensors out of a call, those in tuples too, each once.

    Args:
        function: that is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        What makes the call when it is given the tensors, and holds none of them; and the tensors.
        None where the function is given something else that may have changed by then.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, _Place] = {}
    try:
        # Asked here first: most of what blocks are given besides tensors is a number or None.
        rest = [each if type(each) in ATOMS else _without(each, tensors, places) for each in args]
        named = {
            name: each if type(each) in ATOMS else _without(each, tensors, places)
            for name, each in kwargs.items()
        }
    except _HasContentsError:
        return None
    return partial(_put_together, function, rest, named), tensors


# No closures: one that calls itself is a cycle, and would hold the tensors.
def _without(value: Any, tensors: list[torch.Tensor], places: dict[int, _Place]) -> Any:
    if isinstance(value, torch.Tensor):
        place = places.get(id(value))
        if place is None:
            place = places[id(value)] = _Place(len(tensors))
            tensors.append(value)
        return place
    if type(value) is tuple:
        return tuple(_without(each, tensors, places) for each in value)
    if type(value) in ATOMS or is_opaque(value):
        return value
    raise _HasContentsError


def _put_together(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], *tensors: torch.Tensor
) -> Any:
    """Call the function with these tensors in the places of those that were taken out."""
    given = [_with(each, tensors) if type(each) in _PARTED else each for each in args]
    named = {
        name: _with(each, tensors) if type(each) in _PARTED else each
        for name, each in kwargs.items()
    }
    return function(*given, **named)


def _with(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if type(value) is _Place:
        return tensors[value]
    return tuple(_with(each, tensors) for each in value) if type(value) is tuple else value


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
            if type(value) in ATOMS or id(value) in self._containers or is_opaque(value):
                continue
            if isinstance(value, torch.Tensor):
                self._tensors[id(value)] = (value, value._version, value.requires_grad)
                continue
            content = content_of(value)
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
        again = Copies(noted, known, origin._name_of)
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
        again = Copies(self._containers, known, self._name_of)
        positional = tuple(
            now if isinstance(now, torch.Tensor) else again.of(before)
            for now, before in zip(given, args, strict=True)
        )
        return positional, {name: again.of(value) for name, value in kwargs.items()}

    def _has_changed(self) -> bool:
        return any(
            not is_same(content, content_of(value)) for value, content in self._containers.values()
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
            pending += parts_of(path, value, self._containers)
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
            f"sac_policies.checkpoint: {read[0].path} was changed in place after its region had "
            f"run, but {getattr(func, '__name__', func)} of the recomputation reads it as it was "
            f"(at {user_line()}). Change it after backward, or pass the region a copy."
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

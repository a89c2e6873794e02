"""The tensors in a call's inputs and outputs, and the putting of others in their places.

Rule 1: forward is given the caller's own lists and dicts, with other tensors in them.
Rule 2: what forward changes in one is the caller's to see. Once forward is over, whatever in it is
        still of ours is exchanged for the caller's own, wherever in it that lies by then.
Rule 3: a tuple cannot be written to and is made anew.
Rule 4: a list or dict that forward returns is the caller's, in which only what forward has made is
        exchanged; or it is copied, since the module may keep it and its weights in it.
Rule 5: one that refuses to be written to or copied is passed on as it is.

torch.compile traces all of this. That of torch 2.9 fails at `id`, so objects are looked for, at
`any` and `all` of what some generators give, and where it must tell two lists or dicts apart.
Compiled by it, one that is given twice is told of twice, and one that is returned is a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

TRACES_IDENTITY = torch.__version__ >= "2.13"
"""Whether torch.compile can tell if two lists or dicts are one; it cannot in torch 2.9."""


def tensors_in(value: Any) -> list[Tensor]:
    """Floating-point and complex tensors in tuples, lists and dicts; each list or dict once."""
    found: list[Tensor] = []
    _collect(value, found, [])
    return found


def _collect(value: Any, found: list[Tensor], seen: list[Any]) -> None:
    if isinstance(value, Tensor):
        if _is_passed(value):
            found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found, seen)
    elif isinstance(value, (list, dict)) and not _among(seen, value):
        seen.append(value)
        for _, item in _items(value):
            _collect(item, found, seen)


def _is_passed(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _among(objects: Iterable[Any], value: Any) -> bool:
    for each in objects:  # noqa: SIM110
        if _is_one(each, value):
            return True
    return False


def _is_one(value: Any, other: Any) -> bool:
    if torch.compiler.is_compiling() and not TRACES_IDENTITY:
        return False
    return value is other


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Places in a list or dict, and what is there now."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def _written(value: Any, place: Any, item: Any) -> bool:
    """Write to a list or dict, unless it refuses, in whatever words."""
    try:
        value[place] = item
    except Exception:
        return False
    return True


def _made_anew(value: Any, items: list[Any]) -> Any:
    """A tuple of the same class with these items."""
    kind = type(value)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _is_exchanged(value: Any) -> bool:
    """Whether it is a tensor that is passed, or a tuple that leads to one by tuples alone."""
    if isinstance(value, Tensor):
        return _is_passed(value)
    if isinstance(value, tuple):
        for item in value:
            if _is_exchanged(item):
                return True
    return False


def _same(value: Any, other: Any) -> bool:
    """Whether two are one object, or tuples of the same: these have no identity when traced."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        if len(value) != len(other):
            return False
        for item, counterpart in zip(value, other, strict=True):  # noqa: SIM110
            if not _same(item, counterpart):
                return False
        return True
    return value is other


class GivenInputs:
    """What one call was given in place of its inputs.

    Attributes:
        tensors: in the place of `tensors_in` the inputs.
        session: whose hooks gave them.
        outer: what another session had given before, as inputs to this one.
        containers: lists and dicts in the inputs, each once.
    """

    def __init__(
        self, tensors: list[Tensor], session: int, outer: GivenInputs | None = None
    ) -> None:
        self.tensors, self.session, self.outer = tensors, session, outer
        self.containers: list[Any] = []
        self._changed: list[dict[Any, tuple[Any, Any]]] = []
        self._pairs: list[tuple[Any, Any]] = []

    def exchanged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs with these tensors in them (Rules 1 and 3)."""
        fresh = list(self.tensors)
        given = tuple([self._exchange(item, fresh) for item in args])
        return given, {key: self._exchange(item, fresh) for key, item in kwargs.items()}

    def _exchange(self, value: Any, fresh: list[Tensor]) -> Any:
        if isinstance(value, (list, dict)) and not _among(self.containers, value):
            self._write(value, fresh)
        new: Any = value
        if isinstance(value, tuple):
            items = [self._exchange(item, fresh) for item in value]
            new = _made_anew(value, items) if _is_exchanged(value) else value
        elif _is_exchanged(value):
            new = fresh.pop(0)
        if _is_exchanged(value):
            self._pairs.append((new, value))
        return new

    def _write(self, container: Any, fresh: list[Tensor]) -> None:
        changed: dict[Any, tuple[Any, Any]] = {}
        self.containers.append(container)
        self._changed.append(changed)
        for place, item in _items(container):
            new = self._exchange(item, fresh)
            if _is_exchanged(item) and _written(container, place, new):
                changed[place] = (new, item)

    def put_back(self) -> None:
        """Give the caller's lists and dicts their own tensors back (Rule 2)."""
        for container, changed in zip(self.containers, self._changed, strict=True):
            for place, item in _items(container):
                if not _is_exchanged(item):
                    continue
                likely = [changed[place]] if place in changed else []
                for new, own in (*likely, *self._pairs):
                    if _same(new, item):
                        _written(container, place, own)
                        break
        if self.outer is not None:
            self.outer.put_back()

    def was_given(self, item: Any) -> bool:
        """Whether it is the caller's own and something was given in its place."""
        for _, own in self._pairs:
            if _same(own, item):
                return True
        return self.outer is not None and self.outer.was_given(item)


def outputs_with(output: Any, fresh: list[Tensor], given: GivenInputs) -> Any:
    """An output with these tensors in the place of `tensors_in` it (Rules 3 to 5)."""
    return _exchange_output(output, list(fresh), given, [])


def _exchange_output(
    value: Any, fresh: list[Tensor], given: GivenInputs, made: list[list[Any]]
) -> Any:
    if isinstance(value, Tensor):
        return fresh.pop(0) if _is_passed(value) else value
    if not isinstance(value, (tuple, list, dict)) or not tensors_in(value):
        return value
    if isinstance(value, tuple):
        return _made_anew(value, [_exchange_output(item, fresh, given, made) for item in value])
    for known, copied in made:
        if _is_one(known, value):
            return copied
    entry = [value, value]
    made.append(entry)
    changes = [
        (place, item, _exchange_output(item, fresh, given, made))
        for place, item in _items(value)
        if tensors_in(item)
    ]
    entry[1] = _with_items(value, changes, given)
    return entry[1]


def _with_items(value: Any, changes: list[tuple[Any, Any, Any]], given: GivenInputs) -> Any:
    """A list or dict with new in the place of old: the caller's own (Rule 4), or a copy."""
    if _among(given.containers, value):
        for place, old, new in changes:
            if not isinstance(old, nn.Parameter) and not given.was_given(old):
                _written(value, place, new)
        return value
    plain = type(value) in (list, dict)  # torch.compile traces their own copies only
    try:
        copied = value.copy() if plain else copy.copy(value)
    except Exception:  # of a class that has no copy, in whatever words
        return value
    written = [_written(copied, place, new) for place, _, new in changes]
    return copied if all(written) else value

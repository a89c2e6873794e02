"""Note what Python objects hold, and put it back.

Noted are the attributes of modules, containers and generators in them, objects of the packages
that the modules are from, and variables that forwards, hooks, losses and steps close over or name.
The packages of objects that a loss or step names, such as a trainer's, count too. A container is
noted by its elements, not by their contents: those are noted too if they can change. Objects of
other packages, such as process groups, are left alone: half of their state, put back, would not fit
the other half. The state of optimizers is left alone since their steps change nothing.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._errors import BudgetError
from .._torch_compat._module_calls import CALL_PLACES
from . import _functions as functions

_ENGINES = ("torch.distributed", "torch.nn.parallel")
"""Modules of these packages have state in C++ that must fit their attributes."""
_SHARED_BY_ALL = frozenset({"torch", "numpy", "", *sys.stdlib_module_names}) - {"__main__"}
"""Packages of which no object is noted."""
_OF_LOOPS = (LRScheduler, torch.amp.GradScaler)
"""Objects of torch that a step may change."""
_MOST = 10_000
"""Elements of a container that are looked into: a data set may have many more."""


class Objects:
    """What objects hold at one time.

    Args:
        roots: modules, functions, containers.

    Raises:
        BudgetError: a module of `roots` has an iterator.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}
        roots = list(roots)
        modules = [each for root in roots if isinstance(root, nn.Module) for each in root.modules()]
        functions = [each for each in roots if not isinstance(each, nn.Module)]
        self._packages = {_package(type(each)) for each in modules} | {
            _package(each) for each in functions
        }
        self._packages -= _SHARED_BY_ALL
        waiting: list[Any] = [*modules, *functions]
        for each in functions:
            waiting += self._named_by(each)
        while waiting:
            value = waiting.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                waiting += self._note(value)

    @property
    def seen(self) -> list[Any]:
        """The modules, functions, containers and other objects that were found."""
        return list(self._seen.values())

    def _named_by(self, function: Any) -> list[Any]:
        """Return the objects that a function of the user closes over or names."""
        objects = [each for each in functions.named_by(function) if hasattr(each, "__dict__")]
        self._packages |= {_package(type(each)) for each in objects} - _SHARED_BY_ALL
        return objects

    def put_back(self) -> None:
        """Put back what the objects held."""
        for undo in self._undo:
            undo()

    def _note(self, value: Any) -> Iterable[Any]:
        """Note one object; return what is in it."""
        if isinstance(value, nn.Module):
            return () if _is_engine(value) else self._note_module(value)
        if isinstance(value, (FunctionType, MethodType, partial)):
            return self._note_function(value)
        if isinstance(value, (dict, list, set, deque, tuple)):
            return self._note_container(value)
        if isinstance(value, Optimizer):
            return [value.param_groups]
        restore = _generator_state(value)
        arrays: Any = getattr(sys.modules.get("numpy"), "ndarray", ())
        if restore is not None:
            self._undo.append(restore)
        elif isinstance(value, arrays):
            self._undo.append(partial(_copy_array, value, value.copy()))
        elif self._is_own(value):
            return self._note_attributes(value)
        return ()

    def _is_own(self, value: Any) -> bool:
        """Whether a value is an object, no class or tensor, of the packages of the modules."""
        is_object = hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor))
        is_known = _package(type(value)) in self._packages or isinstance(value, _OF_LOOPS)
        return is_object and is_known

    def _note_module(self, module: nn.Module) -> list[Any]:
        # Sharding swaps parameters of its own types, and knows by itself which are in place.
        kinds = {type(each) for each in module._parameters.values()}
        is_plain = kinds <= {nn.Parameter, type(None)}
        left_out = CALL_PLACES if is_plain else CALL_PLACES | {"_parameters"}
        for name, value in vars(module).items():
            if isinstance(value, Iterator):
                raise BudgetError(
                    f"sac_policies: attribute {name!r} of a {type(module).__name__} is a "
                    f"{type(value).__name__}, but the position of an iterator cannot be restored "
                    "after a measured step. Keep a list and an index instead."
                )
        found = self._note_attributes(module, left_out)
        self._packages |= {_package(type(module))} - _SHARED_BY_ALL
        for kind in type(module).__mro__:
            if _package(kind) in self._packages:
                held = {name: each for name, each in vars(kind).items() if _is_plain(each)}
                self._undo.append(partial(_put_names, vars(kind), held, partial(setattr, kind)))
                found += [*held.values(), vars(kind).get("forward")]
        return found

    def _note_attributes(self, value: Any, left_out: frozenset[str] = frozenset()) -> list[Any]:
        attributes = vars(value)
        held = {name: each for name, each in attributes.items() if name not in left_out}
        self._undo.append(partial(_put_attributes, attributes, held, left_out))
        return list(held.values())

    def _note_container(self, value: Any) -> Iterable[Any]:
        if isinstance(value, dict):
            items = list(value.items())
            self._undo.append(partial(_put_items, value, items))
            return [each for _, each in items[:_MOST]]
        held = list(value)
        if not isinstance(value, tuple):
            self._undo.append(partial(_put_elements, value, held))
        return held[:_MOST]

    def _note_function(self, value: Any) -> list[Any]:
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if _package(value) == "torch":
            return []
        found = functions.defaults(value)
        for cell in value.__closure__ or ():
            content = functions.content(cell)
            if content is not functions.MISSING:
                self._undo.append(partial(_put_content, cell, content))
                found.append(content)
        named = functions.named_globals(value)
        held = {name: each for name, each in named.items() if _is_plain(each)}
        globals_ = value.__globals__
        self._undo.append(partial(_put_names, globals_, held, globals_.__setitem__))
        return [*found, *held.values()]


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


def _is_engine(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_ENGINES)


def _is_plain(value: Any) -> bool:
    """Whether code may change it: a number, a container, a tensor, a generator."""
    kinds = (int, float, str, type(None), dict, list, set, deque, torch.Tensor)
    return isinstance(value, kinds) or _generator_state(value) is not None


def _put_content(cell: CellType, content: Any) -> None:
    if functions.content(cell) is not content:
        cell.cell_contents = content


def _put_names(
    names: Mapping[str, Any], held: dict[str, Any], put: Callable[[str, Any], None]
) -> None:
    for name, value in held.items():
        if names.get(name, functions.MISSING) is not value:
            put(name, value)


def _put_attributes(
    attributes: dict[str, Any], held: dict[str, Any], left_out: frozenset[str]
) -> None:
    for name in [name for name in attributes if name not in held and name not in left_out]:
        del attributes[name]
    _put_names(attributes, held, attributes.__setitem__)


def _put_items(value: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    now = list(value.items())
    if len(now) == len(items) and all(
        a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)
    ):
        return
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    kind.clear(value)  # a subclass may refuse
    for key, each in items:
        kind.__setitem__(value, key, each)


def _put_elements(value: Any, held: list[Any]) -> None:
    now = list(value)
    if len(now) == len(held) and all(a is b for a, b in zip(now, held, strict=True)):
        return
    value.clear()
    value.update(held) if isinstance(value, set) else value.extend(held)


def _copy_array(array: Any, before: Any) -> None:
    if array.shape == before.shape and array.flags.writeable:
        array[...] = before


def _generator_state(value: Any) -> Callable[[], object] | None:
    """Return a function that puts back a generator's present state; None for other objects."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    numbers = getattr(sys.modules.get("numpy"), "random", None)
    if numbers is not None and isinstance(value, numbers.Generator):
        bits = value.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if numbers is not None and isinstance(value, numbers.RandomState):
        return partial(value.set_state, value.get_state())
    return None

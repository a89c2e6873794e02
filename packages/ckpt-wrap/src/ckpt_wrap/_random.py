"""Sources of random numbers: those of the process, of devices, and generators that code holds.

The states of Python's and NumPy's generators take long to read: 20 and 70 us. So their memory is
compared with that of the last reading; it changes with each number that is drawn.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A source of random numbers, by functions that read and set its state."""

    state: Callable[[], Any]
    set_state: Callable[[Any], Any]


class _Remembered:
    """The state of a Mersenne Twister, read again only if its memory has changed.

    Args:
        read: returns the state.
        write: sets it.
        memory: returns a value that differs after each number that is drawn, or None.
        is_known: whether a state with the same memory is the same state. None: always.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        memory: Callable[[], Any],
        is_known: Callable[[Any], bool] | None = None,
    ) -> None:
        self._read = read
        self._write = write
        self._memory = memory
        self._is_known = is_known
        self._last: tuple[Any, Any] = (None, None)  # memory and state

    def state(self) -> Any:
        memory = self._memory()
        seen, state = self._last
        known = memory is not None and memory == seen
        if not known or (self._is_known is not None and not self._is_known(state)):
            state = self._read()
            self._last = (memory, state)
        return state

    def set_state(self, state: Any) -> None:
        if self.state() is not state:
            self._write(state)
            self._last = (self._memory(), state)


def _python() -> Source:
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
    memory = functools.partial(_memory_of, generator) if _has_memory() else lambda: None
    remembered = _Remembered(random.getstate, random.setstate, memory)
    return Source(remembered.state, remembered.set_state)


_HEADER = object.__basicsize__
_WORDS = random.Random.__base__.__basicsize__ - _HEADER  # type: ignore[union-attr]


def _memory_of(generator: random.Random) -> tuple[bytes, Any]:
    """The state in memory: what CPython keeps in C, and the second number of `gauss`."""
    return ctypes.string_at(id(generator) + _HEADER, _WORDS), generator.gauss_next  # type: ignore[attr-defined]


def _has_memory() -> bool:
    if sys.implementation.name != "cpython":
        return False
    tried = random.Random(0)
    state, before = tried.getstate(), _memory_of(tried)
    tried.random()
    changes = _memory_of(tried) != before
    tried.setstate(state)
    return changes and _memory_of(tried) == before


def _numpy(module: Any) -> Source:
    get = functools.partial(module.get_state, legacy=False)
    # The second number of a normal draw is kept elsewhere: a state that has none is known.
    memory = functools.partial(_numpy_memory, module)
    remembered = _Remembered(get, module.set_state, memory, lambda state: not state["has_gauss"])
    return Source(remembered.state, remembered.set_state)


def _numpy_memory(module: Any) -> Any:
    get = getattr(module, "get_bit_generator", None)  # NumPy 1.24
    generator: Any = None if get is None else get()
    if type(generator) is not module.MT19937:
        return None
    address = generator.ctypes.state_address
    return address, ctypes.string_at(address, 4 * 624 + 4)  # the words, and the position


_CPU = Source(torch.default_generator.get_state, torch.default_generator.set_state)
_of_process = functools.cache(lambda: _python())
_of_numpy = functools.cache(_numpy)


@functools.cache
def _of_device(device: torch.device) -> Source:
    api = torch.get_device_module(device)
    # There is one mps device, and its functions take no device argument.
    which = () if device.type == "mps" else (device,)
    return Source(lambda: api.get_rng_state(*which), lambda state: api.set_rng_state(state, *which))


def sources(devices: Iterable[torch.device], generators: Iterable[Any]) -> list[Source]:
    """Sources of the process, of these devices, and these generators.

    NumPy counts once the program has imported its random numbers.
    """
    found = [_CPU, _of_process()]
    module = sys.modules.get("numpy.random")
    if module is not None:
        found.append(_of_numpy(module))
    found += map(_of_device, devices)
    found += [source for one in generators if (source := source_of(one)) is not None]
    return found


def source_of(value: Any) -> Source | None:
    """The source that a value is: a generator of torch, Python or NumPy."""
    kind: Any = type(value)
    names = _names(kind)
    if names is None:
        return None
    if len(names) == 1:  # NumPy's new generators hold the one with the state
        held: Any = getattr(value, names[0])
        return Source(lambda: held.state, lambda state: setattr(held, "state", state))
    return Source(getattr(value, names[0]), getattr(value, names[1]))


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...] | None:
    if issubclass(kind, torch.Generator):
        return ("get_state", "set_state")
    if issubclass(kind, random.Random):
        return ("getstate", "setstate")
    if kind.__module__.startswith("numpy.random"):
        known = {"Generator": ("bit_generator",), "RandomState": ("get_state", "set_state")}
        return known.get(kind.__name__)
    return None


# Callers pass any class, which mypy does not accept as hashable.
_names: Callable[[Any], tuple[str, ...] | None] = _names_of

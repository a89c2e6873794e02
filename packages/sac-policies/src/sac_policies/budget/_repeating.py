"""Finds the modules that repeat, the blocks a model is a stack of, and watches what they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .._tensors import tensors_in
from .._torch_compat import lies_in_storage
from .._watching_mode import WatchingMode
from ..policies._builders import save_ops
from ..policies._catalogue import ATTENTION, CONVOLUTIONS, MATMULS
from ..policies._decisions import Decision

_COSTLY = save_ops(MATMULS, ATTENTION, CONVOLUTIONS)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeating(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Return the outermost modules of which a container has several of one class, by path.

    Others of these classes are found with them, wherever they are. Modules without children do not
    count, nor do containers: their blocks do. Where no container has any, a parent with several of
    one class will do; else the model is one region.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(8, 2)
        >>> [path for path, _ in repeating(nn.Sequential(nn.Linear(8, 8), block(), block()))]
        ['1', '2']
    """
    found = tuple(_below("", model, _CONTAINERS)) or tuple(_below("", model, nn.Module))
    kinds = {type(module) for _, module in found}
    return tuple(_outermost("", model, lambda module: type(module) in kinds)) or (("", model),)


def called_again(model: nn.Module, run: Callable[[], object]) -> tuple[tuple[str, nn.Module], ...]:
    """Return the outermost modules that one step calls more than once, by path.

    A model that shares its layers has one for all of them. Modules without children do not count.
    """
    calls: Counter[nn.Module] = Counter()

    def count(module: nn.Module, _: Any) -> None:
        calls[module] += 1

    handles = [
        module.register_forward_pre_hook(count) for module in model.modules() if _is_block(module)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(_outermost("", model, lambda module: calls[module] > 1))


def _outermost(
    path: str, module: nn.Module, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if wanted(child):
            yield below, child
        else:
            yield from _outermost(below, child, wanted)


def _below(path: str, module: nn.Module, parents: Any) -> Iterator[tuple[str, nn.Module]]:
    children = list(module.named_children())
    counts = Counter(
        type(child) for _, child in children if isinstance(module, parents) and _is_block(child)
    )
    for name, child in children:
        below = f"{path}.{name}" if path else name
        if counts[type(child)] > 1:
            yield below, child
        else:
            yield from _below(below, child, parents)


def _is_block(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return has_children and not isinstance(module, _CONTAINERS)


class Seen(WatchingMode):
    """Notes what runs in each region, and in which order regions begin.

    Attributes:
        operators: by path, the costly operators that ran there.
        wrote: by path, names of the buffers that the region wrote to; None where it put another
            tensor in the place of one.
        rewrites: paths of regions that wrote to tensors that they were given.
    """

    def __init__(self, regions: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.operators: dict[str, dict[Any, None]] = {}
        self.wrote: dict[str, tuple[str, ...] | None] = {}
        self.rewrites: set[str] = set()
        self._inside: list[str] = []
        self._given: list[list[tuple[torch.Tensor, int]]] = []
        self._regions = regions

    def __enter__(self) -> Seen:
        self._handles = []
        self._before = {path: _buffers(module) for path, module in self._regions}
        for path, module in self._regions:
            begin, end = partial(self._begin, path), partial(self._end, path)
            self._handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        for path, module in self._regions:
            self.wrote[path] = _changed(self._before[path], _buffers(module))

    def _begin(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.operators.setdefault(path, {})
        self._inside.append(path)
        given = (each for each in tensors_in((args, kwargs)) if not each.is_inference())
        self._given.append([(each, each._version) for each in given])

    def _end(self, path: str, *_: Any) -> None:
        self._inside.pop()
        if any(each._version != version for each, version in self._given.pop()):
            self.rewrites.add(path)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside and _COSTLY.constant(func) is Decision.SAVE:
            self.operators[self._inside[-1]][func] = None
        return func(*args, **(kwargs or {}))


Buffers = dict[str, tuple[torch.Tensor, int, torch.Tensor]]
"""By name: the buffer, its version, a copy of it; batch norm writes and counts no version."""


def _buffers(module: nn.Module) -> Buffers:
    buffers = [(name, each) for name, each in module.named_buffers() if not each.is_inference()]
    return {name: (each, each._version, each.clone()) for name, each in buffers}


def _changed(before: Buffers, now: Buffers) -> tuple[str, ...] | None:
    if before.keys() != now.keys() or any(before[name][0] is not now[name][0] for name in now):
        return None
    return tuple(name for name in now if _is_other(before[name], now[name]))


def _is_other(
    one: tuple[torch.Tensor, int, torch.Tensor], other: tuple[torch.Tensor, int, torch.Tensor]
) -> bool:
    # Of sparse buffers torch compares nothing; versions tell of what writes to them.
    return one[1] != other[1] or (lies_in_storage(one[2]) and not torch.equal(one[2], other[2]))

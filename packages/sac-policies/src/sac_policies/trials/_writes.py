"""Copy memory from before a step when the step first writes to it.

The mode does not need a list of tensors: a storage that no operator of the step made is from
before, whether a module, a gradient, an optimizer or a closure holds it. What is not written is not
copied. Compiled code is not seen, so memory that it may write to is copied in advance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._tensors import tensors_in
from .._torch_compat import is_fake, storage_under
from .._torch_compat._dispatch import is_wrapper
from .._watching_mode import WatchingMode
from ..policies._operators import BATCH_NORMS, STATISTICS, facts_of

_COLLECTIVE_NAMESPACES = frozenset({"c10d", "fsdp"})
"""Namespaces of operators that write to their arguments, which not all of their schemas say."""


class Writes(WatchingMode):
    """The memory from before a step that the step writes to, and copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self._before = WeakIdKeyDictionary()
        self._made = WeakIdKeyDictionary()

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the memory of tensors, unless the step made it or it is copied already."""
        for part in _parts(tensors):
            storage = storage_under(part)
            if storage is None or is_fake(part) or not storage.nbytes():
                continue
            if storage not in self._made and storage not in self._before:
                self._before[storage] = _content(storage).clone()

    def put_back(self) -> None:
        """Write the copies back; memory that was freed or resized since is left out."""
        for storage, before in list(self._before.items()):
            if storage.nbytes() == before.numel():
                _content(storage).copy_(before)

    def forget_unchanged(self) -> None:
        """Drop the copies of memory that still has their bits."""
        for storage, before in list(self._before.items()):
            if storage.nbytes() == before.numel() and torch.equal(_content(storage), before):
                del self._before[storage]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.copy(_written(func, args, kwargs))
        out = func(*args, **kwargs)
        results = [each for each in map(storage_under, _parts(tensors_in(out))) if each is not None]
        if results:
            given = {id(storage_under(each)) for each in _parts(tensors_in((args, kwargs)))}
            self._made.update((each, None) for each in results if id(each) not in given)
        return out


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call may write to."""
    if getattr(op, "namespace", "") in _COLLECTIVE_NAMESPACES:
        return tensors_in((args, kwargs))
    if op in BATCH_NORMS:
        return tensors_in(args[STATISTICS])
    return facts_of(op).written(args, kwargs)


def _parts(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors with memory: for wrappers, such as DTensors, those inside."""
    for tensor in tensors:
        if is_wrapper(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _parts(getattr(tensor, name) for name in names)
        else:
            yield tensor


@torch.no_grad()
def _content(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""Which operator call made a tensor's storage, so that a name can be kept there."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch_compat import StorageReference, alias, lies_in_storage, storage_key
from ._regions import Key

_Made = tuple[Key, Any, int, StorageReference]


class Producers:
    """Storage to the last call that made or wrote it, for one forward.

    Keeping a named tensor under the call that made its storage lets the recomputation skip
    that call; keeping only the tensor would run the call again for nothing. A storage that is gone
    is referred to still, so that none is made in its place that no call made.
    """

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}

    def note(self, key: Key, out: Any, drawn: int) -> None:
        """Remember the call `key` as the maker of every tensor in `out` that lies in a storage."""
        if isinstance(out, torch.Tensor):
            if not lies_in_storage(out):
                return
            geometry = (out.shape, out.stride(), out.storage_offset())
            self._made[storage_key(out)] = (key, geometry, drawn, StorageReference(out))
            return
        tensors = [x for x in out if isinstance(x, torch.Tensor) and lies_in_storage(x)]
        whole = type(out)(alias(x) if isinstance(x, torch.Tensor) else x for x in out)
        for each in tensors:
            self._made[storage_key(each)] = (key, _Whole(whole), drawn, StorageReference(each))

    def find(self, tensor: torch.Tensor) -> tuple[Key, Any, int] | None:
        """Return (call, its whole output, its draw number); None for a region's input."""
        made = self._made.get(storage_key(tensor))
        if made is None:
            return None
        key, how, drawn, _ = made
        if isinstance(how, _Whole):
            return key, how.output, drawn
        with torch.no_grad():
            return key, torch.as_strided(tensor.detach(), *how), drawn


class _Whole:
    """All outputs of an operator with several; they live until the forward ends."""

    def __init__(self, output: Any) -> None:
        self.output = output

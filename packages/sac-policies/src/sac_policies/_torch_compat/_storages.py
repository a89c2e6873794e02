"""Which storage a tensor lies in."""

from __future__ import annotations

from typing import Any

import torch

_WEAK: Any = getattr(
    getattr(torch.multiprocessing, "reductions", None), "StorageWeakRef", lambda storage: None
)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors of one living storage share, and no others.

    Without the name behind it the address of the data, which empty tensors share.
    """
    return _key_of(tensor.untyped_storage())


def _key_of(storage: torch.UntypedStorage) -> int:
    key: int = getattr(storage, "_cdata", None) or storage.data_ptr()
    return key


class StorageReference:
    """Tells whether a tensor lies in the storage that another one lay in; keeps no bytes alive.

    Lost without torch's weak references: where that storage was freed, one that was made in its
    place is taken for it.
    """

    __slots__ = ("_key", "_weak")

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._weak = _WEAK(storage)  # nothing takes its place while this lives
        self._key = _key_of(storage)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in that storage."""
        return storage_key(tensor) == self._key

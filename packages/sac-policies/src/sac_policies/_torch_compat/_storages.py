"""Which storage a tensor lies in."""

from __future__ import annotations

from typing import Any

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors of one living storage share, and no others.

    Without the name behind it the address of the data, which empty tensors share. A tensor that
    lies in no storage has a number of its own.
    """
    try:
        return _key_of(tensor.untyped_storage())
    except NotImplementedError:
        return -id(tensor)


def storage_under(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage that a tensor lies in, None where it lies in none."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the size of the storage that a tensor lies in, or of what it is made of instead."""
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return sum(each.nbytes for each in _parts(tensor)) or tensor.numel() * tensor.element_size()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    names = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
    found = []
    for name in names:
        try:
            found.append(getattr(tensor, name)())
        except RuntimeError:  # of another layout
            continue
    return found


def lies_in_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in its storage by strides, to be read and taken views of.

    Not those of sparse tensors, of oneDNN's, of nested ones, and of the zeros that forward
    derivatives are made of. Lost without the name behind it: those end in an error of torch's.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not _has_no_data(tensor)


_has_no_data: Any = getattr(torch.Tensor, "_is_zerotensor", lambda tensor: False)


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor was freed, as FSDP frees parameters after a unit's forward.

    Reading such a tensor is a segmentation fault.
    """
    try:
        is_empty = not tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return False
    return is_empty and tensor.numel() > 0 and type(tensor) in _PLAIN


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors whose elements lie in their own storage."""


def _key_of(storage: torch.UntypedStorage) -> int:
    key: int = getattr(storage, "_cdata", None) or storage.data_ptr()
    return key

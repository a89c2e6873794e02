"""The storage of a tensor."""

from __future__ import annotations

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number shared by exactly the tensors of one living storage.

    A tensor without a storage has a unique number.
    """
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return -id(tensor)


def storage_under(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, None if it has none."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's storage, or of its parts."""
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:
        return sum(each.nbytes for each in _parts(tensor)) or tensor.numel() * tensor.element_size()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Yield the dense tensors of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    names = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
    found = []
    for name in names:
        try:
            found.append(getattr(tensor, name)())
        except RuntimeError:  # another layout
            continue
    return found


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor was freed, as FSDP frees parameters after a unit's forward.

    Reading such a tensor is a segmentation fault.
    """
    if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) not in _PLAIN:
        return False
    return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors whose elements lie in their own storage."""

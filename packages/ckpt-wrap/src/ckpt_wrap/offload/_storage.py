"""Views of a storage, and the bytes of a storage as one flat tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor reads its storage; stride and offset count elements."""

    kind: type[torch.Tensor]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor this view was taken from, over the bytes of `flat`."""
        tensor = torch.empty(0, dtype=self.dtype, device=flat.device)
        tensor.set_(flat.untyped_storage(), self.offset, self.size, self.stride)
        return tensor if self.kind is torch.Tensor else tensor.as_subclass(self.kind)


def view_of(tensor: torch.Tensor) -> View:
    """The view a plain tensor is."""
    kind = torch.Tensor if isinstance(tensor, torch.nn.Parameter) else type(tensor)
    return View(kind, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage, as one uint8 tensor that shares them."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's storage; 0 for one without memory, such as a zero tangent."""
    storage = tensor.untyped_storage()
    try:
        return storage.nbytes() if storage.data_ptr() else 0
    except RuntimeError:  # torch's error for a storage that has no memory
        return 0


def forget_bytes(tensor: torch.Tensor) -> None:
    """Release the storage of a detached tensor, which keeps its shared version counter."""
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a `View` and the bytes of the storage describe the tensor completely."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def split(tensor: Any) -> tuple[dict[str, torch.Tensor], Any] | None:
    """Inner tensors and context of a tensor subclass, or None if it has no `__tensor_flatten__`."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context

"""Parameters and gradients as views of a flat buffer.

They are used for whole parameters in one process (`flatten`, `FlatParamHandle`) and for one rank's
pieces (`fully_shard`). Gaps of a buffer are always zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage, nn

from ..layout._layout import FlatLayout

# Device types for which a storage pointer is the address of its first byte.
_ADDRESSED = ("cpu", "cuda", "xpu")


@torch.no_grad()
def move_into(params: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Copy parameters into views of a buffer, which become their memory.

    One by one, so that only one is in memory twice: the system provides the pages of a large CPU
    buffer at first touch.
    """
    for param, view in zip(params, views, strict=True):
        view.copy_(param)
        param.data = view


def allocate(layout: FlatLayout, *, device: torch.device) -> Tensor:
    """Allocate an uninitialised buffer for a layout, with zeros in its gaps."""
    return zero_gaps_(torch.empty(layout.numel, dtype=layout.dtype, device=device), layout)


def zero_gaps_(buffer: Tensor, layout: FlatLayout) -> Tensor:
    """Zero every element that belongs to no parameter, in place, and return the buffer."""
    for start, stop in layout.gaps:
        buffer[start:stop].zero_()
    buffer[layout.numel :].zero_()
    return buffer


def param_views(buffer: Tensor, layout: FlatLayout) -> tuple[Tensor, ...]:
    """Each parameter's view, with its shape and stride, in layout order; outside autograd.

    Args:
        buffer: at least `(layout.numel,)`, contiguous; may itself be a slice.
        layout: where the parameters are.
    """
    flat, first = buffer.detach(), buffer.storage_offset()
    pairs = zip(layout.specs, layout.offsets, strict=True)
    return tuple([flat.as_strided(spec.shape, spec.stride, first + at) for spec, at in pairs])


def over(memory: UntypedStorage, view: Tensor) -> Tensor:
    """Return a tensor like a view, with a storage that is only the view's part of the memory.

    Names whose tensors share a storage count as tied in torch.save, safetensors, transformers and
    accelerate. The part keeps the whole buffer alive. The view itself is returned for storages
    without an address, and in shared memory, which processes share as whole storages.

    Args:
        memory: a storage that begins where the view's storage begins.
        view: dense.
    """
    kind = memory.device.type
    if kind not in _ADDRESSED or (kind == "cpu" and memory.is_shared()):
        return view
    start = view.storage_offset() * view.itemsize
    part = memory[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())


def unflatten(vector: Tensor, layout: FlatLayout) -> dict[str, Tensor]:
    """Return all parameters as differentiable views of a vector, by name; works under `torch.vmap`.

    Args:
        vector: at least `(layout.numel,)`; its values in gaps are ignored.
        layout: places of the parameters.

    Example:
        >>> import torch
        >>> from flat_param.plan import ParamSpec, plan_layout
        >>> layout = plan_layout([ParamSpec("w", (2, 2), torch.float32)])
        >>> unflatten(torch.arange(4.0), layout)["w"].tolist()
        [[0.0, 1.0], [2.0, 3.0]]
    """
    sizes = [size for size, _ in layout.pieces]
    rest = vector.numel() - layout.numel
    pieces = vector.split([*sizes, rest] if rest else sizes)  # one backward node instead of many
    params = [piece for piece, (_, index) in zip(pieces, layout.pieces, strict=False) if index >= 0]
    found = {}
    for spec, elements in zip(layout.specs, params, strict=True):
        order = outer_first(spec.stride)
        sizes = [spec.shape[dim] for dim in order]
        found[spec.name] = elements.view(sizes).permute(inverse(order))
    return found


def memory_order(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """A tensor's elements, 1-D, in the order of memory with a stride; a view if possible.

    Example:
        >>> import torch
        >>> memory_order(torch.tensor([[1, 2], [3, 4]]), (1, 2)).tolist()
        [1, 3, 2, 4]
    """
    if tensor.is_contiguous() and tensor.stride() == stride:
        return tensor.reshape(-1)
    return tensor.permute(outer_first(stride)).reshape(-1)


def outer_first(stride: Sequence[int]) -> list[int]:
    """Return the dimensions in the order of memory, slowest first."""
    return sorted(range(len(stride)), key=lambda dim: (-stride[dim], dim))


def inverse(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)

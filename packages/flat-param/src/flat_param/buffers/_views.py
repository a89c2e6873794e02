"""Parameters as views of a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from ..layout._layout import FlatLayout
from ..layout._spec import ParamSpec

# Devices on which what a storage points to is, or is not, the address of its first byte.
_ADDRESSED = {"cpu": True, "cuda": True, "xpu": True, "meta": False, "mps": False}


def param_view(buffer: Tensor, layout: FlatLayout, index: int) -> Tensor:
    """One parameter's view, with its own shape and stride; outside autograd.

    Args:
        buffer: at least `(layout.numel,)`, contiguous; may itself be a slice.
        layout: where the parameters lie.
        index: position of the parameter in `layout.specs`.
    """
    spec = layout.specs[index]
    start = buffer.storage_offset() + layout.offsets[index]
    return buffer.detach().as_strided(spec.shape, spec.stride, start)


def param_views(buffer: Tensor, layout: FlatLayout) -> tuple[Tensor, ...]:
    """All parameters' views, in layout order; see `param_view`."""
    return tuple(param_view(buffer, layout, index) for index in range(len(layout.specs)))


def over(memory: UntypedStorage, view: Tensor) -> Tensor:
    """A tensor like a view, with a storage of its own that is the view's stretch of memory.

    The stretch keeps all of the memory alive. Where there is no memory (meta), or what a storage
    points to is not its address, the view itself is given back.

    Args:
        memory: a storage that begins where the view's storage begins.
        view: dense.
    """
    if not _is_addressed(memory.device):
        return view
    start = view.storage_offset() * view.itemsize
    tensor_slice = memory[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(tensor_slice, 0, view.shape, view.stride())


def _is_addressed(device: torch.device) -> bool:
    """Whether a stretch of a storage is the memory that it says; of an unknown kind, tried once."""
    known = _ADDRESSED.get(device.type)
    if known is None:
        known = _ADDRESSED[device.type] = _shares_stretches(device)
    return known


def _shares_stretches(device: torch.device) -> bool:
    whole = torch.arange(64, dtype=torch.uint8, device=device)
    try:
        stretch = whole.new_empty(0).set_(whole.untyped_storage()[16:32], 0, (16,), (1,))
        whole.add_(1)
        return stretch.tolist() == list(range(17, 33))
    except (RuntimeError, NotImplementedError):
        return False


def unflatten(vector: Tensor, layout: FlatLayout) -> dict[str, Tensor]:
    """All parameters as differentiable views of a vector, by name; works under `torch.vmap`.

    Args:
        vector: at least `(layout.numel,)`; what it holds in gaps is ignored.
        layout: where the parameters lie.

    Example:
        >>> import torch
        >>> from flat_param.plan import ParamSpec, plan_layout
        >>> layout = plan_layout([ParamSpec("w", (2, 2), torch.float32)])
        >>> unflatten(torch.arange(4.0), layout)["w"].tolist()
        [[0.0, 1.0], [2.0, 3.0]]
    """
    sizes = [size for size, _ in layout.pieces]
    rest = vector.numel() - layout.numel
    pieces = vector.split([*sizes, rest] if rest else sizes)  # one node in the backward, not many
    params = [piece for piece, (_, index) in zip(pieces, layout.pieces, strict=False) if index >= 0]
    named = zip(layout.specs, params, strict=True)
    return {spec.name: _in_shape(elements, spec) for spec, elements in named}


def memory_order(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """A tensor's elements as a 1-D tensor, numbered as `_spec` Rule 3 says; a view if it can be.

    Args:
        tensor: of the spec's shape, of any stride.
        spec: whose stride gives the order.

    Example:
        >>> import torch
        >>> spec = ParamSpec("w", (2, 2), torch.float32, (1, 2))
        >>> memory_order(torch.tensor([[1, 2], [3, 4]]), spec).tolist()
        [1, 3, 2, 4]
    """
    return tensor.permute(outer_first(spec)).reshape(-1)


def _in_shape(elements: Tensor, spec: ParamSpec) -> Tensor:
    order = outer_first(spec)
    sizes = [spec.shape[dim] for dim in order]
    return elements.view(sizes).permute(inverse(order))


def outer_first(spec: ParamSpec) -> list[int]:
    """The dimensions in the order in which memory runs through them, slowest first."""
    return sorted(range(len(spec.shape)), key=lambda dim: (-spec.stride[dim], dim))


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)

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


class ParamViews:
    """Parameters whose memory is in one buffer. Parameter objects stay the same.

    Args:
        params: in the order of `views`.
        views: the memory of each parameter.

    Attributes:
        params: may be replaced one by one, see `take`.
        pointers: addresses of the views.
    """

    def __init__(self, params: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
        self.params = list(params)
        self._set_views(views)

    def _set_views(self, views: Sequence[Tensor]) -> None:
        self.views = tuple(views)
        self.pointers = [view.data_ptr() for view in self.views]

    def take_all(self) -> None:
        """Copy the parameters into their views one by one, so only one is in memory twice.

        The system provides the pages of a large CPU buffer at first touch.
        """
        for index, param in enumerate(self.params):
            self.take(index, param)

    @torch.no_grad()
    def take(self, index: int, values: Tensor) -> None:
        """Copy values of the view's shape, and make the parameter the view."""
        self.views[index].copy_(values)
        self.attach(index)

    def attach(self, index: int) -> None:
        """Make the parameter the view, dropping its current values."""
        self.params[index].data = self.views[index]

    def follow(self, views: Sequence[Tensor]) -> None:
        """Move the parameters to other views, which have the same values already."""
        self._set_views(views)
        for index in range(len(self.params)):
            self.attach(index)


class GradBuffer:
    """The gradients of a segment's parameters, which are copied into one buffer as they arrive.

    autograd makes a tensor for each gradient. It is copied while it is in cache, and freed at once.

    Args:
        flat: at least `(layout.numel,)`, with zeros in its gaps; other values do not matter.
        layout: places of the gradients.
        arrived: a list that the caller passes; set to True for each gradient that arrives.
        apart: give each view a separate storage, see `over`.

    Attributes:
        views: the view of each gradient.
        is_apart: whether each has a separate storage.
    """

    def __init__(
        self, flat: Tensor, layout: FlatLayout, arrived: list[bool], *, apart: bool = False
    ) -> None:
        self.flat = flat
        # `.data`: each view has its own version counter, so that the arrival of one gradient does
        # not look like a write to another that a user has saved for backward.
        views = [view.data for view in param_views(flat, layout)]
        memory = flat.untyped_storage()
        self.views = tuple([over(memory, view) if apart else view for view in views])
        self.is_apart = any(view is not own for view, own in zip(views, self.views, strict=True))
        self.arrived = arrived

    def take(self, index: int, grad: Tensor) -> None:
        """Copy a gradient, or add it to the existing one."""
        if self.arrived[index]:
            self.views[index].add_(grad)
        else:
            self.put(index, grad)

    def put(self, index: int, grad: Tensor) -> None:
        """Copy a gradient over the existing one."""
        self.views[index].copy_(grad.to_dense() if grad.is_sparse else grad)
        self.arrived[index] = True

    def zero_rest(self) -> None:
        """Zero the gradients that have not arrived."""
        for view, arrived in zip(self.views, self.arrived, strict=True):
            if not arrived:
                view.zero_()


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

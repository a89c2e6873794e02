"""A slice of a tensor's elements, as a checkpoint stores it: in rectangles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..layout._boxes import Box, boxes_between
from ..layout._spec import ParamSpec, contiguous_stride
from ..memory._views import inverse, outer_first


@dataclass(frozen=True)
class TensorSlice:
    """Elements `[start, start + numel)` of a tensor, in memory order, and where they are or go.

    Args:
        key: name in the checkpoint.
        spec: shape and stride of the whole tensor.
        start: first element.
        elements: `(numel,)`, of any dtype.
        within: where the checkpoint's tensor is a larger one, its shape, and where this one begins
            in it.
    """

    key: str
    spec: ParamSpec
    start: int
    elements: Tensor
    within: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return self.spec.shape if self.within is None else self.within[0]

    def boxes(self) -> tuple[tuple[tuple[int, ...], Tensor], ...]:
        """The slice as rectangles: where each begins in the tensor, and a view of its elements."""
        if not self.spec.numel:
            empty = self.elements.new_empty(self.spec.shape)
            return ((self._offsets((0,) * empty.dim()), empty),)
        if self._is_whole_and_row_major():
            view = self.elements.view(self.spec.shape)
            return ((self._offsets((0,) * view.dim()), view),)
        order = outer_first(self.spec)
        sizes = tuple(self.spec.shape[dim] for dim in order)
        stop = self.start + self.elements.numel()
        return tuple(self._placed(box, order) for box in boxes_between(sizes, self.start, stop))

    def _is_whole_and_row_major(self) -> bool:
        """As most are, and there is little to find out then."""
        if self.elements.numel() != self.spec.numel:
            return False
        return self.spec.stride == contiguous_stride(self.spec.shape)

    def _placed(self, box: Box, order: Sequence[int]) -> tuple[tuple[int, ...], Tensor]:
        back = inverse(order)
        first = box.start - self.start
        view = self.elements[first : first + box.numel].view(box.lengths).permute(back)
        return self._offsets(tuple(box.offsets[dim] for dim in back)), view

    def _offsets(self, own: tuple[int, ...]) -> tuple[int, ...]:
        if self.within is None:
            return own
        return tuple(first + offset for first, offset in zip(self.within[1], own, strict=True))


def whole(key: str, tensor: Tensor) -> TensorSlice:
    """A whole tensor as one slice, in row-major order."""
    shape = tuple(tensor.shape)
    spec = ParamSpec(key, shape, tensor.dtype, contiguous_stride(shape))
    return TensorSlice(key, spec, 0, tensor.detach().contiguous().view(-1))

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
    """

    key: str
    spec: ParamSpec
    start: int
    elements: Tensor

    def boxes(self) -> tuple[tuple[tuple[int, ...], Tensor], ...]:
        """The slice as rectangles: where each begins in the tensor, and a view of its elements."""
        if not self.spec.numel:
            empty = self.elements.new_empty(self.spec.shape)
            return (((0,) * empty.dim(), empty),)
        order = outer_first(self.spec)
        sizes = tuple(self.spec.shape[dim] for dim in order)
        stop = self.start + self.elements.numel()
        return tuple(self._placed(box, order) for box in boxes_between(sizes, self.start, stop))

    def _placed(self, box: Box, order: Sequence[int]) -> tuple[tuple[int, ...], Tensor]:
        back = inverse(order)
        first = box.start - self.start
        view = self.elements[first : first + box.numel].view(box.lengths).permute(back)
        return tuple(box.offsets[dim] for dim in back), view


def whole(key: str, tensor: Tensor) -> TensorSlice:
    """A whole tensor as one slice, in row-major order."""
    shape = tuple(tensor.shape)
    spec = ParamSpec(key, shape, tensor.dtype, contiguous_stride(shape))
    return TensorSlice(key, spec, 0, tensor.detach().contiguous().view(-1))

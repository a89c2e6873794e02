"""Gradients that are copied into one flat buffer as they arrive.

autograd makes a tensor for each gradient. It is copied while it is in cache, and freed at once.
`FlatSegment` then gives the views to the parameters; `ShardedSegment` reduces them over ranks.
"""

from __future__ import annotations

from torch import Tensor

from ..layout._layout import FlatLayout
from ._views import over, param_view


class GradBuffer:
    """The gradients of a segment's parameters.

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
        count = len(layout.specs)
        views = [param_view(flat.data, layout, index) for index in range(count)]
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

"""Gradients that arrive in one flat buffer.

autograd makes a tensor for each gradient. It is copied as it arrives, while it is in cache, and
freed at once. `FlatGrad` and `ShardedGrads` differ in what happens afterwards: parameters of one
process get the views, gradients of ranks are reduced.
"""

from __future__ import annotations

from torch import Tensor

from ..layout._layout import FlatLayout
from ._views import param_view


class GradBuffer:
    """The gradients of a segment's parameters.

    Args:
        flat: at least `(layout.numel,)`, with zeros in its gaps; other values do not matter.
        layout: where each gradient is.
        arrived: a list of the caller's, set to True where a gradient arrives.

    Attributes:
        views: of each gradient.
    """

    def __init__(self, flat: Tensor, layout: FlatLayout, arrived: list[bool]) -> None:
        self.flat = flat
        # `.data`: each view has a version counter, so one gradient's arrival does not look like
        # a write to another that a user has saved for backward.
        count = len(layout.specs)
        self.views = tuple([param_view(flat.data, layout, index) for index in range(count)])
        self.arrived = arrived

    def take(self, index: int, grad: Tensor) -> None:
        """Copy a gradient, or add it to the one that is there."""
        if self.arrived[index]:
            self.views[index].add_(grad)
        else:
            self.put(index, grad)

    def put(self, index: int, grad: Tensor) -> None:
        """Copy a gradient in place of the one that is there."""
        self.views[index].copy_(grad.to_dense() if grad.is_sparse else grad)
        self.arrived[index] = True

    def zero_rest(self) -> None:
        """Zero the gradients that have not arrived."""
        for view, arrived in zip(self.views, self.arrived, strict=True):
            if not arrived:
                view.zero_()

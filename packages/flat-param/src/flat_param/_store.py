"""Edge: one segment: its buffer, the parameters in it, and their one flat gradient.

Rule: a parameter is a view of the buffer at its planned place; where its storage was replaced, its
values are taken back into that place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ._buffer import migrate
from ._errors import ParameterError
from ._flat_grad import FlatGrad
from ._layout import Segment
from ._views import param_view, param_views


class SegmentStore:
    """The tensors of one segment.

    Args:
        plan: names, layout and trainability.
        params: in layout order; become views of the new buffer.

    Attributes:
        buffer: `(plan.layout.numel,)`, outside autograd.
        grad: the flat gradient.
    """

    def __init__(self, plan: Segment, params: Sequence[nn.Parameter]) -> None:
        self.plan = plan
        self.params: list[nn.Parameter] = list(params)
        self.buffer: Tensor = migrate(self.params, plan.layout)
        self.grad: FlatGrad = FlatGrad(plan, self.params, self.buffer)
        self._note_pointers()

    def moved(self) -> list[int]:
        """Positions of parameters whose data is no longer in the buffer."""
        if self.buffer.data_ptr() != self._base:  # share_memory_ moves a storage in place
            self._note_pointers()
        pointers = list(map(Tensor.data_ptr, self.params))
        if pointers == self._pointers:
            return []
        pairs = enumerate(zip(pointers, self._pointers, strict=True))
        return [index for index, (now, planned) in pairs if now != planned]

    def views(self) -> tuple[Tensor, ...]:
        """The planned places, in layout order, whatever the parameters hold."""
        return param_views(self.buffer, self.plan.layout)

    @torch.no_grad()
    def adopt(self, index: int, param: nn.Parameter) -> None:
        """Take a parameter's values into its place and make it a view of the buffer.

        Raises:
            ParameterError: its shape is not the planned one; nothing has changed then.
        """
        check_shape(self.plan.layout.specs[index].name, param, self.plan.layout.specs[index].shape)
        view = param_view(self.buffer, self.plan.layout, index)
        view.copy_(param)
        param.data = view
        if self.params[index] is not param:
            self.params[index] = param
            self.grad.replace(index)

    def accepts(self, param: Tensor) -> bool:
        """Whether the tensor belongs into this segment as it is."""
        return (
            param.dtype == self.buffer.dtype
            and param.device == self.buffer.device
            and param.requires_grad == self.plan.trainable
        )

    def _note_pointers(self) -> None:
        self._base = self.buffer.data_ptr()
        self._pointers = [view.data_ptr() for view in self.views()]


def check_shape(name: str, param: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a parameter of another shape than the planned one.

    Raises:
        ParameterError: names the parameter and both shapes.
    """
    if tuple(param.shape) != shape:
        raise ParameterError(
            f"flat_param.FlatParams: parameter '{name}' has shape {tuple(param.shape)}, but "
            f"{shape} was flattened. Flatten the module again after changing shapes."
        )

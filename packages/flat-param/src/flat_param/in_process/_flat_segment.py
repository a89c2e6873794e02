"""One segment: its buffer, the parameters in it, and their flat gradient.

Each parameter has a separate storage over its part of the buffer's memory, so that state dicts do
not look tied (see `over`). `share_memory()` moves storages one by one; the buffer is then moved
too, and the parameters become plain views of it. Memory stays alive as long as a user refers to its
storage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._errors import ParameterError
from ..buffers._views import ParamViews, allocate, over, param_views
from ..layout._layout import Segment
from ._flat_grad import FlatGrad


class FlatSegment:
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
        whole = allocate(plan.layout, device=params[0].device)
        self._memory = whole.untyped_storage()
        self.buffer: Tensor = over(self._memory, whole)
        self._base = self.buffer.data_ptr()
        self._held = ParamViews(params, self._views())
        self._held.take_all()
        self.grad: FlatGrad = FlatGrad(plan, self._held.params, self.buffer)

    @torch.inference_mode(False)
    def _views(self) -> list[Tensor]:
        views = param_views(self.buffer, self.plan.layout)
        return [over(self._memory, view) for view in views]

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in layout order."""
        return self._held.params

    def moved(self) -> list[int]:
        """Return positions of parameters whose data is no longer in the buffer."""
        if self.buffer.data_ptr() != self._base:  # moved to shared memory
            self._follow()
        return self._held.moved()

    def _follow(self) -> None:
        self._memory, self._base = self.buffer.untyped_storage(), self.buffer.data_ptr()
        self._held.follow(self._views())

    def adopt(self, index: int, param: nn.Parameter) -> None:
        """Copy a parameter's values and make it a view of the buffer.

        Args:
            index: its position.
            param: a parameter that `fits`.
        """
        is_shared = self.buffer.device.type == "cpu" and param.is_shared()
        if self.params[index] is not param:
            self.params[index] = param
            self.grad.replace(index)
        self._held.take(index, param)
        if is_shared and not self.buffer.is_shared():
            self.buffer.share_memory_()
            self._follow()

    def fits(self, index: int, param: Tensor) -> bool:
        """Whether a parameter can take a position without a new plan."""
        return (
            param.dtype == self.buffer.dtype
            and param.device == self.buffer.device
            and param.requires_grad == self.plan.trainable
            and tuple(param.shape) == self.plan.layout.specs[index].shape
        )

    def has_strides(self) -> bool:
        """Whether every parameter has the planned stride."""
        pairs = zip(self.params, self._held.views, strict=True)
        return all(param.stride() == view.stride() for param, view in pairs)

    def contains(self, tensor: Tensor) -> bool:
        """Whether a tensor shares the buffer's memory."""
        start = self.buffer.data_ptr()
        return start != 0 and start <= tensor.data_ptr() < start + self.plan.layout.nbytes

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return parameters and gradients in the segment, and a copy of each."""
        moved = set(self.moved())
        held = [param for index, param in enumerate(self.params) if index not in moved]
        pairs = [(param, param.detach().clone()) for param in held]
        return pairs + [(grad, grad.clone()) for grad in self.grad.attached()]


def check_shape(name: str, param: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a parameter with another shape than planned.

    Raises:
        ParameterError: names the parameter and both shapes.
    """
    if tuple(param.shape) != shape:
        raise ParameterError(
            f"flat_param.FlatParams: parameter '{name}' has shape {tuple(param.shape)}, but "
            f"{shape} was flattened. Call flat_param.unflatten(module), assign it, and flatten "
            "again."
        )

"""One segment: its buffer, the parameters in it, and their one flat gradient.

Rule 1: a parameter is a view of the buffer at its planned place; where its storage was replaced,
its values are taken back into that place.
Rule 2: two names of one storage look tied to whoever saves them. What a state dict holds of a
parameter is therefore a tensor over the same memory whose storage is that stretch alone.
Rule 3: sharing memory between processes moves a storage, and the memory it had goes with its
owner. So the memory's owner is a storage that nobody is given; the buffer and what state dicts
hold are stretches of it, and each keeps it alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._errors import ParameterError
from ..buffers._buffer import allocate, migrate
from ..buffers._views import over, param_view, param_views
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
        self.params: list[nn.Parameter] = list(params)
        whole = allocate(plan.layout, device=self.params[0].device)
        self._memory = whole.untyped_storage()
        self._slices: tuple[Tensor, ...] | None = None
        self.buffer: Tensor = migrate(self.params, plan.layout, buffer=over(self._memory, whole))
        self.grad: FlatGrad = FlatGrad(plan, self.params, self.buffer)
        self._note_pointers()

    def moved(self) -> list[int]:
        """Positions of parameters whose data is no longer in the buffer."""
        self._follow()
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

    def keeps_shape(self, index: int) -> bool:
        """Whether a parameter still has the planned shape."""
        return tuple(self.params[index].shape) == self.plan.layout.specs[index].shape

    def contains(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffer's memory."""
        start = self.buffer.data_ptr()
        return start != 0 and start <= tensor.data_ptr() < start + self.plan.layout.nbytes

    def separate(self, index: int, value: Tensor) -> None:
        """Give a detached view of a parameter a storage of its own, over the same memory (Rule 2).

        It goes on to count its writes together with the parameter.
        """
        self._follow()
        spec, tensor_slices = self.plan.layout.specs[index], self._slices
        if value.data_ptr() != self._pointers[index]:
            return  # the parameter's storage was replaced
        if value.shape == spec.shape and value.stride() == spec.stride:
            value.data = (self._all_slices() if tensor_slices is None else tensor_slices)[index]

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """What lies in the segment, and a copy of each: parameters and their gradients."""
        moved = set(self.moved())
        held = [param for index, param in enumerate(self.params) if index not in moved]
        pairs = [(param, param.detach().clone()) for param in held]
        return pairs + [(grad, grad.clone()) for grad in self.grad.attached()]

    @torch.inference_mode(False)
    def _all_slices(self) -> tuple[Tensor, ...]:
        self._slices = tuple(over(self._memory, view) for view in self.views())
        return self._slices

    def _follow(self) -> None:
        """Notice that the buffer's storage was moved to shared memory, in place (Rule 3)."""
        if self.buffer.data_ptr() != self._base:
            self._memory = self.buffer.untyped_storage()
            self._note_pointers()

    def _note_pointers(self) -> None:
        self._base = self.buffer.data_ptr()
        self._pointers = [view.data_ptr() for view in self.views()]
        self._slices = None


def check_shape(name: str, param: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a parameter of another shape than the planned one.

    Raises:
        ParameterError: names the parameter and both shapes.
    """
    if tuple(param.shape) != shape:
        raise ParameterError(
            f"flat_param.FlatParams: parameter '{name}' has shape {tuple(param.shape)}, but "
            f"{shape} was flattened. Call flat_param.unflatten(module), assign it, and flatten "
            "again."
        )

"""The flat gradient of a segment.

Invariants:
- After a backward, a parameter's gradient is a view of the flat gradient, or None if no backward
  reached it. A hook on each parameter copies a gradient if autograd made a new tensor; autograd
  itself adds to a view.
- Whenever the flat gradient is read, it is zero where a parameter's gradient is None.
- It is allocated at the first gradient. A frozen segment has none.
- A gradient that was assigned or cleared without a backward is found by `vector`, the norms and
  clipping, which compare all parameters. Chunks are read several times a step, so they compare
  only after an arrival, or if the first or the last parameter has changed.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter, is_
from weakref import ref

import torch
from torch import Tensor, nn

from .._errors import StateError
from .._torch_compat import backward_is_running
from ..buffers._grads import GradBuffer
from ..buffers._views import zeros
from ..layout._layout import Segment

_grad_of = attrgetter("grad")


class FlatGrad:
    """The gradient of one segment as one vector.

    Args:
        segment: layout and trainability.
        params: in layout order; the owner changes this list and then calls `replace`.
        buffer: the parameters' vector; gives size, dtype and device.

    Attributes:
        arrivals: gradients accumulated so far; distinguishes a new gradient from a cleared one.
    """

    def __init__(self, segment: Segment, params: list[nn.Parameter], buffer: Tensor) -> None:
        self.segment: Segment = segment
        self._params, self._buffer = params, buffer
        self.arrivals: int = sum(param.grad is not None for param in params)
        self._seen: tuple[int, ...] = ()
        self._held: GradBuffer | None = None
        self._is_closed = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        try:
            for index in range(len(params) if segment.trainable else 0):
                self._hooks.append(self._watch(index))
        except BaseException:
            self.close()
            raise

    def _watch(self, index: int) -> torch.utils.hooks.RemovableHandle:
        # Weak: the garbage collector does not see the reference that C++ holds to a parameter's
        # hooks. A strong hook would keep the buffers alive after the model is deleted.
        arrive = partial(_arrived, ref(self), index)
        return self._params[index].register_post_accumulate_grad_hook(arrive)

    def close(self) -> None:
        """Remove the hooks; parameters keep their gradients."""
        self._is_closed = True  # a hook may be left if its registration was interrupted
        for hook in self._hooks:
            hook.remove()

    def replace(self, index: int) -> None:
        """Watch another parameter at a position."""
        if self._hooks:
            self._hooks[index].remove()
            self._hooks[index] = self._watch(index)

    def attached(self) -> list[Tensor]:
        """Gradients that are views of the flat one.

        Raises:
            StateError: a backward is running.
        """
        if self._hooks and backward_is_running():
            raise StateError(
                f"flat_param.unflatten: segment '{self.segment.name}' is in a backward, which "
                "still writes to the flat gradient. Call unflatten after the backward."
            )
        views = () if self._held is None else self._held.views
        pairs = zip(map(_grad_of, self._params), views, strict=False)
        return [view for grad, view in pairs if grad is view]

    @property
    def vector(self) -> Tensor:
        """Return the up-to-date flat gradient, `(numel,)`.

        Raises:
            StateError: the segment is frozen.
        """
        if not self.segment.trainable:
            raise StateError(
                f"flat_param.FlatParams: segment '{self.segment.name}' is frozen, but only a "
                "trainable segment has a gradient. Name a trainable segment."
            )
        held = self._allocated()
        self._take_all(held)
        self._seen = self._state()
        return held.flat

    @property
    def synced(self) -> Tensor:
        """`vector`, without comparing all parameters again if none seems to have changed."""
        if self._held is None or self._seen != self._state():
            return self.vector
        return self._held.flat

    def zero_(self) -> None:
        """Zero the flat gradient with one fill; gradients that are None stay None."""
        if self._held is not None or any(param.grad is not None for param in self._params):
            self.synced.zero_()

    def _state(self) -> tuple[int, ...]:
        return self.arrivals, id(self._params[0].grad), id(self._params[-1].grad)

    @torch.no_grad()
    def _take_all(self, held: GradBuffer) -> None:
        if all(map(is_, map(_grad_of, self._params), held.views)):
            return
        for index, param in enumerate(self._params):
            grad, view = param.grad, held.views[index]
            held.arrived[index] = grad is not None
            if grad is not None and grad is not view:
                self._take(held, index, param, grad)
                self.arrivals += not grad.requires_grad
        held.zero_rest()

    def _take(self, held: GradBuffer, index: int, param: Tensor, grad: Tensor) -> None:
        held.put(index, grad.detach())
        if not grad.requires_grad:  # with create_graph=True it has a graph, which a user needs
            param.grad = held.views[index]

    def _allocated(self) -> GradBuffer:
        if self._held is None:
            buffer = self._buffer
            with torch.inference_mode(False):
                flat = zeros(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
                self._held = GradBuffer(flat, self.segment.layout, [False] * len(self._params))
        return self._held

    def arrive(self, index: int, param: Tensor) -> None:
        """Take a gradient that autograd has accumulated."""
        self.arrivals += 1
        held, grad = self._allocated(), param.grad
        if grad is not None and grad is not held.views[index]:
            self._take(held, index, param, grad)


def _arrived(of: ref[FlatGrad], index: int, param: Tensor) -> None:
    grad = of()
    if grad is not None and not grad._is_closed:
        grad.arrive(index, param)

"""The flat gradient of a segment.

Invariants:
- After a backward, a parameter's gradient is a view of the flat gradient, or None if no backward
  reached it. A hook on each parameter copies a gradient if autograd made a new tensor; autograd
  itself adds to a view.
- Whenever the flat gradient is read, it is zero where a parameter's gradient is None.
- It is allocated at the first gradient. A frozen segment has none.
- A gradient that was assigned or cleared without a backward is found by `vector`, which compares
  all parameters. Chunks are read several times a step, so they do so only if `is_stale`.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter, is_
from weakref import ref

import torch
from torch import Tensor, nn

from .._errors import StateError
from ..buffers._grads import GradBuffer
from ..layout._layout import Segment

_grad_of = attrgetter("grad")


class FlatGrad:
    """The gradient of one segment as one vector.

    Args:
        segment: layout and trainability.
        params: in layout order.
        buffer: the parameters' vector; gives size, dtype and device.

    Attributes:
        arrivals: gradients accumulated so far; distinguishes a new gradient from a cleared one.
        is_closed: whether another flat gradient, or none, has replaced this one.
    """

    def __init__(self, segment: Segment, params: list[nn.Parameter], buffer: Tensor) -> None:
        self.segment: Segment = segment
        self._params, self._buffer = params, buffer
        self.arrivals: int = sum(param.grad is not None for param in params)
        self.is_closed: bool = False
        self._seen: tuple[int, ...] = ()
        self._held: GradBuffer | None = None
        # Weak: the garbage collector does not see the reference that C++ holds to a parameter's
        # hooks. A strong hook would keep the buffers alive after the model is deleted.
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(_arrived, ref(self), index))
            for index, param in enumerate(params if segment.trainable else ())
        ]

    def close(self) -> None:
        """Remove the hooks; parameters keep their gradients."""
        self.is_closed = True
        for hook in self._hooks:
            hook.remove()

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
        self._take_all()
        self._seen = self._state()
        return self.flat

    @property
    def flat(self) -> Tensor:
        """The flat gradient as it is; up to date unless `is_stale`."""
        return self._allocated().flat

    @property
    def is_stale(self) -> bool:
        """Whether a gradient has arrived, or the first or the last one has changed."""
        return self.is_closed or self._seen != self._state()

    def zero_(self) -> None:
        """Zero the flat gradient with one fill; gradients that are None stay None."""
        if self._held is not None or any(param.grad is not None for param in self._params):
            self.vector.zero_()

    def _state(self) -> tuple[int, ...]:
        return self.arrivals, id(self._params[0].grad), id(self._params[-1].grad)

    @torch.no_grad()
    def _take_all(self) -> None:
        held = self._allocated()
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
                flat = torch.zeros(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
                self._held = GradBuffer(flat, self.segment.layout, [False] * len(self._params))
        return self._held

    def arrive(self, index: int, param: Tensor) -> None:
        """Take a gradient that autograd has accumulated."""
        self.arrivals += 1
        held, grad = self._allocated(), param.grad
        if grad is not None and grad is not held.views[index]:
            try:
                self._take(held, index, param, grad)
            except RuntimeError:
                # `param.data` has another shape, dtype or device. The gradient stays apart until
                # the flat view is used, which plans again or raises the error.
                return


def _arrived(of: ref[FlatGrad], index: int, param: Tensor) -> None:
    grad = of()
    if grad is not None and not grad.is_closed:
        grad.arrive(index, param)

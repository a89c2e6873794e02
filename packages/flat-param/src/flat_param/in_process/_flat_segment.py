"""One segment: its buffer, the parameters in it, and their flat gradient.

Invariants:
- After a backward, a parameter's gradient is a view of the flat gradient, or None if no backward
  reached it. A hook on each parameter copies a gradient if autograd made a new tensor; autograd
  itself adds to a view.
- Whenever the flat gradient is read, it is zero where a parameter's gradient is None.
- It is allocated at the first gradient. A frozen segment has none. If a gradient arrives where a
  user keeps an earlier one, another flat gradient is allocated, and the user's stays.
- A gradient that was assigned or cleared without a backward is found by `grad`, which compares all
  parameters. Chunks are read several times a step, so they call it only after an arrival, or if
  the gradient of the first or the last parameter has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter, is_
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .._errors import StateError
from .._torch_compat import is_referenced
from ..buffers._owners import disown, own
from ..buffers._views import allocate, move_into, over, param_views
from ..layout._layout import FlatLayout, Segment

_grad_of = attrgetter("grad")


class _FlatGrad:
    """The gradients of a segment's parameters in one buffer.

    Args:
        flat: `(layout.numel,)`, zero.
        layout: places of the gradients.

    Attributes:
        views: each gradient, with a separate storage if possible, see `over`.
        is_apart: whether each has a separate storage.
        arrived: which gradients are there.
    """

    def __init__(self, flat: Tensor, layout: FlatLayout) -> None:
        self.flat = flat
        # `.data`: each view has its own version counter, so that the arrival of one gradient does
        # not look like a write to another that a user has saved for backward.
        views = [view.data for view in param_views(flat, layout)]
        self.views = [over(flat.untyped_storage(), view) for view in views]
        self.is_apart = any(view is not own for view, own in zip(views, self.views, strict=True))
        self.arrived = [False] * len(views)

    def put(self, index: int, grad: Tensor) -> None:
        """Copy a gradient over the existing one, in cache and before another is made."""
        self.views[index].copy_(grad.to_dense() if grad.is_sparse else grad)
        self.arrived[index] = True


class FlatSegment:
    """The tensors of one segment.

    Each parameter has a separate storage over its part of the buffer's memory, so that state dicts
    do not look tied (see `over`). In shared memory, parameters are plain views of the buffer.

    Args:
        plan: names, layout and trainability.
        params: in layout order; become views of a new buffer.
        sync: compares the module with the plan; a method, held weakly.

    Attributes:
        buffer: `(plan.layout.numel,)`, outside autograd.
        arrivals: gradients accumulated so far; distinguishes a new gradient from a cleared one.
    """

    def __init__(self, plan: Segment, params: list[nn.Parameter], sync: Callable[[], None]) -> None:
        self.plan: Segment = plan
        self.params: list[nn.Parameter] = params
        self._sync = WeakMethod(sync)
        whole = allocate(plan.layout, device=params[0].device)
        if whole.device.type == "cpu" and any(param.is_shared() for param in params):
            whole.share_memory_()
        memory = whole.untyped_storage()
        self.buffer: Tensor = over(memory, whole)
        views = param_views(self.buffer, plan.layout)
        move_into(params, [over(memory, view) for view in views])
        own(self, params)
        self.arrivals: int = sum(param.grad is not None for param in params)
        self._seen: tuple[int, ...] = ()
        self._held: _FlatGrad | None = None
        self._is_closed = False
        # Weak: the garbage collector does not see the reference that C++ holds to a parameter's
        # hooks. A strong hook would keep the buffers alive after the model is deleted.
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(_arrived, ref(self), index))
            for index, param in enumerate(params if plan.trainable else ())
        ]

    def close(self) -> None:
        """Remove the hooks; parameters keep their memory and gradients."""
        self._is_closed, self._seen = True, ()
        disown(self.params)
        for hook in self._hooks:
            hook.remove()

    def sync(self) -> None:
        """Compare the module with the plan.

        Raises:
            StateError: the module was unflattened.
        """
        sync = self._sync()
        if sync is not None:
            sync()
        elif self._is_closed:
            raise unflattened("the module")

    @property
    def grad(self) -> Tensor:
        """Return the up-to-date flat gradient, `(numel,)`.

        Raises:
            StateError: the segment is frozen.
        """
        if not self.plan.trainable:
            raise StateError(
                f"flat_param.FlatParams: segment '{self.plan.name}' is frozen, but only a "
                "trainable segment has a gradient. Name a trainable segment."
            )
        return self._taken().flat

    def _taken(self) -> _FlatGrad:
        self._take_all(self._allocated())
        self._seen = () if self._is_closed else self._state()
        return self._allocated()

    def take_grads(self) -> None:
        """Compare all gradients with the flat one, if there are any."""
        if self.plan.trainable and self._held is not None:
            self._taken()

    def raise_versions(self, start: int, stop: int) -> None:
        """Have autograd see that the elements `[start, stop)` of the buffer were written to."""
        pairs = zip(self.params, self.plan.layout.ranges, strict=True)
        written = [param for param, (first, last) in pairs if first < stop and start < last]
        increment_version([param for param in written if not param.is_inference()])

    @property
    def synced_grad(self) -> Tensor | None:
        """The flat gradient; None if a gradient may have changed, so that `grad` is needed."""
        if self._held is None or self._seen != self._state():
            return None
        return self._held.flat

    def zero_grad(self) -> None:
        """Zero the flat gradient with one fill; gradients that are None stay None."""
        if self._held is not None or any(param.grad is not None for param in self.params):
            self.grad.zero_()

    def _state(self) -> tuple[int, ...]:
        return self.arrivals, id(self.params[0].grad), id(self.params[-1].grad)

    @torch.no_grad()
    def _take_all(self, held: _FlatGrad) -> None:
        if all(map(is_, map(_grad_of, self.params), held.views)):
            return
        for index, param in enumerate(self.params):
            grad = param.grad
            if grad is None:
                held = self._writable(held, index)
                held.arrived[index] = False
            elif grad is not held.views[index]:
                held = self._take(held, index, param, grad)
                self.arrivals += not grad.requires_grad
            else:
                held.arrived[index] = True
        for view, arrived in zip(held.views, held.arrived, strict=True):
            if not arrived:
                view.zero_()

    def _take(self, held: _FlatGrad, index: int, param: Tensor, grad: Tensor) -> _FlatGrad:
        """Copy a gradient into the flat one; returns the flat one."""
        held = self._writable(held, index)
        held.put(index, grad.detach())
        if not grad.requires_grad:  # with create_graph=True it has a graph, which a user needs
            param.grad = held.views[index]
        return held

    def _writable(self, before: _FlatGrad, index: int) -> _FlatGrad:
        """Return the flat gradient, or another if a user keeps its gradient at `index`."""
        is_kept = is_referenced(before.views, index, owns_storage=before.is_apart)
        if not (before.arrived[index] and is_kept):
            return before
        self._held = None
        held = self._allocated()
        for at, (param, view) in enumerate(zip(self.params, before.views, strict=True)):
            if param.grad is view:
                held.put(at, view)
                param.grad = held.views[at]
        return held

    def _allocated(self) -> _FlatGrad:
        if self._held is None:
            buffer = self.buffer
            with torch.inference_mode(False):
                flat = torch.zeros(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
                self._held = _FlatGrad(flat, self.plan.layout)
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


def _arrived(at: ref[FlatSegment], index: int, param: Tensor) -> None:
    segment = at()
    if segment is not None and not segment._is_closed:
        segment.arrive(index, param)


def unflattened(name: str) -> StateError:
    """The error for a view or a chunk of an unflattened module."""
    return StateError(
        f"flat_param.FlatParams: {name} was unflattened, but its flat view or a chunk of it is "
        "used, which would train nothing. Use the view that the next flatten returns, and build a "
        "new optimizer."
    )

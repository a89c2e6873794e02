"""The one flat gradient of a segment, and how autograd's gradients get into it.

Rule 1: after a backward, a parameter's gradient is a view of the flat gradient, or None. Autograd
adds into a view that is already there. Where there was None, a large gradient is copied into its
view as it arrives, while it is in cache; small ones get zeroed views, for autograd to add into,
when the first of any arrives. A parameter that no backward reached keeps None.
Rule 2: where a parameter's gradient is None, its part of the flat gradient is zero whenever
anything here reads it.
Rule 3: the flat gradient is made at the first gradient; a frozen segment never has one.
Rule 4: looking at every parameter costs as much as a small model's whole step. What runs several
times per step looks at the first and the last parameter, and at all of them after a backward: a
gradient assigned by hand to one in between is seen by `vector`, the norms and clipping.
Rule 5: a backward that was stopped leaves what it has computed, as torch does. It is over when the
engine drops its callbacks, at the next backward or at the next read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter, eq, is_
from weakref import ref

import torch
from torch import Tensor, nn

from .._errors import StateError
from .._torch_compat import (
    at_end_of_backward,
    backward_is_running,
    current_backward,
    versions,
)
from ..buffers._buffer import zeros
from ..buffers._views import param_view
from ..layout._layout import FlatLayout, Segment

# One call into Python costs what adding 32 KiB to zeros costs over copying them.
_LARGE_BYTES = 1 << 15

_grad_of = attrgetter("grad")


class FlatGrad:
    """The gradient of one segment as one vector.

    Args:
        segment: layout and trainability.
        params: in layout order; the list is the owner's, who calls `replace` after a change.
        buffer: the parameters' vector; gives size, dtype and device.

    Attributes:
        arrivals: gradients accumulated so far; tells a fresh gradient from a cleared one.
    """

    def __init__(self, segment: Segment, params: list[nn.Parameter], buffer: Tensor) -> None:
        self.segment: Segment = segment
        self._params, self._buffer = params, buffer
        self.arrivals: int = sum(param.grad is not None for param in params)
        self._seen_arrivals = -1
        self._flat: Tensor | None = None
        self._views: tuple[Tensor, ...] = ()
        self._backward: int | None = None  # the one that runs
        self._callback: object = None
        self._zeroed: list[int] | None = None  # versions of small views given to this backward
        announcing = _announcing(segment)
        self._large = {index for index in announcing if _is_large(segment, index)}
        self._small = [index for index in range(len(params)) if index not in self._large]
        self._note_small()
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        try:
            for index in announcing:  # last: they find all that they need
                self._hooks[index] = self._watch(index)
        except BaseException:
            self.close()
            self._backward = -1  # a hook that was placed and not noted does nothing
            raise

    def close(self) -> None:
        """Take the hooks off; parameters keep the gradients they have."""
        for hook in self._hooks.values():
            hook.remove()

    def attached(self) -> list[Tensor]:
        """Gradients that are views of the flat one.

        Raises:
            StateError: a backward is running.
        """
        self.end_if_stopped()
        if self._backward is not None:
            raise StateError(
                f"flat_param.unflatten: segment '{self.segment.name}' is in a backward, but its "
                "gradients are on their way into the flat one. Call it after the backward."
            )
        pairs = zip(map(_grad_of, self._params), self._views, strict=False)
        return [view for grad, view in pairs if grad is view]

    def replace(self, index: int) -> None:
        """Another parameter has come to a position: watch that one."""
        if index in self._hooks:
            self._hooks[index].remove()
            self._hooks[index] = self._watch(index)
        self._note_small()

    # Reading

    @property
    def vector(self) -> Tensor:
        """The flat gradient, `(numel,)`, brought up to date (Rules 1 and 2).

        Raises:
            StateError: the segment is frozen.
        """
        flat = self._ensure_allocated()
        self.sync_grads()
        return flat

    @property
    def synced(self) -> Tensor:
        """`vector`, looked over once per arrival; see Rule 4."""
        self.end_if_stopped()
        flat = self._flat
        if flat is None or self._seen_arrivals != self.arrivals or self._ends_replaced():
            return self.vector
        return flat

    def zero_(self) -> None:
        """Zero the flat gradient with one fill; gradients that are None stay None."""
        if self._flat is not None or any(param.grad is not None for param in self._params):
            self.synced.zero_()

    def invalidate(self) -> None:
        """Have the next reader look at every gradient: they were cleared without a backward.

        Filling with zeros now would be a second write of what the next backward writes anyway.
        """
        self._seen_arrivals = -1

    @torch.no_grad()
    def sync_grads(self) -> None:
        """Bring every gradient into the flat one (Rules 1 and 2)."""
        if not all(map(is_, map(_grad_of, self._params), self._views)):
            self.arrivals += sum(map(_accumulate, self._params, self._views))
        self._seen_arrivals = self.arrivals

    def _ends_replaced(self) -> bool:
        ends = ((self._params[0].grad, self._views[0]), (self._params[-1].grad, self._views[-1]))
        return any(grad is not None and grad is not view for grad, view in ends)

    def _ensure_allocated(self) -> Tensor:
        if not self.segment.trainable:
            raise StateError(
                f"flat_param.FlatParams: segment '{self.segment.name}' is frozen, but only a "
                "trainable segment has a gradient. Name a trainable segment."
            )
        if self._flat is None:
            with torch.inference_mode(False):
                self._make()
        assert self._flat is not None
        return self._flat

    def _make(self) -> None:
        buffer = self._buffer
        flat = self._flat = zeros(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
        layout = self.segment.layout
        # Through `data`, each view counts its own writes: that tells which ones autograd reached.
        self._views = tuple(
            param_view(flat.data, layout, index) for index in range(len(layout.specs))
        )
        self._small_views = [self._views[index] for index in self._small]
        self._small_slices = [flat[start:stop] for start, stop in _joined(layout, self._small)]

    # What a backward does

    def _watch(self, index: int) -> torch.utils.hooks.RemovableHandle:
        # Weak: the garbage collector does not see the reference that C++ holds to a parameter's
        # hooks. A strong hook would keep the buffers alive after the model is deleted.
        if index in self._large:
            arrive = partial(_large_arrived, ref(self), index)
        else:
            arrive = partial(_small_arrived, ref(self))
        return self._params[index].register_post_accumulate_grad_hook(arrive)

    def _note_small(self) -> None:
        self._small_params = [self._params[index] for index in self._small]

    def _begin(self) -> None:
        if self._backward is not None:  # it was stopped, or this one is inside it
            self._end()
        self._backward = this = current_backward()
        callback = partial(_end, ref(self), this)
        at_end_of_backward(callback)
        # The engine drops its callbacks, and does not call them, when an exception stops it.
        self._callback = ref(callback, partial(_dropped, ref(self), this))
        self._ensure_allocated()
        # With create_graph, autograd would not add in place but make another tensor.
        if not torch.is_grad_enabled():
            self._attach_small()

    def _attach_small(self) -> None:
        """Give zeroed views to small parameters, if none of them has one (Rule 1)."""
        grads = list(map(_grad_of, self._small_params))
        before = versions(self._small_views)
        if before is None or any(map(is_, grads, self._small_views)):
            return
        self._zeroed = before
        for tensor_slice in self._small_slices:
            tensor_slice.zero_()
        for index in [index for index, grad in enumerate(grads) if grad is not None]:
            _accumulate(self._small_params[index], self._small_views[index])
        for param, view in zip(self._small_params, self._small_views, strict=True):
            param.grad = view

    def _end(self) -> None:
        self._backward = None
        self.arrivals += 1
        if self._zeroed is None:
            self.sync_grads()
        else:
            self._detach_unreached()

    def _detach_unreached(self) -> None:
        before, self._zeroed = self._zeroed, None
        after = versions(self._small_views)
        if before is None or after is None or not any(map(eq, before, after)):
            return
        for param, view, old, new in zip(
            self._small_params, self._small_views, before, after, strict=True
        ):
            if old == new and param.grad is view:
                param.grad = None

    def end_if_stopped(self) -> None:
        """End a backward that was stopped and of which nobody has told."""
        if self._backward is not None and not backward_is_running():
            self._end()


def _end(of: ref[FlatGrad], this: int) -> None:
    grad = of()
    if grad is not None and grad._backward == this:
        grad._end()


def _dropped(of: ref[FlatGrad], this: int, _: object) -> None:
    _end(of, this)


def _small_arrived(of: ref[FlatGrad], param: Tensor) -> None:
    grad = of()
    if grad is not None and grad._backward != current_backward() and grad._backward != -1:
        grad._begin()


def _large_arrived(of: ref[FlatGrad], index: int, param: Tensor) -> None:
    grad = of()
    if grad is None:  # the model was deleted, and a parameter of it is still in use
        return
    if grad._backward != current_backward():
        if grad._backward == -1:
            return
        grad._begin()
    if grad._views:
        _accumulate(param, grad._views[index])


def _announcing(segment: Segment) -> list[int]:
    """Parameters whose gradients announce a backward: all, but a bias beside its weight.

    A call into Python per parameter and backward is what training would notice of this package.
    """
    names = [spec.name for spec in segment.layout.specs] if segment.trainable else []
    known = set(names)
    return [
        index
        for index, name in enumerate(names)
        if not (name.endswith(".bias") and name.removesuffix("bias") + "weight" in known)
    ]


def _is_large(segment: Segment, index: int) -> bool:
    spec = segment.layout.specs[index]
    return spec.numel * spec.dtype.itemsize >= _LARGE_BYTES


def _joined(layout: FlatLayout, indices: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges of some parameters, in rising order, those of neighbours as one."""
    joined: list[tuple[int, int]] = []
    previous, ranges = -2, layout.ranges
    for index in indices:
        start, stop = ranges[index]
        if index == previous + 1:
            start = joined.pop()[0]
        joined.append((start, stop))
        previous = index
    return joined


def _accumulate(param: Tensor, view: Tensor) -> bool:
    """Make the view the parameter's gradient (Rule 1); whether there was a foreign one to take."""
    grad = param.grad
    if grad is None:
        view.zero_()
        return False
    if grad is view or grad.requires_grad:
        return False  # a gradient with a graph (create_graph=True) is the caller's to consume
    view.copy_(grad.to_dense() if grad.is_sparse else grad)
    param.grad = view
    return True

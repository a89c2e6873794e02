"""Edge: one segment: its buffer, the parameters in it, and their one flat gradient.

Rule 1: after a backward, a parameter's gradient is a view of the flat gradient, or None. Autograd
adds into a view that is already there; a gradient of its own, made where there was None, is copied
into the view when the backward ends, and the view takes its place.
Rule 2: where a parameter's gradient is None, its part of the flat gradient is zero whenever
anything here reads it. A parameter that no backward reached keeps None.
Rule 3: the flat gradient is made at the first gradient; a frozen segment never has one.
Rule 4: looking at every parameter costs as much as a small model's whole step. What runs several
times per step looks at the first and the last parameter, and at all of them after a backward: a
gradient assigned by hand to one in between is seen by `grad`, the norms and clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from ._buffer import migrate
from ._errors import ParameterError, StateError
from ._layout import Segment
from ._torch_compat import at_end_of_backward
from ._views import param_view, param_views

_grad_of = attrgetter("grad")


class SegmentStore:
    """The tensors of one segment.

    Args:
        plan: names, layout and trainability.
        params: in layout order; become views of the new buffer.

    Attributes:
        buffer: `(plan.layout.numel,)`, outside autograd.
        arrivals: gradients accumulated so far; tells a fresh gradient from a cleared one.
    """

    def __init__(self, plan: Segment, params: Sequence[nn.Parameter]) -> None:
        self.plan = plan
        self.params = list(params)
        self.buffer = migrate(self.params, plan.layout)
        self.arrivals = sum(param.grad is not None for param in self.params)
        self._seen_arrivals = -1
        self._note_pointers()
        self._grad: Tensor | None = None
        self._grad_views: tuple[Tensor, ...] = ()
        self._ends_soon = False
        self._hooks = {index: self._watch(index) for index in _sentinels(plan)}

    def close(self) -> None:
        """Take the hooks off; the parameters keep what they hold."""
        for hook in self._hooks.values():
            hook.remove()

    @property
    def grad(self) -> Tensor:
        """The flat gradient, `(plan.layout.numel,)`, brought up to date (Rules 1 and 2).

        Raises:
            StateError: the segment is frozen.
        """
        self.look()
        assert self._grad is not None
        return self._grad

    @property
    def settled_grad(self) -> Tensor:
        """`grad`, looked over once per arrival; see Rule 4."""
        grad = self._grad
        if grad is None or self._seen_arrivals != self.arrivals or self._ends_replaced():
            return self.grad
        return grad

    def zero_grad(self) -> None:
        """Zero the flat gradient with one fill; gradients that are None stay None."""
        if self._grad is not None or any(param.grad is not None for param in self.params):
            self.settled_grad.zero_()

    def before_forward(self) -> None:
        """Forget a backward that failed: it never came to its end."""
        self._ends_soon = False

    def moved(self) -> list[int]:
        """Positions of parameters whose data is no longer in the buffer."""
        if self.buffer.data_ptr() != self._base:  # share_memory_ moves a storage in place
            self._note_pointers()
        pointers = list(map(Tensor.data_ptr, self.params))
        if pointers == self._pointers:
            return []
        pairs = enumerate(zip(pointers, self._pointers, strict=True))
        return [index for index, (now, planned) in pairs if now != planned]

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
            self._replace(index, param)

    def accepts(self, param: Tensor) -> bool:
        """Whether the tensor belongs into this segment as it is."""
        return (
            param.dtype == self.buffer.dtype
            and param.device == self.buffer.device
            and param.requires_grad == self.plan.trainable
        )

    def _note_pointers(self) -> None:
        self._base = self.buffer.data_ptr()
        self._pointers = [view.data_ptr() for view in param_views(self.buffer, self.plan.layout)]

    def _replace(self, index: int, param: nn.Parameter) -> None:
        self.params[index] = param
        if index in self._hooks:
            self._hooks[index].remove()
            self._hooks[index] = self._watch(index)

    def _watch(self, index: int) -> torch.utils.hooks.RemovableHandle:
        return self.params[index].register_post_accumulate_grad_hook(self._arrive)

    def _arrive(self, param: Tensor) -> None:
        if not self._ends_soon:
            self._ends_soon = True
            at_end_of_backward(self._settle)

    def _settle(self) -> None:
        self.arrivals += 1
        self.look()

    def look(self) -> None:
        """Bring every gradient into the flat one (Rules 1 and 2)."""
        self._ends_soon = False
        views = self._views()
        if not all(map(is_, map(_grad_of, self.params), views)):
            with torch.no_grad():
                self.arrivals += sum(map(_take_grad, self.params, views))
        self._seen_arrivals = self.arrivals

    def _ends_replaced(self) -> bool:
        views = self._grad_views
        first, last = self.params[0].grad, self.params[-1].grad
        if first is views[0] and last is views[-1]:
            return False
        return (first is not None and first is not views[0]) or (
            last is not None and last is not views[-1]
        )

    def _views(self) -> tuple[Tensor, ...]:
        if not self.plan.trainable:
            raise StateError(
                f"flat_param.FlatParams: segment '{self.plan.name}' is frozen, but only a "
                "trainable segment has a gradient. Name a trainable segment."
            )
        if self._grad is None:
            self._grad = torch.zeros_like(self.buffer)
            self._grad_views = param_views(self._grad, self.plan.layout)
        return self._grad_views


def _sentinels(plan: Segment) -> list[int]:
    """Parameters whose gradients announce a backward: all, but a bias beside its weight.

    A call into Python per parameter and backward is what training would notice of this package.
    """
    names = [spec.name for spec in plan.layout.specs] if plan.trainable else []
    known = set(names)
    return [
        index
        for index, name in enumerate(names)
        if not (name.endswith(".bias") and name.removesuffix("bias") + "weight" in known)
    ]


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


def _take_grad(param: Tensor, view: Tensor) -> bool:
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

"""Record a step on fake tensors: allocations, gradients, and the time of each part."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .._tensors import tensors_in
from .._torch_compat import storage_bytes, storage_key, storage_under
from .._watching_mode import WatchingMode
from ..budget._intervals import marked
from ..budget._link import SECOND
from ..budget._measure import Event, Interval, Marks, accounted
from ..policies._flops import flops_of
from ._devices import Device


class FakeStorages(WatchingMode):
    """Lists allocations of fake tensors; its clock adds up roofline times of all operators.

    Args:
        device: the device whose roofline gives the times.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device, self._seconds = device, 0.0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._events: list[Event] = []
        self._ns = 0

    def mark(self) -> None:
        self._ns += round(self._seconds * SECOND)
        self._seconds = 0.0
        self._events.append(self._ns)

    def intervals(self, step: Callable[[], object], keys: Sequence[Any]) -> list[Interval]:
        with self:
            step()
        return accounted(self._events, keys)

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Note that a storage is a gradient."""
        if parameter.grad is not None:
            self._events.append((storage_key(parameter.grad), None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        gc.collect(0)  # fake kernels leave cycles that hold their arguments
        read, made = tensors_in((args, kwargs)), tensors_in(out)
        given = {storage_key(each) for each in read}
        new = [each for each in made if storage_key(each) not in given]
        for each in new:
            self._add(each)
        if new or func._schema.is_mutable:
            self._seconds += self._seconds_of(func, args, kwargs, out, read, made)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        key, storage, size = storage_key(tensor), storage_under(tensor), storage_bytes(tensor)
        if key in self._alive or storage is None:
            return

        def free(_: object) -> None:
            del self._alive[key]
            self._events.append((key, -size))

        self._alive[key] = weakref.ref(storage, free)
        self._events.append((key, size))

    def _seconds_of(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        read: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> float:
        name = str(func)
        moved = sum(min(each.nbytes, storage_bytes(each)) for each in (*read, *made))
        kind, flops = "matmul", flops_of(func, args, kwargs, out)
        if "scaled_dot_product" in name:
            kind = "attention backward" if "_backward" in name else "attention"
            if any(each is True for each in args):  # is_causal: half of the products
                flops //= 2
        return self._device.seconds(flops, moved, kind=kind)


def watch_step(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    loss_of: Callable[[], torch.Tensor],
    device: Device,
) -> list[Interval]:
    """Run a step on fake tensors; return its intervals. Gradients are dropped.

    Args:
        model: the model, whose parameters get gradients.
        blocks: blocks of the model, which the intervals are of.
        loss_of: runs the forward and returns its loss.
        device: the device whose roofline gives the times.
    """
    source = FakeStorages(device)
    marks = Marks(source)
    with ExitStack() as stack:
        stack.enter_context(marked(blocks, marks))
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(source.note_gradient)
                stack.callback(hook.remove)
        found = marks.intervals(lambda: loss_of().backward())
    for parameter in model.parameters():
        parameter.grad = None
    return found

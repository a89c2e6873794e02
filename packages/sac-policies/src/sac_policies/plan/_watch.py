"""Record a step on fake tensors: allocations with their cause, and the time of each part.

Each storage has one cause. The tail is the code from the end of the last block until backward
reaches that block; its storages are "logits and loss". A parameter's gradient is "gradients". All
other storages are "activations".
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .._tensors import tensors_in
from .._torch_compat import storage_bytes, storage_key, storage_under
from .._watching_mode import WatchingMode
from ..budget._intervals import Key, marked
from ..budget._measure import Interval, no_collection
from ..policies._flops import flops_of
from ._alike import Blocks
from ._devices import Device

Amount = tuple[int, int, int]
"""Bytes of gradients, of activations, and of logits and loss."""
GRADIENTS, ACTIVATIONS, LOGITS = range(3)
SECOND = 10**9
ZERO: Amount = (0, 0, 0)


def added(one: Amount, other: Amount, times: int = 1) -> Amount:
    """Add two amounts, the second `times` times."""
    return (one[0] + times * other[0], one[1] + times * other[1], one[2] + times * other[2])


@dataclass(frozen=True)
class Span(Interval):
    """An interval of a step on fake tensors; its time is that of its kernels by the roofline.

    Attributes:
        grown_by: `grown` by cause.
        most_by: bytes at the peak over those at its start, by cause.
    """

    grown_by: Amount = ZERO
    most_by: Amount = ZERO


class Watch(WatchingMode):
    """Records storages and roofline times of all operators, divided at marks.

    Args:
        device: the device whose roofline gives the times.
        tail: key of the mark after the last block.
    """

    def __init__(self, device: Device, tail: Key) -> None:
        super().__init__()
        self._device, self._tail = device, tail
        self._made: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        """By key: the storage, its bytes, its cause."""
        self._now = [0, 0, 0]
        self.spans: list[Span] = []
        self._begin(None)

    def _begin(self, key: Any) -> None:
        self._key, self._seconds = key, 0.0
        self._before = self._most = self._amount()

    def _amount(self) -> Amount:
        gradients, activations, logits = self._now
        return gradients, activations, logits

    def mark(self, key: Any) -> None:
        """End a span and begin another."""
        grown, most = (added(each, self._before, -1) for each in (self._amount(), self._most))
        self.spans.append(
            Span(
                self._key,
                sum(grown),
                sum(most),
                ns=round(self._seconds * SECOND),
                grown_by=grown,
                most_by=most,
            )
        )
        self._begin(key)

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Count a storage as gradient memory."""
        key = storage_key(parameter.grad) if parameter.grad is not None else 0
        if key in self._made:
            storage, size, cause = self._made[key]
            self._made[key] = storage, size, GRADIENTS
            self._now[cause] -= size
            self._now[GRADIENTS] += size

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
        key, storage = storage_key(tensor), storage_under(tensor)
        if key in self._made or storage is None:
            return
        size = storage_bytes(tensor)
        cause = LOGITS if self._key == self._tail else ACTIVATIONS
        self._made[key] = weakref.ref(storage, lambda _: self._free(key)), size, cause
        self._now[cause] += size
        if sum(self._now) > sum(self._most):
            self._most = self._amount()

    def _free(self, key: int) -> None:
        _, size, cause = self._made.pop(key)
        self._now[cause] -= size

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
    blocks: Blocks,
    loss_of: Callable[[], torch.Tensor],
    device: Device,
) -> list[Span]:
    """Run a step on fake tensors; return its spans. Gradients are dropped.

    Args:
        model: the model, whose parameters get gradients.
        blocks: blocks of the model; a block that is not run counts as an equal one that is.
        loss_of: runs the forward and returns its loss.
        device: the device whose roofline gives the times.
    """
    watch = Watch(device, tail_of(len(blocks.modules)))
    with no_collection(), ExitStack() as stack:
        stack.enter_context(blocks.standing_in())
        stack.enter_context(marked(blocks.modules, watch))
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(watch.note_gradient)
                stack.callback(hook.remove)
        stack.enter_context(watch)
        loss = loss_of()
        loss.backward()
        del loss
        watch.mark(None)
    for parameter in model.parameters():
        parameter.grad = None
    by_key = {span.key: span for span in watch.spans}
    found = []
    for span in watch.spans:
        if span.key is not None and span.key[0] in blocks.like:
            number, *rest = span.key
            key = (blocks.like[number], *rest)
            span = replace(by_key[key], key=span.key)
        found.append(span)
    return found


def tail_of(blocks: int) -> Key:
    """Return the key of the interval after the last block."""
    return blocks - 1, 0, None

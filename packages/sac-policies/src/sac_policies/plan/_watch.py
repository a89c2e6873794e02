"""Record a step on fake tensors: allocations with their cause, and the time of each part.

Each storage has one cause. The tail is the code from the end of the last block until backward
reaches that block; its storages are "logits and loss". A parameter's gradient is "gradients". All
other storages are "activations".
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .._tensors import tensors_in
from .._torch_compat import storage_bytes, storage_key, storage_under
from .._torch_compat._module_calls import around_calls
from .._watching_mode import WatchingMode
from ..budget._measure import no_collection
from ..policies._flops import flops_of
from ._alike import Blocks
from ._devices import Device

Amount = tuple[int, int, int]
"""Bytes of gradients, of activations, and of logits and loss."""
GRADIENTS, ACTIVATIONS, LOGITS = range(3)
ZERO: Amount = (0, 0, 0)
START, TAIL = "start", "tail"


def added(one: Amount, other: Amount, times: int = 1) -> Amount:
    """Add two amounts, the second `times` times."""
    return (one[0] + times * other[0], one[1] + times * other[1], one[2] + times * other[2])


@dataclass(frozen=True)
class Span:
    """The part of a step between two marks.

    Attributes:
        key: START, TAIL, or an event and the number of the block: "forward", "between" (until
            the next block begins; its inputs may be freed there) or "backward".
        grown: bytes at its end minus those at its start.
        most: the peak over its start.
        seconds: of its kernels by the roofline.
    """

    key: Hashable
    grown: Amount
    most: Amount
    seconds: float


class Watch(WatchingMode):
    """Records storages and roofline times of all operators, divided at marks."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._made: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        """By key: the storage, its bytes, its cause."""
        self._now = [0, 0, 0]
        self.spans: list[Span] = []
        self._begin(START)

    def _begin(self, key: Hashable) -> None:
        self._key, self._seconds = key, 0.0
        self._before = self._most = self._amount()

    def _amount(self) -> Amount:
        gradients, activations, logits = self._now
        return gradients, activations, logits

    def mark(self, key: Hashable) -> None:
        """End a span and begin another."""
        grown, most = (added(each, self._before, -1) for each in (self._amount(), self._most))
        self.spans.append(Span(self._key, grown, most, self._seconds))
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
        cause = LOGITS if self._key == TAIL else ACTIVATIONS
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
    watch = Watch(device)
    with no_collection(), blocks.standing_in(), _marks(model, blocks.modules, watch), watch:
        loss = loss_of()
        loss.backward()
        del loss
        watch.mark(START)
    for parameter in model.parameters():
        parameter.grad = None
    by_key = {span.key: span for span in watch.spans}
    return [
        replace(by_key[span.key[0], blocks.like[span.key[1]]], key=span.key)
        if isinstance(span.key, tuple) and span.key[1] in blocks.like
        else span
        for span in watch.spans
    ]


@contextmanager
def _marks(model: nn.Module, blocks: Sequence[nn.Module], watch: Watch) -> Iterator[None]:
    """Mark where blocks begin and end in forward, and begin in backward."""
    left = len(blocks)

    def begin(number: int, args: Any, kwargs: Any) -> None:
        watch.mark(("forward", number))

    def end(number: int, output: Any) -> None:
        nonlocal left
        left -= 1
        watch.mark(("between", number) if left else TAIL)
        for each in tensors_in(output)[:1]:
            if each.requires_grad:
                each.register_hook(lambda _: watch.mark(("backward", number)))

    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.enter_context(around_calls(block, partial(begin, number), partial(end, number)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(watch.note_gradient)
                stack.callback(hook.remove)
        yield

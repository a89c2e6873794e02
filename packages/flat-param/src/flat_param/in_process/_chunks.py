"""Leaves over parts of a segment, for optimizers that do not know flat parameters.

An optimizer has a fixed cost per leaf. On a CPU it is fastest if a leaf and its state fit in the
cache. A GPU has no such cache, so there a segment is one leaf: for 1.1B parameters in bfloat16 on
an H200, fused AdamW took 50.9 ms over 4,213 leaves of 256 Ki elements, and 9.4 ms over one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._errors import StateError
from ..buffers._elementwise import ELEMENTWISE
from ..layout._layout import Segment
from ._flat_grad import FlatGrad
from ._flat_segment import FlatSegment

CPU_NUMEL = 1 << 18  # a float32 leaf of AdamW and its state then take 4 MiB


class _Gone:
    """Placeholder for the segment of an unflattened module."""

    @property
    def grad(self) -> FlatGrad:
        raise StateError(
            "flat_param.FlatParams.chunks: a chunk belongs to a module that was unflattened, but "
            "stepping it would train nothing. Build a new optimizer, from the parameters or from "
            "new chunks."
        )


class Chunk(nn.Parameter):
    """A leaf over a part of a segment; `grad` is the same part of the flat gradient.

    Setting `grad` to None zeroes the part. It then reads as None until the next backward through
    the segment, as a parameter's gradient does after `optimizer.zero_grad()`.
    """

    _flat_segment: FlatSegment | _Gone
    _start: int
    _cleared_at: int
    _seen: tuple[Tensor, Tensor] | None  # the flat gradient, and this part of it

    @property
    def grad(self) -> Tensor | None:
        grad = self._flat_segment.grad
        flat = grad.synced
        return None if grad.arrivals == self._cleared_at else self._tensor_slice(flat)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        tensor_slice = self._tensor_slice(self._flat_segment.grad.synced)
        if value is None:
            tensor_slice.zero_()
            self._cleared_at = self._flat_segment.grad.arrivals
        else:
            tensor_slice.copy_(value)
            self._cleared_at = -1

    @property
    def segment(self) -> FlatSegment:
        """The segment that it is a part of."""
        assert isinstance(self._flat_segment, FlatSegment)
        return self._flat_segment

    def _tensor_slice(self, flat: Tensor) -> Tensor:
        if self._seen is None or self._seen[0] is not flat:
            self._seen = flat, flat[self._start : self._start + self.numel()]
        return self._seen[1]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter, since a chunk without its segment is only a tensor."""
        return nn.Parameter(self.detach().clone()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy as a plain parameter, for the same reason."""
        copied = nn.Parameter(self.detach().clone())
        memo[id(self)] = copied
        return copied


def default_numel(device: torch.device, total: int) -> int:
    """Return the default number of elements per leaf, at least 1.

    Args:
        device: of the segment.
        total: its elements.
    """
    return CPU_NUMEL if device.type == "cpu" else max(total, 1)


class Chunks:
    """The chunks of one module; they follow new plans with equal sizes of trainable segments."""

    def __init__(self) -> None:
        self._all: list[Chunk] = []

    def make(self, segments: Iterable[FlatSegment], numel: int | None) -> list[Chunk]:
        """Make leaves of at most `numel` elements over the trainable segments.

        None: as many as `default_numel` says.
        """
        _check_loaded_states()
        made = []
        for segment in segments:
            total = segment.plan.layout.numel
            size = default_numel(segment.buffer.device, total) if numel is None else numel
            for start in range(0, total, size):
                made.append(_make_chunk(segment, start, min(start + size, total)))
        self._all += made
        return made

    def check(self, now: Iterable[FlatSegment], plans: Iterable[Segment]) -> None:
        """Refuse a new plan that existing leaves cannot follow.

        Raises:
            StateError: there are leaves, and the trainable segments would have other sizes.
        """
        numels = [segment.plan.layout.numel for segment in now]
        if self._all and numels != [plan.layout.numel for plan in plans if plan.trainable]:
            raise StateError(
                "flat_param.FlatParams: the trainable segments changed, but chunks are in use. "
                "Call flat_param.unflatten(module), flatten it again, and build a new optimizer."
            )

    def follow(self, before: Iterable[FlatSegment], now: Iterable[FlatSegment]) -> None:
        """Point every leaf at the segment that replaces its segment."""
        after = dict(zip(before, now, strict=False))
        for chunk in self._all:
            _attach(chunk, after[chunk.segment], chunk._start)

    def detach(self) -> None:
        """Detach the leaves from their segments, so that stepping them raises an error."""
        for chunk in self._all:
            chunk._flat_segment, chunk._seen = _Gone(), None
        self._all = []


_checked: WeakSet[Optimizer] = WeakSet()
_hooked: WeakSet[Optimizer] = WeakSet()


@cache
def _check_loaded_states() -> None:
    """Check the shapes of optimizer state before steps, from the first chunk on."""
    register_optimizer_step_pre_hook(_check_state)


def _check_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse state of separate parameters in the first step, and in the first after each load.

    torch loads state by position and compares no shapes. Fused kernels then read as many elements
    of the state as the chunk has, beyond the state's end. Optimizers that are not torch's may have
    state of any shape.
    """
    if optimizer in _checked:
        return
    classes = type(optimizer).__mro__  # offloading adds a class of this package
    own = next(cls for cls in classes if not cls.__module__.startswith("flat_param."))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params if own in ELEMENTWISE else ():
        for key, value in optimizer.state.get(param, {}).items() if type(param) is Chunk else ():
            if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                raise StateError(
                    f"flat_param.FlatParams.chunks: optimizer state '{key}' has shape "
                    f"{tuple(value.shape)}, but the chunk that it was loaded for has "
                    f"{tuple(param.shape)}: it was saved over separate parameters. Nothing was "
                    "stepped. Load it with flat.load_optimizer_state(optimizer, state)."
                )
    _checked.add(optimizer)
    if optimizer not in _hooked:
        _hooked.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_checked.discard)


def _make_chunk(flat_segment: FlatSegment, start: int, stop: int) -> Chunk:
    """Make a leaf over `[start, stop)` of a segment."""
    chunk = Chunk(flat_segment.buffer[start:stop], requires_grad=True)
    _attach(chunk, flat_segment, start)
    return chunk


@torch.no_grad()
def _attach(chunk: Chunk, flat_segment: FlatSegment, start: int) -> None:
    """Point a leaf at a segment's present buffer."""
    chunk._flat_segment, chunk._start, chunk._cleared_at, chunk._seen = flat_segment, start, 0, None
    chunk.data = flat_segment.buffer[start : start + chunk.numel()]

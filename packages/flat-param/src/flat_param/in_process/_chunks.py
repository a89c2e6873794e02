"""Leaves over parts of a segment, for optimizers that do not know flat parameters.

An optimizer has a fixed cost per leaf. On a CPU it is fastest if a leaf and its state fit in the
cache. A GPU has no such cache, so there a segment is one leaf: for 1.1B parameters in bfloat16 on
an H200, fused AdamW took 50.9 ms over 4,213 leaves of 256 Ki elements, and 9.4 ms over one.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._errors import StateError
from .._torch_compat import unhooked_step
from ..buffers._optimizers import ELEMENTWISE, trial_of
from ._flat_segment import FlatSegment
from ._flat_segments import FlatSegments

CPU_NUMEL = 1 << 18  # a float32 leaf of AdamW and its state then take 4 MiB
_STEPS = 3  # in the comparison of steps over flat and over separate parameters


class Chunk(nn.Parameter):
    """A leaf over a part of a segment; `grad` is the same part of the flat gradient.

    Setting `grad` to None zeroes the part. It then reads as None until the next backward through
    the segment, as a parameter's gradient does after `optimizer.zero_grad()`.
    """

    _flat_segment: FlatSegment
    _start: int
    _cleared_at: int
    _seen: tuple[Tensor, Tensor] | None  # the flat gradient, and this part of it

    @property
    def grad(self) -> Tensor | None:
        flat = self._flat_segment.synced_grad
        if flat is None:
            flat = self._compared_grad()
        is_cleared = self._flat_segment.arrivals == self._cleared_at
        return None if is_cleared else self._tensor_slice(flat)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        flat = self._flat_segment.synced_grad
        if flat is None:
            flat = self._compared_grad()
        if value is None:
            self._tensor_slice(flat).zero_()
            self._cleared_at = self._flat_segment.arrivals
        else:
            self._tensor_slice(flat).copy_(value)
            self._cleared_at = -1

    def _compared_grad(self) -> Tensor:
        """The flat gradient after a comparison with the module, which may plan again."""
        self._flat_segment.sync()
        return self._flat_segment.grad

    def _tensor_slice(self, flat: Tensor) -> Tensor:
        if self._seen is None or self._seen[0] is not flat:
            self._seen = flat, flat[self._start : self._start + self.numel()]
        return self._seen[1]

    @torch.no_grad()
    def attach(self, segment: FlatSegment) -> None:
        """Become a part of a segment; of the new one after a new plan."""
        self._flat_segment, self._cleared_at, self._seen = segment, 0, None
        self.data = segment.buffer[self._start : self._start + self.numel()]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter, since a chunk without its segment is only a tensor."""
        return nn.Parameter(self.detach().clone()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy as a plain parameter, for the same reason."""
        copied = nn.Parameter(self.detach().clone())
        memo[id(self)] = copied
        return copied


def make_chunks(segments: FlatSegments, numel: int | None) -> list[Chunk]:
    """Make leaves of at most `numel` elements over the trainable segments.

    None: 256 Ki elements on a CPU, one leaf for each segment on other devices.
    """
    _watch_steps()
    made = []
    for segment in segments.trainable:
        total = segment.plan.layout.numel
        default = CPU_NUMEL if segment.buffer.device.type == "cpu" else max(total, 1)
        size = default if numel is None else numel
        for start in range(0, total, size):
            chunk = Chunk(segment.buffer[start : start + size], requires_grad=True)
            chunk._start = start
            chunk.attach(segment)
            made.append(chunk)
    segments.chunks += made
    return made


@cache
def _watch_steps() -> None:
    """Look at chunks and at their state at each optimizer step, from the first chunk on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


_checked: WeakSet[Optimizer] = WeakSet()
_hooked: WeakSet[Optimizer] = WeakSet()


def _chunks_of(optimizer: Optimizer) -> list[Chunk]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [param for param in params if type(param) is Chunk]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Compare modules and gradients with their plans.

    In the first step and after each load, the optimizer and its state are checked, too.
    """
    chunks = _chunks_of(optimizer)
    for segment in dict.fromkeys(chunk._flat_segment for chunk in chunks):
        segment.sync()
        if not torch.compiler.is_compiling():
            segment.take_grads()
    if not chunks or optimizer in _checked:
        return
    for chunk in chunks:
        _check_state(optimizer, chunk)
    if optimizer not in _hooked:
        if _own_class(optimizer) not in ELEMENTWISE and not torch.compiler.is_compiling():
            _check_optimizer(optimizer)
        _hooked.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_checked.discard)
    _checked.add(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise the versions of the parameters, so that a backward notices the step."""
    if torch.compiler.is_compiling():
        return
    written: dict[FlatSegment, list[tuple[int, int]]] = {}
    for chunk in _chunks_of(optimizer):
        if chunk.grad is not None:
            start, stop = chunk._start, chunk._start + chunk.numel()
            ranges = written.setdefault(chunk._flat_segment, [])
            if ranges and ranges[-1][1] == start:
                start, _ = ranges.pop()
            ranges.append((start, stop))
    for segment, ranges in written.items():
        for start, stop in ranges:
            segment.raise_versions(start, stop)


def _own_class(optimizer: Optimizer) -> type:
    """The class without what this package adds for offloading."""
    classes = type(optimizer).__mro__
    return next(cls for cls in classes if not cls.__module__.startswith("flat_param."))


def _check_state(optimizer: Optimizer, chunk: Chunk) -> None:
    """Refuse state of separate parameters.

    torch loads state by position and compares no shapes. Fused kernels then read as many elements
    of the state as the chunk has, beyond the state's end. Optimizers that are not torch's may have
    state of any shape.
    """
    if _own_class(optimizer) in ELEMENTWISE:
        for key, value in optimizer.state.get(chunk, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != chunk.shape:
                raise StateError(
                    f"flat_param.FlatParams.chunks: optimizer state '{key}' has shape "
                    f"{tuple(value.shape)}, but the chunk that it was loaded for has "
                    f"{tuple(chunk.shape)}: it was saved over separate parameters. Nothing was "
                    "stepped. Load it with flat.load_optimizer_state(optimizer, state)."
                )


def _check_optimizer(optimizer: Optimizer) -> None:
    """Raise if steps over one flat parameter and over separate ones differ.

    A chunk crosses the boundaries of parameters and has no shape. That changes nothing for
    optimizers that work element by element, or that add up over all parameters, such as LBFGS. It
    does for those that look at one parameter: Adafactor, Muon, LAMB.

    An optimizer that draws random numbers, whose copy cannot step, or that has other objects than
    numbers and texts is not checked.
    """
    values = [torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([[-0.1, 0.4], [4.0, 1.0]])]
    flat = [torch.cat([value.flatten() for value in values])]
    with torch.random.fork_rng(devices=[]):
        try:
            together, again, apart = (
                _stepped(optimizer, params, seed)
                for params, seed in ((flat, 0), (flat, 1), (values, 0))
            )
        except Exception:
            return
    is_random = not torch.equal(together, again)
    if not is_random and not torch.allclose(together, apart, rtol=1e-9, atol=0):
        raise StateError(
            f"flat_param.FlatParams.chunks: {type(optimizer).__name__} computes with each "
            "parameter as a whole, but a chunk has elements of several parameters, without their "
            "shapes. Nothing was stepped. Make this optimizer over module.parameters()."
        )


def _stepped(optimizer: Optimizer, values: list[Tensor], seed: int) -> Tensor:
    """The elements of parameters with these values, in float64, after steps of a copy."""
    torch.manual_seed(seed)
    params = [nn.Parameter(value.double()) for value in values]
    twin = trial_of(optimizer, [params])
    for step in range(_STEPS):
        for param in params:
            param.grad = param.detach().square() - step
        unhooked_step(type(optimizer))(twin)
    return torch.cat([param.detach().flatten() for param in params])

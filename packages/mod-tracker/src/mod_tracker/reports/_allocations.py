"""Allocated bytes by module, and live bytes, through a dispatch mode.

Note [Storages]
A tensor's bytes are those of its storage, which views share. A storage is counted when an operator
returns it that did not get it as an argument. It counts as freed when its last tensor is freed,
which a weak reference reports. Storages from before the measurement are not counted.
A storage that is resized, as FSDP2 does to free a parameter and allocate it again, is counted as
freed and allocated. No operator does this, so `UntypedStorage.resize_` is patched.

Note [What was alive at the peak]
Only the end of the measurement shows which moment was the peak. So each storage has the number of
its allocation, and a freed storage is recorded if it was alive at the highest peak so far. A higher
peak clears those records.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path as FilePath
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._attribution import BACKWARD, Attribution
from .._edges import tensors_in
from .._errors import OptionError
from .._names import walk
from .._record import Call
from .._torch_compat import (
    buffers_of,
    is_composite,
    is_higher_order,
    parameters_of,
    views_are_noted,
    without_torch_function,
)
from ._causes import ACTIVATIONS, GRADIENTS, LOGITS, OPTIMIZER, PARAMETERS, LogitsAndLoss
from ._mode import MeasuringMode, has_own_way, measuring
from ._phase_totals import PhaseTotals

Stored = tuple[torch.Tensor, torch.UntypedStorage]
"""A tensor and its storage."""


class Made(NamedTuple):
    """Where a storage was allocated, and the tensor that it was allocated for."""

    call: Call
    phase: str
    line: str
    shape: tuple[int, ...]
    dtype: str


class Allocation(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage that an operator returned.

    Attributes:
        key: `id` of the storage.
        size: bytes of the storage; 0 if it existed before the measurement.
        number: number of the allocation; see Note [What was alive at the peak].
        cause: one of `CAUSES`, or "" while unknown.
        made: where it was allocated, if lines are recorded.
    """

    __slots__ = ("cause", "key", "made", "number", "size")
    key: int
    size: int
    number: int
    cause: str
    made: Made | None


class AllocationMode(MeasuringMode):
    """Tracks the storages that operators allocate.

    Attributes:
        live: bytes allocated since the start and not freed.
        peak: largest value of `live`.
        peaks: largest value of `live` while a module ran, by name.
        allocated: bytes by module and phase.
        saw_any: whether any operator ran.
        optimizers: optimizers whose `step` was called.
        went_back: whether a backward ran since this was set to False.
        known: live storages by `id`.

    Args:
        attribution: of the tracker.
        changed: called with `live` whenever it changes.
        lines: whether to record where each storage is allocated.
    """

    def __init__(
        self,
        attribution: Attribution,
        *,
        changed: Callable[[int], None] | None = None,
        lines: bool = False,
    ) -> None:
        super().__init__(attribution)
        self.live = self.peak = 0
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.allocated = PhaseTotals()
        self.saw_any = self.went_back = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.logits = LogitsAndLoss()
        self._in_step = False
        self._changed, self._lines = changed, lines
        self.known: dict[int, Allocation] = {}
        self._number = self._peak_number = 0
        self._gone_since_peak: list[Allocation] = []
        self._plain: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and has_own_way(types):
            return self.pass_on(func, types, args, kwargs)
        if types and self.is_tried_out(types):
            return func(*args, **kwargs)
        if self.attribution.attribute_op()[1] is BACKWARD:
            self.went_back = True
        plain = self._plain.get(func)
        if plain is None:
            self.saw_any = True
            plain = not is_higher_order(func) and not is_composite(func)
            self._plain[func] = plain
        if plain:
            output = func(*args, **kwargs)
        elif is_higher_order(func):
            output = self.call_inside(func, args, kwargs)
        else:
            with views_are_noted(func):
                output = func(*args, **kwargs)
        if type(output) is torch.Tensor and output.layout is torch.strided:
            if id(storage := output.untyped_storage()) not in self.known:
                self._add([(output, storage)], args, kwargs)
            return output
        made = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        new = [stored for stored in storages_of(made) if id(stored[1]) not in self.known]
        if new:
            self._add(new, args, kwargs)
        return output

    def _add(self, made: Iterable[Stored], args: tuple, kwargs: dict[str, Any]) -> None:
        given = {id(storage) for _, storage in storages_of(tensors_in((args, kwargs)))}
        call, phase = self.attribution.locate()
        for tensor, storage in made:
            key = id(storage)
            if key in self.known:
                continue
            size = 0 if key in given else storage.nbytes()
            found = self._note(storage, size, call, phase)
            if size and self._lines:
                dtype = str(tensor.dtype).removeprefix("torch.")
                found.made = Made(call, phase, line_here(), shape_of(tensor), dtype)
        self._tell(call, phase)

    def _note(self, storage: torch.UntypedStorage, size: int, call: Call, phase: str) -> Allocation:
        found = Allocation(storage, self._forget)
        self.known[id(storage)] = found
        found.key, found.size, found.made = id(storage), size, None
        found.cause = OPTIMIZER if self._in_step else ""
        found.number = self._number = self._number + 1
        if size:
            self.live += size
            self.allocated.add(call[0].stack, phase, size)
        return found

    def _tell(self, call: Call, phase: str) -> None:
        self.logits.allocates(self._number, call, phase)
        if self.live > self.peak:
            self.peak, self._peak_number = self.live, self._number
            self._gone_since_peak.clear()
        for path in call[0].chain():
            if self.live > self.peaks[path.name]:
                self.peaks[path.name] = self.live
        if self._changed is not None:
            self._changed(self.live)

    def _forget(self, gone: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(gone, Allocation)
        if self.known.get(gone.key) is not gone:
            return
        del self.known[gone.key]
        self._free(gone)

    def _free(self, gone: Allocation) -> None:
        if gone.size:
            if gone.number <= self._peak_number:
                self._gone_since_peak.append(gone)
            self.live -= gone.size
            if self._changed is not None:
                self._changed(self.live)

    def resized(self, storage: torch.UntypedStorage, before: int, after: int) -> None:
        """Handle a storage that was resized from `before` to `after` bytes."""
        known = self.known.get(id(storage))
        size = 0 if known is None else known.size
        if known is not None:
            self._free(known)
        call, phase = self.attribution.locate()
        found = self._note(storage, max(0, size + after - before), call, phase)
        found.made = None if known is None else known.made
        self._tell(call, phase)

    def mark(self, tensors: Iterable[torch.Tensor | None], cause: str) -> dict[int, int]:
        """Set the cause of tensors; return the bytes of those that existed before, by storage."""
        before = {}
        stored = storages_of(tensor for tensor in tensors if tensor is not None)
        for key, size in ((id(storage), storage.nbytes()) for _, storage in stored):
            found = self.known.get(key)
            if found is not None and found.size:
                found.cause = cause
            else:
                before[key] = size
        return before

    def at_peak(self) -> Counter[str]:
        """Return the bytes that were alive at the peak, by cause."""
        alive = [found for found in self.known.values() if found.number <= self._peak_number]
        causes: Counter[str] = Counter()
        for found in [*alive, *self._gone_since_peak]:
            causes[self.cause_of(found)] += found.size
        return causes

    def cause_of(self, found: Allocation) -> str:
        return found.cause or (LOGITS if self.logits.has(found.number) else ACTIVATIONS)

    def by_line(self) -> Counter[tuple[str, str]]:
        """Return the live bytes by module and line, if lines are recorded."""
        alive: Counter[tuple[str, str]] = Counter()
        for found in list(self.known.values()):
            if found.made is not None:
                alive[found.made.call[0].name, found.made.line] += found.size
        return alive

    @contextmanager
    def following_optimizers(self) -> Iterator[None]:
        """Set the causes of gradients and optimizer state at every optimizer step."""

        thread = threading.get_ident()  # the hooks are called in all threads

        def before(optimizer: torch.optim.Optimizer, *step: Any) -> None:
            if threading.get_ident() != thread:
                return
            if not any(optimizer is known for known in self.optimizers):
                self.optimizers.append(optimizer)
            groups = optimizer.param_groups
            held = [each.grad for group in groups for each in group["params"]]
            self.mark(held, GRADIENTS)
            self._in_step = True

        def after(optimizer: torch.optim.Optimizer, *step: Any) -> None:
            if threading.get_ident() != thread:
                return
            self._in_step = False
            self.mark(tensors_in(dict(optimizer.state)), OPTIMIZER)

        handles = [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


_following: list[AllocationMode] = []
_lock = threading.RLock()
_torchs_resize = torch.UntypedStorage.resize_
_is_inherited = "resize_" not in vars(torch.UntypedStorage)


def _resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
    before = storage.nbytes()
    result = _torchs_resize(storage, size)
    for mode in list(_following):
        mode.resized(storage, before, storage.nbytes())
    return result


@contextmanager
def measuring_storages(
    mode: AllocationMode, hooks: saved_tensors_hooks | None = None
) -> Iterator[None]:
    """Enter the mode and the hooks, and observe resized storages. See Note [Storages]."""
    kind: Any = torch.UntypedStorage
    try:
        with _lock:
            _following.append(mode)
            if kind.resize_ is _torchs_resize:
                kind.resize_ = _resize_and_tell
        with measuring(mode, hooks):
            yield
    finally:
        with _lock:
            if mode in _following:
                _following.remove(mode)
            if not _following and kind.resize_ is _resize_and_tell:
                if _is_inherited:
                    del kind.resize_
                else:
                    kind.resize_ = _torchs_resize


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def storages_of(tensors: Iterable[torch.Tensor]) -> list[Stored]:
    """Return the tensors with their storages.

    A tensor that consists of other tensors has their storages. A `DTensor` has the storage of this
    rank's part; a quantized tensor has those of its integers and scales. Sparse tensors, and those
    with unknown parts, are left out.
    """
    found: list[Stored] = []
    for tensor in tensors:
        # Any tensor that Python holds may be passed, also one in an invalid state.
        with suppress(Exception):
            if type(tensor) in _PLAIN:
                found.append((tensor, tensor.untyped_storage()))
            else:
                with without_torch_function():
                    found += _stored_in(tensor)
    return found


def _stored_in(tensor: torch.Tensor) -> list[Stored]:
    """Return the storages of a tensor subclass: those of its inner tensors, if it has any."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or getattr(type(tensor), "__tensor_unflatten__", None) is None:
        return [(tensor, tensor.untyped_storage())]
    names, _ = flatten(tensor)
    held = (getattr(tensor, name) for name in names)
    return storages_of(each for each in held if isinstance(each, torch.Tensor))


def registered(
    roots: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield kind, module name and tensor of buffers, parameters, gradients and optimizer state."""
    for label, root in roots.items():
        for name, module in walk(root, label):
            for buffer in buffers_of(module).values():
                if buffer is not None:
                    yield "buffers", name, buffer
            for parameter in parameters_of(module).values():
                if parameter is None:
                    continue
                yield PARAMETERS, name, parameter
                if parameter.grad is not None:
                    yield GRADIENTS, name, parameter.grad
                for optimizer in optimizers:
                    for value in tensors_in(optimizer.state.get(parameter, {})):
                        yield OPTIMIZER, name, value


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; () for a strided nested tensor, which has none."""
    try:
        return tuple(tensor.shape)
    except RuntimeError:
        return ()


# With the separator: otherwise torchvision would match torch.
_OWN = f"{FilePath(__file__).parent.parent}{os.sep}"
_SKIPPED = (f"{FilePath(torch.__file__).parent}{os.sep}", _OWN, "<")


def line_here() -> str:
    """Return file and line of the innermost frame outside of torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{FilePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def check_optimizer(optimizer: Any, function: str) -> None:
    """Raise an `OptionError` unless an optimizer has state."""
    if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
        raise OptionError(
            f"mod_tracker.{function}: optimizer must be a torch optimizer with a state; "
            f"got {type(optimizer).__name__}. Pass the optimizer that trains the model."
        )

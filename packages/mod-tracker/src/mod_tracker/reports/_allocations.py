"""Allocated bytes by module, device and cause, and live bytes, through a dispatch mode.

Note [Storages]
A tensor's bytes are those of its storage, which views share. A storage is counted
- when an operator returns it that did not get it as an argument;
- when an operator first uses it, if it was made without an operator: `torch.tensor` and
  `torch.load` pass theirs to `lift_fresh` and `set_`, and memory of NumPy is not torch's.
It counts as freed when its last tensor is freed, which a weak reference reports. Other storages
from before the measurement are not counted. An operator with `out=`, and `resize_`, may change a
storage's size, so the sizes of what they write are compared. FSDP2 resizes a storage without an
operator to free a parameter and allocate it again, so `UntypedStorage.resize_` is patched.

Note [What was alive at the peak]
Only the end of the measurement shows which moment was the peak of a device. So each storage has the
number of its allocation, and a freed storage is recorded if it was alive at the highest peak so
far. A higher peak clears those records.

Note [Logits and loss]
The last layer with a weight matrix computes the logits. Its allocations, and all later ones, are
"logits and loss" until the backward reaches another module with parameters. Only the end of the
forward shows which layer is the last one. So allocations are numbered, and the ranges of numbers
that are "logits and loss" are recorded.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path as FilePath
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._attribution import BACKWARD, FORWARD, RECOMPUTE, Attribution
from .._edges import PLAIN as PLAIN_VALUES
from .._edges import tensors_in
from .._errors import OptionError
from .._names import walk
from .._record import Call, Path, root_of
from .._torch_compat import (
    buffers_of,
    current_node,
    is_composite,
    is_higher_order,
    parameters_of,
    views_are_noted,
    without_torch_function,
)
from ._mode import MeasuringMode, has_own_way, measuring, writes_results
from ._rows import PhaseTotals

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, LOGITS = "activations", "logits and loss"
CAUSES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS)
"""The five causes of memory."""

Stored = tuple[torch.Tensor, torch.UntypedStorage]
"""A tensor and its storage."""

Place = tuple[str, str, str]
"""Device, module and line that allocated a storage."""


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
        memory: memory of its device.
        bytes: bytes of the storage.
        size: bytes that count: those allocated since the measurement began.
        number: number of the allocation; see Note [What was alive at the peak].
        cause: one of `CAUSES`, or "" while unknown.
        made: where it was allocated, if lines are recorded.
    """

    __slots__ = ("bytes", "cause", "key", "made", "memory", "number", "size")
    key: int
    memory: DeviceMemory
    bytes: int
    size: int
    number: int
    cause: str
    made: Made | None


class DeviceMemory:
    """Bytes on one device.

    Attributes:
        device: such as "cpu" or "cuda:0".
        live: bytes allocated since the start and not freed.
        peak: largest value of `live`.
        peaks: largest value of `live` while a module ran, by name.
        allocated: bytes by module and phase.
        peak_number: number of the last allocation before the peak.
        gone_since_peak: storages that were alive at the peak and are freed.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.live = self.peak = self.peak_number = 0
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.allocated = PhaseTotals()
        self.gone_since_peak: list[Allocation] = []

    def reached(self, number: int, call: Call) -> None:
        """Note the live bytes after allocation `number`, in a call."""
        if self.live > self.peak:
            self.peak, self.peak_number = self.live, number
            self.gone_since_peak.clear()
        for path in call[0].chain():
            if self.live > self.peaks[path.name]:
                self.peaks[path.name] = self.live


class LogitsAndLoss:
    """Ranges of allocations that are logits or loss. See Note [Logits and loss]."""

    def __init__(self) -> None:
        self._weights: dict[Path, int] = {}
        self._spans: list[tuple[int, int]] = []
        self._call: Call | None = None
        self._root: Call | None = None
        self._start = -1

    def allocates(self, number: int, call: Call, phase: str) -> None:
        """Handle allocation number `number`, made by `call`."""
        if call is self._call or call[2] is None:
            return
        dimensions = self._weights.get(call[0])
        if dimensions is None:
            dimensions = self._weights[call[0]] = _most_dimensions(call[0])
        if not dimensions:
            return
        if phase in (BACKWARD, RECOMPUTE):
            self._close(number)
        elif phase == FORWARD and dimensions > 1:
            root = root_of(call)
            if root is not self._root:
                self._close(number)
            self._call, self._root, self._start = call, root, number

    def _close(self, number: int) -> None:
        if self._start >= 0:
            self._spans.append((self._start, number))
        self._call, self._root, self._start = None, None, -1

    def has(self, number: int) -> bool:
        if 0 <= self._start <= number:
            return True
        at = bisect_right(self._spans, (number, number)) - 1
        spans = self._spans[max(at, 0) : at + 2]
        return any(start <= number < end for start, end in spans)


def _most_dimensions(path: Path) -> int:
    module = path.module()
    held: Iterable = () if module is None else parameters_of(module).values()
    return max((each.dim() for each in held if each is not None), default=0)


class AllocationMode(MeasuringMode):
    """Tracks the storages that operators allocate.

    Attributes:
        devices: memory of each device, by name.
        saw_any: whether any operator ran.
        optimizers: optimizers whose `step` was called.
        went_back: whether a backward ran since this was set to False.
        known: live storages by `id`.

    Args:
        attribution: of the tracker.
        changed: called with the memory of a device whenever its live bytes change.
        began: called with the first node that a backward runs, and with later ones.
        lines: whether to record where each storage is allocated.
    """

    def __init__(
        self,
        attribution: Attribution,
        *,
        changed: Callable[[DeviceMemory], None] | None = None,
        began: Callable[[Any], None] | None = None,
        lines: bool = False,
    ) -> None:
        super().__init__(attribution)
        self.devices: dict[str, DeviceMemory] = {}
        self._memories: dict[torch.device, DeviceMemory] = {}
        self.saw_any = self.went_back = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.logits = LogitsAndLoss()
        self._in_step = False
        self._changed, self._began, self._lines = changed, began, lines
        self.known: dict[int, Allocation] = {}
        self._number = 0
        self._kinds: dict[Any, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and has_own_way(types):
            return self.pass_on(func, types, args, kwargs)
        if types and self.is_tried_out(types):
            return func(*args, **kwargs)
        phase = self.attribution.attribute_op()[1]
        if phase is BACKWARD:
            self.went_back = True
            if self._began is not None:
                self._began(current_node())
        kind = self._kinds.get(func)
        if kind is None:
            self.saw_any = True
            kind = self._kinds[func] = _kind_of(func)
        if kind is PLAIN:
            output = func(*args, **kwargs)
        elif kind is RESIZES:
            self._note_given(args, kwargs)
            output = func(*args, **kwargs)
        elif kind is TAKES_FUNCTIONS:
            output = self.call_inside(func, args, kwargs)
        else:
            with views_are_noted(func):
                output = func(*args, **kwargs)
        if type(output) is torch.Tensor and output.layout is torch.strided:
            known = self.known.get(id(storage := output.untyped_storage()))
            if known is None:
                self._add([(output, storage)], func, args, kwargs)
            elif kind is RESIZES and storage.nbytes() != known.bytes:
                self.resized(storage, known.bytes, storage.nbytes(), output)
            return output
        made = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        stored = storages_of(made)
        if kind is RESIZES:
            for tensor, storage in stored:
                known = self.known.get(id(storage))
                if known is not None and storage.nbytes() != known.bytes:
                    self.resized(storage, known.bytes, storage.nbytes(), tensor)
        new = [each for each in stored if id(each[1]) not in self.known]
        if new:
            self._add(new, func, args, kwargs)
        return output

    def _add(self, made: Iterable[Stored], func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the storages of an operator's results, and those that it used first."""
        call, phase = self.attribution.locate()
        fresh = func in _PASSES_ON
        touched: set[DeviceMemory] = set()
        for tensor, storage in self._unknown_in((*args, *kwargs.values()) if kwargs else args):
            if id(storage) in self.known:  # another view of it came before
                continue
            if fresh or (phase is not BACKWARD and not storage.resizable()):
                touched.add(self._count(tensor, storage, call, phase))
            else:
                self._note(storage, self._memory_of(tensor), 0, call, phase)
        for tensor, storage in made:
            if id(storage) not in self.known:
                touched.add(self._count(tensor, storage, call, phase))
        for memory in touched:
            self._tell(memory, call, phase)

    def _unknown_in(self, values: tuple) -> list[Stored]:
        """Return the tensors with storages that were not seen before."""
        found = []
        others = []
        for value in values:
            kind = type(value)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                if value.layout is torch.strided:
                    storage = value.untyped_storage()
                    if id(storage) not in self.known:
                        found.append((value, storage))
            elif kind not in PLAIN_VALUES:
                others.append(value)
        if others:
            known = self.known
            found += [each for each in storages_of(tensors_in(others)) if id(each[1]) not in known]
        return found

    def _count(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, call: Call, phase: str
    ) -> DeviceMemory:
        memory = self._memory_of(tensor)
        found = self._note(storage, memory, storage.nbytes(), call, phase)
        self._note_line(found, tensor, call, phase)
        return memory

    def _note_line(self, found: Allocation, tensor: torch.Tensor, call: Call, phase: str) -> None:
        if found.size and self._lines:
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.made = Made(call, phase, line_here(), shape_of(tensor), dtype)

    def _note_given(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the sizes of storages before an operator that may change them."""
        call, phase = self.attribution.locate()
        for tensor, storage in storages_of(tensors_in((args, kwargs))):
            if id(storage) not in self.known and storage.resizable():
                self._note(storage, self._memory_of(tensor), 0, call, phase)

    def _memory_of(self, tensor: torch.Tensor) -> DeviceMemory:
        memory = self._memories.get(tensor.device)
        if memory is None:
            memory = self._memories[tensor.device] = self._memory_on(str(tensor.device))
        return memory

    def _memory_on(self, device: str) -> DeviceMemory:
        if device not in self.devices:
            self.devices[device] = DeviceMemory(device)
        return self.devices[device]

    def _note(
        self, storage: torch.UntypedStorage, memory: DeviceMemory, size: int, call: Call, phase: str
    ) -> Allocation:
        found = Allocation(storage, self._forget)
        self.known[id(storage)] = found
        found.key, found.memory, found.size, found.made = id(storage), memory, size, None
        found.bytes = storage.nbytes()
        found.cause = OPTIMIZER if self._in_step else ""
        found.number = self._number = self._number + 1
        if size:
            memory.live += size
            memory.allocated.add(call[0].stack, phase, size)
        return found

    def _tell(self, memory: DeviceMemory, call: Call, phase: str) -> None:
        self.logits.allocates(self._number, call, phase)
        memory.reached(self._number, call)
        if self._changed is not None:
            self._changed(memory)

    def _forget(self, gone: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(gone, Allocation)
        if self.known.get(gone.key) is not gone:
            return
        del self.known[gone.key]
        self._free(gone)

    def _free(self, gone: Allocation) -> None:
        if gone.size:
            memory = gone.memory
            if gone.number <= memory.peak_number:
                memory.gone_since_peak.append(gone)
            memory.live -= gone.size
            if self._changed is not None:
                self._changed(memory)

    def resized(
        self,
        storage: torch.UntypedStorage,
        before: int,
        after: int,
        tensor: torch.Tensor | None = None,
    ) -> None:
        """Handle a storage that was resized from `before` to `after` bytes, by its tensor if known.

        A storage without a tensor keeps the place that allocated it.
        """
        known = self.known.get(id(storage))
        size = 0 if known is None else known.size
        if known is not None:
            self._free(known)
        memory = self._memory_on(str(storage.device)) if known is None else known.memory
        call, phase = self.attribution.locate()
        found = self._note(storage, memory, max(0, size + after - before), call, phase)
        found.made = None if known is None else known.made
        if tensor is not None:
            self._note_line(found, tensor, call, phase)
        self._tell(memory, call, phase)

    def mark(
        self, tensors: Iterable[torch.Tensor | None], cause: str
    ) -> dict[int, tuple[str, int]]:
        """Set the cause of tensors; return device and bytes of earlier storages, by `id`."""
        before = {}
        for tensor, storage in storages_of(tensor for tensor in tensors if tensor is not None):
            found = self.known.get(id(storage))
            if found is not None and found.size:
                found.cause = cause
            else:
                before[id(storage)] = device_of(tensor), storage.nbytes()
        return before

    def at_peak(self, memory: DeviceMemory) -> Counter[str]:
        """Return the bytes that were alive at the peak of a device, by cause."""
        alive = [
            found
            for found in self.known.values()
            if found.memory is memory and found.number <= memory.peak_number
        ]
        causes: Counter[str] = Counter()
        for found in [*alive, *memory.gone_since_peak]:
            causes[self.cause_of(found)] += found.size
        return causes

    def cause_of(self, found: Allocation) -> str:
        return found.cause or (LOGITS if self.logits.has(found.number) else ACTIVATIONS)

    def by_line(self) -> Counter[Place]:
        """Return the live bytes by device, module and line, if lines are recorded."""
        alive: Counter[Place] = Counter()
        for found in list(self.known.values()):
            if found.made is not None:
                place = found.memory.device, found.made.call[0].name, found.made.line
                alive[place] += found.size
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


PLAIN, RESIZES, TAKES_FUNCTIONS, COMPOSITE = "plain", "resizes", "takes functions", "composite"

_ATEN = torch.ops.aten
_PASSES_ON = {
    _ATEN.lift_fresh.default,
    _ATEN.set_.source_Storage,
    _ATEN.set_.source_Storage_storage_offset,
}
"""Operators that get a storage which no operator made."""


def _kind_of(operator: Any) -> str:
    if is_higher_order(operator):
        return TAKES_FUNCTIONS
    if is_composite(operator):
        return COMPOSITE
    return RESIZES if writes_results(operator) or operator is _ATEN.resize_.default else PLAIN


def device_of(tensor: torch.Tensor) -> str:
    """Return a tensor's device by name; a fake tensor's storage says "meta"."""
    return str(tensor.device)


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
def measuring_storages(mode: AllocationMode) -> Iterator[None]:
    """Enter the mode, and observe resized storages. See Note [Storages]."""
    kind: Any = torch.UntypedStorage
    try:
        with _lock:
            _following.append(mode)
            if kind.resize_ is _torchs_resize:
                kind.resize_ = _resize_and_tell
        with measuring(mode):
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


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def storages_of(tensors: Iterable[torch.Tensor]) -> list[Stored]:
    """Return the tensors with their storages.

    A tensor that consists of other tensors has their storages. A `DTensor` has the storage of this
    rank's part; a quantized tensor has those of its integers and scales; a sparse tensor has those
    of its indices and values. Tensors with unknown parts are left out.
    """
    found: list[Stored] = []
    for tensor in tensors:
        # Any tensor that Python holds may be passed, also one in an invalid state.
        with suppress(Exception):
            if tensor.layout is not torch.strided:
                found += [(part, part.untyped_storage()) for part in _sparse_parts(tensor)]
            elif type(tensor) in _PLAIN_TENSORS:
                found.append((tensor, tensor.untyped_storage()))
            else:
                with without_torch_function():
                    found += _stored_in(tensor)
    return found


def _sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors in a sparse tensor; () for other layouts."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


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

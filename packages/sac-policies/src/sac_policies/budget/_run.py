"""Record a forward, or a whole step: calls, tensors, saved tensors, and their lifetimes.

Nothing is checkpointed. Saved-tensor hooks record what autograd saves, reads and releases; weak
references record when tensors and storages are freed. A `Trace` is made from such a run, and
`_rehearsal` predicts from it what the tape would hold under a plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from .._tensors import is_accelerator, tensors_in
from .._torch_compat import FAKE_TENSOR, in_fake_mode, lies_in_storage, storage_under
from .._torch_compat._dispatch import below_autograd, is_called_by_library
from .._watching_mode import WatchingMode
from ..eager._fsdp import RANGE_OPS, Ranges
from ..eager._tape import parts_of
from ..policies._flops import flops_of
from ..policies._operators import facts_of
from ..policies._plans import Unit
from ._measure import Marks

_IN_PLACE = frozenset(
    (
        torch.ops.aten.add.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_add.default,
        torch.ops.aten.masked_scatter.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter.value,
        torch.ops.aten.scatter_add.default,
    )
)
"""Operators by which backward writes to their first argument while no mode looks on."""
BACKWARD = "backward"
"""Key of what happens from the end of forward, the loss included, until the next mark."""
Event = tuple[Literal["call", "gone", "free", "save", "read", "release", "end"], int]
"""What happened to a call, a tensor, a storage or a saved tensor, by number; "end" is the end of
the forward."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor, by number, among the arguments and results of calls."""

    number: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a tensor; sparse and nested ones count as empty views of their storage.

    Attributes:
        storage: number of its storage; -1 for a tensor without one.
        size: its sizes.
        stride: its strides.
        offset: first element in the storage.
        dtype: of its elements.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RunCall:
    """One operator call, in forward or backward.

    Attributes:
        op: the operator.
        args: positional arguments, with a `Place` for each tensor.
        kwargs: keyword arguments, likewise.
        inputs: numbers of the tensors among them.
        out: its result, likewise.
        written: storages that it wrote to, by its schema.
        made: numbers of the storages that it made.
        records: whether gradients were enabled, or a library's autograd formula called it.
        most_bytes: peak of its allocations, over the bytes before it.
        cost: work to run it again, in the recorder's unit.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    out: Any
    written: tuple[int, ...]
    made: range
    records: bool
    most_bytes: int
    cost: int


@dataclass(frozen=True, slots=True)
class Save:
    """One tensor that autograd saved.

    Attributes:
        number: of the tensor.
        read_as: number of the tensor that backward reads.
        needs_grad: whether it was part of the graph.
    """

    number: int
    read_as: int
    needs_grad: bool


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        calls: all operator calls, in order.
        layouts: of all tensors, by number.
        sizes: bytes of all storages, by number; 0 for those from before.
        saves: tensors that autograd saved.
        events: all events, in order.
    """

    calls: list[RunCall] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def forward(self) -> Iterator[RunCall]:
        """Yield the forward's calls that do work, without bookkeeping and FSDP's own operators."""
        ranges = Ranges()
        for kind, number in self.events:
            if kind == "end":
                return
            if kind != "call":
                continue
            call = self.calls[number]
            if call.op in RANGE_OPS:
                ranges.follow(call.op, call.args)
            if not (facts_of(call.op).bookkeeping or ranges.inside):
                yield call


class Recorder(WatchingMode):
    """Records a run.

    Args:
        unit: unit of the work of a call; None for no measurement.
        marks: divides allocations at each call; None if they are not measured.
    """

    def __init__(self, unit: Unit | None = None, marks: Marks | None = None) -> None:
        super().__init__()
        self._run = Run()
        self._unit, self._marks = unit, marks
        self._known: dict[int, _Known] = {}
        self._storages = WeakIdKeyDictionary()
        self._watched: list[ref[torch.UntypedStorage]] = []
        self._read: dict[Layout, list[int]] = {}
        self._is_own = False
        self._in_backward = False

    def record(self, function: Callable[[], object]) -> Run:
        """Call a function, which calls `forward`, and return the record."""

        def recorded() -> None:
            with self, saved_tensors_hooks(self._pack, self._unpack):
                function()

        if self._marks is None:
            recorded()
            return self._run
        most = {each.key: each.most for each in self._marks.intervals(recorded)}
        calls = enumerate(self._run.calls)
        return replace(self._run, calls=[replace(call, most_bytes=most[at]) for at, call in calls])

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward, and record its end."""
        out = function(*args, **kwargs)
        self._run.events.append(("end", 0))
        return out

    def mark(self, key: Any) -> None:
        """Record the beginning of backward."""
        self._in_backward = key == BACKWARD

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if self._is_own:
            return func(*args, **given)
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a tensor subclass calls operators on its inner tensors
        if FAKE_TENSOR in types and not in_fake_mode():
            return func(*args, **given)  # DTensor uses fake tensors to propagate shardings
        run, at = self._run, len(self._run.calls)
        records = torch.is_grad_enabled() or is_called_by_library(2)
        inputs = tuple(map(self._number, tensors_in((args, given))))
        placed = tuple(_mapped(each, self._place) for each in args)
        named = {name: _mapped(each, self._place) for name, each in given.items()}
        written = tuple(map(self._storage_of, facts_of(func).written(args, given)))
        if self._marks is not None:
            self._marks.mark(at)
        began = self._clock(args)
        out = func(*args, **given)
        cost = self._clock(out) - began
        if self._unit == "flops":
            cost = flops_of(func, args, given, out) or sum(t.numel() for t in tensors_in(out))
        if self._marks is not None:
            self._marks.mark(None)
        first = len(run.sizes)
        results = _mapped(out, self._result)
        made = range(first, len(run.sizes))
        size = sum(run.sizes[first:])
        call = RunCall(func, placed, named, inputs, results, written, made, records, size, cost)
        run.calls.append(call)
        run.events.append(("call", at))
        return out

    def _clock(self, values: Any) -> int:
        if self._unit != "ns":
            return 0
        for device in filter(is_accelerator, {tensor.device for tensor in tensors_in(values)}):
            getattr(torch, device.type).synchronize(device)
        return time.perf_counter_ns()

    # Tensors and storages

    def _place(self, tensor: torch.Tensor) -> Place:
        return Place(self._number(tensor))

    def _storage_of(self, tensor: torch.Tensor) -> int:
        return self._run.layouts[self._number(tensor)].storage

    def _result(self, tensor: torch.Tensor) -> Place:
        """Number a result. Storages that were unknown before were made by this call."""
        storage = storage_under(tensor)
        if storage is not None and storage not in self._storages:
            self._new_storage(storage, storage.nbytes())
        return Place(self._number(tensor))

    def _number(self, tensor: torch.Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is not None and known() is tensor:
            return known.number
        layout = self._layout(tensor)
        reads = self._read.get(layout) if layout.storage >= 0 else None
        # Autograd unpacks a separate tensor for each saved one.
        number = reads.pop(0) if reads else self._new(layout)
        seen = _Known(tensor, self._gone)
        seen.number = number
        self._known[id(tensor)] = seen
        return number

    def _new(self, layout: Layout) -> int:
        self._run.layouts.append(layout)
        return len(self._run.layouts) - 1

    def _layout(self, tensor: torch.Tensor) -> Layout:
        storage, number = storage_under(tensor), -1
        if storage is not None:
            if storage not in self._storages:
                self._new_storage(storage, 0)
            number = self._storages[storage]
        if not lies_in_storage(tensor):
            return Layout(number, (0,), (1,), 0, tensor.dtype)
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return Layout(number, size, stride, int(tensor.storage_offset()), tensor.dtype)

    def _new_storage(self, storage: torch.UntypedStorage, size: int) -> None:
        number = self._storages[storage] = len(self._run.sizes)
        self._run.sizes.append(size)
        self._watched.append(ref(storage, partial(self._freed, number)))

    def _gone(self, known: Any) -> None:
        self._run.events.append(("gone", known.number))

    def _freed(self, number: int, _: object) -> None:
        self._run.events.append(("free", number))
        self._settle_in_place(number)

    def _settle_in_place(self, storage: int) -> None:
        """Record a result as if it reused the memory that backward would overwrite.

        Without a mode, autograd adds a gradient in place if nothing else holds the first one, and a
        few formulas write in place too. Under a mode a new tensor is allocated, and the old one is
        freed at once.
        """
        events, layouts = self._run.events, self._run.layouts
        at = len(events) - 1
        gone = []
        while at >= 0 and events[at][0] in ("gone", "free"):
            kind, number = events[at]
            if kind == "gone" and layouts[number].storage == storage:
                gone.append(number)
            at -= 1
        if not self._in_backward or at < 0 or events[at][0] != "call":
            return
        call = self._run.calls[events[at][1]]
        # A view keeps its base alive, so autograd does not write to it.
        if call.op in _IN_PLACE and gone == [call.inputs[0]]:
            events.append(events.pop(at))

    # Saved tensors

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        """Record that autograd saves a tensor; hold an alias that is not a view of it."""
        places = []
        for part in parts_of(tensor):
            number = self._number(part)
            read_as = self._new(self._run.layouts[number])
            self._run.events.append(("save", len(self._run.saves)))
            places.append(len(self._run.saves))
            self._run.saves.append(Save(number, read_as, part.requires_grad))
        return _Saved(self._alias(tensor), places, self._released)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        self._is_own = True
        try:
            with below_autograd():
                return tensor.detach()
        finally:
            self._is_own = False

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        """Record that backward reads a tensor; return an alias that lives as long as it is read."""
        for at in saved.places:
            save = self._run.saves[at]
            self._run.events.append(("read", at))
            self._read.setdefault(self._run.layouts[save.number], []).append(save.read_as)
        return self._alias(saved.tensor)

    def _released(self, places: list[int]) -> None:
        self._run.events.extend(("release", at) for at in places)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FAKE_TENSOR))


class _Known(ref[torch.Tensor]):
    """A numbered tensor."""

    __slots__ = ("number",)
    number: int


class _Saved:
    """A saved tensor as autograd holds it.

    Attributes:
        tensor: an alias of it.
        places: its positions among the saves: one, or one per inner tensor of a wrapper.
        note: callback for its release.
    """

    def __init__(
        self, tensor: torch.Tensor, places: list[int], note: Callable[[list[int]], None]
    ) -> None:
        self.tensor, self.places, self.note = tensor, places, note

    def __del__(self) -> None:
        self.note(self.places)


def _mapped(value: Any, way: Callable[[torch.Tensor], Place]) -> Any:
    if isinstance(value, torch.Tensor):
        return way(value)
    if isinstance(value, (list, tuple)):
        return [_mapped(each, way) for each in value]
    return value

"""Records one training step as a value: operator calls, tensors, saved values, and their ends.

Nothing is checkpointed in the step. Saved-tensor hooks note what autograd saves, reads and
releases; weak references note when tensors and storages are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from .._tensors import tensors_in
from .._torch_compat import lies_in_storage, storage_under
from .._torch_compat._dispatch import below_autograd, is_called_by_library
from .._watching_mode import WatchingMode
from ..eager._fsdp import RANGE_OPS, Ranges
from ..eager._tape import parts_of
from ..policies._operators import facts_of
from ._measure import Marks
from ._record import is_propagation, is_taken_apart
from ._step import BACKWARD, Step

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
Event = tuple[Literal["call", "gone", "free", "save", "read", "release", "end"], int]
"""What happened to a call, a tensor, a storage or a saved tensor, by number; "end" is that of the
model's forward."""


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for a tensor, by number, in the arguments and results of calls."""

    number: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory.

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
class StepCall:
    """One operator call, in forward or backward.

    Attributes:
        op: the operator.
        args: positional arguments, with a `Place` for each tensor.
        kwargs: keyword arguments, likewise.
        inputs: numbers of the tensors among them.
        out: what it returned, likewise.
        records: whether gradients were on, or a library took care of them.
        most_bytes: most that was allocated while it ran, over what there was before.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    out: Any
    records: bool
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Save:
    """One tensor that autograd saved.

    Attributes:
        number: of the tensor.
        read_as: number of the tensor that backward reads in its place.
        needs_grad: whether it was part of the graph.
    """

    number: int
    read_as: int
    needs_grad: bool


@dataclass(frozen=True)
class StepRun:
    """What happened in a step.

    Attributes:
        calls: all operator calls, in order.
        layouts: of all tensors, by number.
        sizes: bytes of all storages, by number; 0 for those from before the step.
        saves: what autograd saved.
        events: what happened, in order.
    """

    calls: list[StepCall] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def names(self) -> list[str]:
        """Names of the operators that the forward ran, without bookkeeping."""
        found: list[str] = []
        ranges = Ranges()
        for kind, number in self.events:
            if kind == "end":
                break
            if kind != "call":
                continue
            call = self.calls[number]
            if call.op in RANGE_OPS:
                ranges.follow(call.op, call.args)
            if not (facts_of(call.op).bookkeeping or ranges.inside):
                found.append(str(call.op))
        return found


def recorded(step: Step) -> StepRun:
    """Run a step and record it; the allocator is asked around each call. Collective."""
    marks = None if step.is_dry else Marks(step.device)
    recorder = _StepRecorder(marks)

    def run() -> None:
        with recorder, saved_tensors_hooks(recorder.pack, recorder.unpack):
            step.run(partial(recorder.forward, step.model), recorder)

    if marks is None:
        run()
        return recorder.run
    most = {each.key: each.most for each in marks.intervals(run)}
    calls = [replace(call, most_bytes=most[at]) for at, call in enumerate(recorder.run.calls)]
    return replace(recorder.run, calls=calls)


class _Known(ref[torch.Tensor]):
    """A tensor that has a number."""

    __slots__ = ("number",)
    number: int


class _Saved:
    """What autograd holds of a saved tensor.

    Attributes:
        tensor: an alias of it.
        places: its places among the saves: one, or those of the tensors inside a wrapper.
        note: called when it is released.
    """

    def __init__(
        self, tensor: torch.Tensor, places: list[int], note: Callable[[list[int]], None]
    ) -> None:
        self.tensor, self.places, self.note = tensor, places, note

    def __del__(self) -> None:
        self.note(self.places)


class _StepRecorder(WatchingMode):
    """Records a step.

    Attributes:
        run: what has happened so far.
    """

    def __init__(self, marks: Marks | None) -> None:
        super().__init__()
        self.run = StepRun()
        self._marks = marks
        self._known: dict[int, _Known] = {}
        self._storages = WeakIdKeyDictionary()
        self._watched: list[ref[torch.UntypedStorage]] = []
        self._read: dict[Layout, int] = {}
        self._is_own = False
        self._in_backward = False

    def mark(self, key: Any) -> None:
        """Note that backward begins."""
        self._in_backward = key == BACKWARD

    def forward(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model, and note its end."""
        out = model(*args, **kwargs)
        self.run.events.append(("end", 0))
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if self._is_own:
            return func(*args, **given)
        if is_taken_apart(types):
            return NotImplemented
        if is_propagation(types):
            return func(*args, **given)
        run, at = self.run, len(self.run.calls)
        records = torch.is_grad_enabled() or is_called_by_library(2)
        inputs = tuple(map(self._number, tensors_in((args, given))))
        placed = tuple(_mapped(each, self._place) for each in args)
        named = {name: _mapped(each, self._place) for name, each in given.items()}
        if self._marks is not None:
            self._marks.mark(at)
        out = func(*args, **given)
        if self._marks is not None:
            self._marks.mark(None)
        before = len(run.sizes)
        made = _mapped(out, partial(self._result, {run.layouts[n].storage for n in inputs}))
        size = sum(run.sizes[before:])
        run.calls.append(StepCall(func, placed, named, inputs, made, records, size))
        run.events.append(("call", at))
        return out

    def _place(self, tensor: torch.Tensor) -> Place:
        return Place(self._number(tensor))

    def _result(self, read: set[int], tensor: torch.Tensor) -> Place:
        """Number a result; what lies in no storage that the call read was made by it."""
        storage = storage_under(tensor)
        if storage is not None and storage not in self._storages:
            self._new_storage(storage, storage.nbytes())
        return Place(self._number(tensor))

    def _number(self, tensor: torch.Tensor) -> int:
        known = self._known.get(id(tensor))
        if known is not None and known() is tensor:
            return known.number
        layout = self._layout(tensor)
        if layout in self._read:  # autograd made a tensor of its own of what it read
            return self._read[layout]
        number = self._new(layout)
        seen = _Known(tensor, self._gone)
        seen.number = number
        self._known[id(tensor)] = seen
        return number

    def _new(self, layout: Layout) -> int:
        self.run.layouts.append(layout)
        return len(self.run.layouts) - 1

    def _layout(self, tensor: torch.Tensor) -> Layout:
        storage = storage_under(tensor) if lies_in_storage(tensor) else None
        if storage is None:
            return Layout(-1, tuple(tensor.shape), (), 0, tensor.dtype)
        if storage not in self._storages:
            self._new_storage(storage, 0)
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        number = self._storages[storage]
        return Layout(number, size, stride, int(tensor.storage_offset()), tensor.dtype)

    def _new_storage(self, storage: torch.UntypedStorage, size: int) -> None:
        number = self._storages[storage] = len(self.run.sizes)
        self.run.sizes.append(size)
        self._watched.append(ref(storage, partial(self._freed, number)))

    def _gone(self, known: Any) -> None:
        self.run.events.append(("gone", known.number))

    def _freed(self, number: int, _: object) -> None:
        self.run.events.append(("free", number))
        self._settle_in_place(number)

    def _settle_in_place(self, storage: int) -> None:
        """Have a result lie where the tensor did that backward would have written to.

        Autograd adds gradients in place if nobody else has the first one, and so do a few formulas,
        but not while a mode looks on: then the tensor is freed as soon as the result is there.
        """
        events, layouts = self.run.events, self.run.layouts
        at = len(events) - 1
        gone = []
        while at >= 0 and events[at][0] in ("gone", "free"):
            kind, number = events[at]
            if kind == "gone" and layouts[number].storage == storage:
                gone.append(number)
            at -= 1
        if not self._in_backward or at < 0 or events[at][0] != "call":
            return
        call = self.run.calls[events[at][1]]
        # A view holds its base, and is not written to.
        if call.op in _IN_PLACE and gone == [call.inputs[0]]:
            events.append(events.pop(at))

    # Saved tensors

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Note that autograd saves a tensor; hold an alias that is no view of it."""
        places = []
        for part in parts_of(tensor):
            number = self._number(part)
            read_as = self._new(self.run.layouts[number])
            self.run.events.append(("save", len(self.run.saves)))
            places.append(len(self.run.saves))
            self.run.saves.append(Save(number, read_as, part.requires_grad))
        self._is_own = True
        try:
            with below_autograd():
                alias = tensor.detach()
        finally:
            self._is_own = False
        return _Saved(alias, places, self._released)

    def unpack(self, saved: _Saved) -> torch.Tensor:
        """Note that backward reads a tensor."""
        for at in saved.places:
            save = self.run.saves[at]
            self.run.events.append(("read", at))
            self._read[self.run.layouts[save.number]] = save.read_as
        return saved.tensor

    def _released(self, places: list[int]) -> None:
        self.run.events.extend(("release", at) for at in places)


def _mapped(value: Any, way: Callable[[torch.Tensor], Place]) -> Any:
    if isinstance(value, torch.Tensor):
        return way(value)
    if isinstance(value, (list, tuple)):
        return [_mapped(each, way) for each in value]
    return value

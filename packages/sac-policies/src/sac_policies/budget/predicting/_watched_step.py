"""Runs a training step once, watched, so that its peak under plans can be told.

Rule 1. Nothing is checkpointed in it. Hooks number what autograd saves, and tell when backward asks
        for it and when it lets go.
Rule 2. A forward before it saves nothing: what lives on there, others than autograd hold.
Rule 3. The allocator is asked around each operator. It is not where tensors have no data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from ..._errors import BudgetError
from ..._tensors import tensors_in
from ..._torch_compat import lies_in_storage, storage_under
from ...policies._plans import Unit
from .._measure import Marks
from .._record import Recorder, Storages
from .._step import Loss, Step, check_step
from .._trace import Trace
from ._step_run import Event, StepCall, StepRun, StepValue
from ._step_trace import StepTrace

Call = Callable[..., Any]


def profile_step(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, unit: Unit | None = None
) -> StepTrace:
    """Run a training step, to tell what it would take under any plan without running that.

    Runs four forwards and one backward. Collective where a process group is initialised.

    Args:
        model: on the device it trains on, in the mode it trains in; left as it was. Where its
            parameters and the batch are fake (`FakeTensorMode`), nothing is allocated.
        batch: a tuple of its arguments, a dict of its keyword arguments, or its one argument.
        loss: from its output to a scalar; by default its own loss, else the sum of its tensors.
        unit: of the forward's trace, as for `profile`.

    Returns:
        The step, whose `trace` can be solved for plans.

    Raises:
        BudgetError: `model` is not a module, its output has no gradient, or two forwards run
            different operators.

    Example:
        >>> from sac_policies import solve
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))
        >>> step = profile_step(model, torch.ones(512, 64))
        >>> step.peak_bytes(solve(step.trace, "50%")) <= step.peak_bytes()
        True
    """
    check_step("profile_step", model, loss)
    step = Step("profile_step", model, batch, loss)
    with step.leaving_the_model():
        step.settle_buckets()
        return watched_step(step, step.trace(unit))


def watched_step(step: Step, trace: Trace) -> StepTrace:
    """Run the step whose forward was profiled, and a forward before it (Rule 2). Collective."""
    first, marks = _StepRecorder(None), None if step.is_dry else Marks(step.device)
    dropped = first.dropped_in(step)
    recorder = _StepRecorder(marks)

    def run() -> None:
        with recorder:
            step.run(recorder.numbering(step.model))

    most = {} if marks is None else {each.key: each.most for each in marks.intervals(run)}
    if marks is None:
        run()
    names = [op.name for op in trace.ops]
    alike = first.names in ([], names) and recorder.names == names
    if not alike or len(recorder.saved) != len(trace.packs):
        raise BudgetError(
            f"sac_policies.{step.where}: forwards of a step ran {len(names)}, {len(first.names)} "
            f"and {len(recorder.names)} operators that differ, but what is predicted is of one "
            "sequence. Fix what changes between calls."
        )
    found = StepRun(
        calls=tuple(
            replace(call, most_bytes=most.get(at, call.most_bytes))
            for at, call in enumerate(recorder.calls)
        ),
        values=tuple(recorder.values),
        events=tuple(recorder.added_in_place()),
        saved=tuple(recorder.saved),
        dropped=dropped,
    )
    return StepTrace(trace, step.resident(), found)


class _StepRecorder(Recorder):
    """Writes down the calls of a step, and how long what they made lives.

    Attributes:
        calls: all of them.
        values: what they made.
        events: what happened.
        saved: for each tensor that forward saved the value.
        names: operators of the forward.
    """

    def __init__(self, marks: Marks | None) -> None:
        super().__init__("flops")
        self._marks = marks
        self.calls: list[StepCall] = []
        self.values: list[StepValue] = []
        self.events: list[Event] = []
        self.saved: list[tuple[int, int]] = []
        self.names: list[str] = []
        self._values = WeakIdKeyDictionary()
        self._layouts: dict[Any, int] = {}
        self._alive: list[weakref.ref[torch.UntypedStorage]] = []

    def begin(self) -> None:
        """Ask the allocator from here on."""
        if self._marks is not None:
            self._marks.mark(len(self.calls))

    def end(self, read: Any, out: Any, made: Storages, written: list[torch.Tensor]) -> None:
        """Note what the call read, made and wrote to."""
        if self._marks is not None:
            self._marks.mark(None)
        operands = dict.fromkeys(map(self._operand, tensors_in(read)))
        layouts = {id(storage_under(each)): self._layout(each) for each in tensors_in(out)}
        new = tuple(self._new(each, layouts[id(each)]) for each in made)
        for tensor in written:
            self._again(tensor)
        size = sum(self.values[number].size_bytes for number in new)
        at = len(self.calls)
        self.events.append(("call", at))
        known = tuple(each for each in operands if each[0] >= 0)
        self.calls.append(StepCall(new, known, size))

    def _operand(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The value that a tensor lies in, -1 for what is from outside, and its layout."""
        storage = storage_under(tensor)
        return -1 if storage is None else self._values.get(storage, -1), self._layout(tensor)

    def _layout(self, tensor: torch.Tensor) -> int:
        if not lies_in_storage(tensor):
            return -1
        key = tensor.size(), tensor.stride(), tensor.storage_offset()
        return self._layouts.setdefault(key, len(self._layouts))

    def _new(self, storage: torch.UntypedStorage, layout: int) -> int:
        number = len(self.values)
        self.values.append(StepValue(len(self.calls), number, storage.nbytes(), layout))
        self._values[storage] = number
        freed = partial(self._freed, number)
        self._alive.append(weakref.ref(storage, freed))
        return number

    def _again(self, tensor: torch.Tensor) -> None:
        """What a tensor lies in is another value, if it is one of the step's."""
        number, _ = self._operand(tensor)
        if number >= 0:
            self._values[tensor.untyped_storage()] = len(self.values)
            self.values.append(replace(self.values[number], call=len(self.calls)))

    def _freed(self, number: int, _: object) -> None:
        self.events.append(("free", number))

    def dropped_in(self, step: Step) -> dict[int, int]:
        """Run a forward in which autograd saves nothing; return how long storages live there.

        By number, how many calls there were until then. Nothing for a forward that takes gradients
        itself: what it makes is then told to live as long as autograd holds it.
        """
        try:
            with self:
                loss = step.loss(partial(self._forward, step.model, _nothing, _needed))
        except _NeededError:
            return {}
        found, calls = {}, 0
        for kind, number in self.events:
            calls += kind == "call"
            if kind == "free":
                found[number] = calls
        del loss
        return found

    def added_in_place(self) -> list[Event]:
        """Tell what happened, but that gradients are added to what came first in its place.

        Autograd does that if nobody else has it, but not while a mode looks on: then it lets go of
        it as soon as the sum is there.
        """
        found: list[Event] = []
        for event in self.events:
            if found and event == ("free", self._added(found[-1])):
                found.insert(-1, event)
            else:
                found.append(event)
        return found

    def _added(self, event: Event) -> int | None:
        """The storage that a sum of two gradients reads first."""
        kind, at = event
        if kind != "call" or at < len(self.names) or self.ops[at].name != "aten.add.Tensor":
            return None
        call = self.calls[at]
        return call.read[0][0] if call.made and len(call.read) == 2 else None

    def numbering(self, model: Call) -> Call:
        """Have the model called, and note what autograd saves, reads and lets go of."""
        return partial(self._forward, model, self._pack, self._unpack)

    def _forward(self, model: Call, pack: Call, unpack: Call, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            out = model(*args, **kwargs)
        self.names = [op.name for op in self.ops]
        return out

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        at, found = len(self.saved), self._operand(tensor)
        self.saved.append(found)
        held = tensor if tensor.grad_fn is None else tensor.detach()
        return _Saved(held, partial(self._note, at))

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        saved.note("read")
        return saved.tensor

    def _note(self, at: int, kind: Literal["read", "release"]) -> None:
        self.events.append((kind, at))


class _Saved:
    """What autograd holds of a saved tensor.

    Attributes:
        tensor: as it was saved.
        note: told when it is read, and released.
    """

    def __init__(self, tensor: torch.Tensor, note: Callable[[Any], None]) -> None:
        self.tensor, self.note = tensor, note

    def __del__(self) -> None:
        self.note("release")


class _NeededError(RuntimeError):
    """The forward asks for what is not saved."""


def _nothing(_: object) -> None:
    return None


def _needed(_: object) -> torch.Tensor:
    raise _NeededError

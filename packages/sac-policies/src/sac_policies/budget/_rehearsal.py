"""Replay a recorded run under a policy: the real tape runs on tensors without data.

The tape makes its values, copies and replays as in a real run. Operators are not run: they return
meta tensors of the recorded sizes and strides. A ledger counts live storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import increment_version

from .._torch_compat import set_versions, storage_key
from .._torch_compat._dispatch import no_dispatch, no_torch_function
from ..eager._masks import UNPACK
from ..eager._recorders import Recorder, table_of
from ..eager._tape import Region, Tape
from ..eager._values import Call, Value
from ..policies._policies import Policy
from ..policies._rules import RECOMPUTE_ALL
from ..policies._unmatched import watch_of
from ._run import Event, Layout, Place, Run

Storage = tuple[int, int]
"""A storage of the run (its number, -1), or one that only the tape made (-1, a number)."""


@dataclass(frozen=True)
class Again:
    """A saved tensor that the tape recomputes if it can.

    Attributes:
        storage: number of its storage in the run.
        held: its bytes if the tape must hold it; None if it is recomputed.
        producer: the operator that recomputes it; "" if it is held.
        reads: bytes of storages that are held only for its recomputation.
    """

    storage: int
    held: int | None
    producer: str
    reads: dict[Storage, int]


def peak_growth_of(run: Run, plan: Policy | None) -> int:
    """Return the peak of a recorded step under a plan, over the bytes before it."""
    with _apart():
        rehearsal = _Rehearsal(run, plan)
        rehearsal.follow(run.events)
        return rehearsal.top


def made_again(run: Run) -> list[Again]:
    """List the tensors that autograd holds at the end of a recorded forward, in order of saving."""
    with _apart():
        rehearsal = _Rehearsal(run, RECOMPUTE_ALL)
        rehearsal.follow(run.events[: run.events.index(("end", 0)) + 1])
        return rehearsal.saved()


@contextmanager
def _apart() -> Iterator[None]:
    with torch.set_grad_enabled(torch.is_grad_enabled()), no_dispatch(), no_torch_function():
        yield


class Ledger:
    """Counts the bytes of live storages.

    Attributes:
        now: bytes of the live ones.
        top: peak so far.
    """

    def __init__(self) -> None:
        self.now = self.top = 0
        self._known: dict[int, tuple[ref[torch.UntypedStorage], int, int]] = {}

    def add(self, tensor: torch.Tensor, size: int | None = None, number: int = -1) -> None:
        """Count the storage of a tensor until it is freed, once.

        Args:
            tensor: any tensor of that storage.
            size: bytes to count; by default those of the storage.
            number: number of the storage in the run; -1 if the tape made it.
        """
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._known:
            return
        size = storage.nbytes() if size is None else size
        self._known[key] = ref(storage, partial(self._freed, key, size)), size, number
        self.now += size
        self.top = max(self.top, self.now)

    def entry(self, tensor: torch.Tensor) -> tuple[Storage, int]:
        """Return the storage of a tensor, and its bytes."""
        key = storage_key(tensor)
        _, size, number = self._known[key]
        return ((number, -1) if number >= 0 else (-1, key)), size

    def takes(self, size: int) -> None:
        """Count temporary bytes."""
        self.top = max(self.top, self.now + size)

    def _freed(self, key: int, size: int, _: object) -> None:
        del self._known[key]
        self.now -= size


class _RehearsedTape(Tape):
    """A tape that counts the copies and masks that it makes."""

    def __init__(self, policy: Policy, ledger: Ledger) -> None:
        region = Region(policy, table_of(policy), watch_of(policy), None, checks=False)
        super().__init__(region, None)
        self._ledger = ledger

    @property
    def replays(self) -> bool:
        """Whether a replay is running."""
        return self._replay.runs

    @property
    def is_away(self) -> bool:
        """Whether FSDP's own code is running."""
        return self._is_away

    def read(self, value: Value) -> torch.Tensor:
        """Return a saved value, as backward reads it."""
        held = value.now() if value.held is not None else None
        return self._replay.read(value, -1, caches=not self._is_open) if held is None else held

    def end(self) -> None:
        """End the region."""
        self._end()

    def _held(self, tensor: torch.Tensor, version: int = 0) -> Value:
        self._ledger.add(tensor)
        return super()._held(tensor, version)

    def _copy(self, value: Value, tensor: torch.Tensor) -> None:
        super()._copy(value, tensor)
        if value.held is not None:
            self._ledger.add(value.held)

    def note_mask(self, mask: torch.Tensor, version: int) -> None:
        """Count the bits, and the temporary bytes of packing them."""
        super().note_mask(mask, version)
        seen = self.known.get(id(mask))
        if seen is not None and isinstance(seen.value, Call):
            seen.value.recorder = _Unpacked(self._ledger)
            self._ledger.takes(_packing_bytes(mask))


class _Unpacked:
    """Makes a mask from its bits, and counts it."""

    def __init__(self, ledger: Ledger) -> None:
        self.op, self.shares, self.call = UNPACK.op, UNPACK.shares, self._call
        self.positions, self.lists = UNPACK.positions, UNPACK.lists
        self._ledger = ledger

    def _call(self, bits: torch.Tensor, *layout: Any) -> torch.Tensor:
        mask = UNPACK.call(bits, *layout)
        self._ledger.takes(_packing_bytes(mask) + mask.nbytes)
        self._ledger.add(mask)
        return mask


def _packing_bytes(mask: torch.Tensor) -> int:
    """Return the temporary bytes of packing: flags, and shifted flags."""
    return mask.numel() if mask.dtype is torch.bool else 2 * mask.numel()


class _Rehearsal:
    """One run, event by event.

    A storage that autograd saved lives as long as its tensors and the tape's values. Other storages
    have their recorded lifetimes.
    """

    def __init__(self, run: Run, plan: Policy | None) -> None:
        self._run = run
        self._ledger = Ledger()
        self._tape = None if plan is None else _RehearsedTape(plan, self._ledger)
        self._is_open = plan is not None
        self._live: dict[int, torch.Tensor] = {}
        self._given: list[torch.Tensor] = []
        self._storages: dict[int, ref[torch.UntypedStorage]] = {}
        self._unsaved: dict[int, torch.Tensor] = {}
        self._saves: dict[int, torch.Tensor | Value] = {}
        self._saved_storages = {run.layouts[each.number].storage for each in run.saves}

    @property
    def top(self) -> int:
        """Peak of live bytes."""
        return self._ledger.top

    def follow(self, events: list[Event]) -> None:
        """Process the recorded events."""
        does: dict[str, Callable[[int], object]] = {
            "call": self._call,
            "gone": lambda number: self._live.pop(number, None),
            "free": lambda storage: self._unsaved.pop(storage, None),
            "save": self._save,
            "read": self._read,
            "release": self._release,
            "end": self._end,
        }
        for kind, number in events:
            does[kind](number)

    def saved(self) -> list[Again]:
        """List the tensors that autograd holds."""
        found = []
        own = {value for value in self._saves.values() if isinstance(value, Value)}
        for at, value in self._saves.items():
            assert isinstance(value, Value), "the region has just ended"
            storage = self._run.layouts[self._run.saves[at].number].storage
            call = value.made_by if value.held is None else None
            bits = call.inputs[0] if call and isinstance(call.recorder, _Unpacked) else None
            if call is None or bits is not None:
                held = (value if bits is None else bits).held
                size = 0 if held is None else self._ledger.entry(held)[1]
                found.append(Again(storage, size, "", {}))
                continue
            entries = (self._ledger.entry(each) for each in _held_behind(call, own))
            found.append(Again(storage, None, str(call.recorder.op), dict(entries)))
        return found

    def _call(self, at: int) -> None:
        call = self._run.calls[at]
        args = [self._filled(each) for each in call.args]
        kwargs = {name: self._filled(each) for name, each in call.kwargs.items()}
        tape = self._tape
        if tape is None or not self._is_open:
            self._outputs(at, *args, **kwargs)
            return
        recorder = Recorder(call.op, tape.region.policy)
        recorder.call = partial(self._outputs, at)
        torch.set_grad_enabled(call.records)
        tape.forget_gone()
        if tape.is_away:
            recorder.call(*args, **kwargs)
            tape.follow_range(call.op, tuple(args))
            return
        written = recorder.facts.written(tuple(args), kwargs)
        recorder.run(tape, tuple(args), kwargs)
        increment_version(written)

    def _outputs(self, at: int, *args: Any, **kwargs: Any) -> Any:
        """Return the results of a call; called by the run and by replays."""
        call, is_replay = self._run.calls[at], self._tape is not None and self._tape.replays
        inputs = _tensors_of((args, tuple(kwargs.values())))
        for each in inputs:
            self._ledger.add(each)  # a replay may get a copy
        self._ledger.takes(call.most_bytes)
        made: dict[int, torch.Tensor] = {}

        def result(number: int) -> torch.Tensor:
            tensor = self._result(call.inputs, inputs, number, made)
            if not is_replay:
                self._live[number] = tensor
            return tensor

        return _filled(call.out, result)

    def _result(
        self,
        numbers: tuple[int, ...],
        inputs: list[torch.Tensor],
        number: int,
        made: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        layouts = self._run.layouts
        layout = layouts[number]
        for given, tensor in zip(numbers, inputs, strict=False):
            if given == number:
                return tensor
            if layouts[given].storage == layout.storage >= 0:
                shift = int(tensor.storage_offset()) - layouts[given].offset
                return _alias(tensor, layout, shift)
        if layout.storage in made:
            return _alias(made[layout.storage], layout, 0)
        tensor = _made(layout)
        made[layout.storage] = tensor
        self._count(layout, tensor)
        return tensor

    def _count(self, layout: Layout, tensor: torch.Tensor) -> None:
        storage = layout.storage
        self._ledger.add(tensor, self._run.sizes[storage] if storage >= 0 else 0, storage)
        if self._tape is not None and self._tape.replays:
            return
        self._storages[storage] = ref(tensor.untyped_storage())
        if storage >= 0 and storage not in self._saved_storages:
            self._unsaved[storage] = tensor

    def _filled(self, value: Any) -> Any:
        return _filled(value, self._tensor)

    def _tensor(self, number: int) -> torch.Tensor:
        """Return the tensor with this number. If no call made it, it is an input or an alias."""
        tensor = self._live.get(number)
        if tensor is not None:
            return tensor
        layout = self._run.layouts[number]
        known = self._storages.get(layout.storage)
        storage = None if known is None else known()
        if storage is None:
            tensor = _made(layout)
            self._ledger.add(tensor, 0, layout.storage)
            self._storages[layout.storage] = ref(tensor.untyped_storage())
            self._given.append(tensor)
        else:
            empty = torch.empty(0, dtype=layout.dtype, device="meta")
            tensor = empty.set_(storage, layout.offset, layout.size, layout.stride)
        self._live[number] = tensor
        return tensor

    def _save(self, at: int) -> None:
        save = self._run.saves[at]
        tensor = self._tensor(save.number)
        if self._tape is not None and self._is_open:
            self._saves[at] = self._tape.saved(tensor, save.needs_grad)
        else:
            self._saves[at] = tensor

    def _read(self, at: int) -> None:
        saved = self._saves[at]
        if isinstance(saved, Value):
            assert self._tape is not None, "it has made the value"
            saved = self._tape.read(saved)
        self._live[self._run.saves[at].read_as] = saved

    def _release(self, at: int) -> None:
        self._live.pop(self._run.saves[at].read_as, None)
        self._saves.pop(at, None)

    def _end(self, _: int) -> None:
        self._is_open = False
        if self._tape is not None:
            self._tape.end()


def _held_behind(call: Call, saved: set[Value]) -> list[torch.Tensor]:
    """List the held tensors that a call reads, directly or through unsaved calls."""
    found: list[torch.Tensor] = []
    seen: set[Value] = set()
    stack = [call]
    while stack:
        for each in stack.pop().inputs:
            if each in seen:
                continue
            seen.add(each)
            maker = each.made_by
            if each.held is not None:
                found.append(each.held)
            elif maker is not None and each not in saved:
                stack.append(maker)
    return found


def _made(layout: Layout) -> torch.Tensor:
    """Return a tensor of a layout, in a new storage."""
    if layout.storage < 0:
        return torch.empty(0, dtype=layout.dtype, device="meta")
    if not layout.offset:
        return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
    pairs = zip(layout.size, layout.stride, strict=True)
    span = layout.offset + 1 + sum((size - 1) * stride for size, stride in pairs)
    whole = torch.empty(max(span, 0), dtype=layout.dtype, device="meta")
    return whole.as_strided(layout.size, layout.stride, layout.offset)


def _alias(tensor: torch.Tensor, layout: Layout, shift: int) -> torch.Tensor:
    """Return a view with a layout; `shift` is the offset of the storage's start."""
    offset = layout.offset + shift
    if layout.dtype == tensor.dtype:
        return tensor.as_strided(layout.size, layout.stride, offset)
    empty = torch.empty(0, dtype=layout.dtype, device="meta")
    view = empty.set_(tensor.untyped_storage(), max(offset, 0), layout.size, layout.stride)
    set_versions((view,), (tensor._version,))
    return view


def _filled(value: Any, tensor: Callable[[int], torch.Tensor]) -> Any:
    if isinstance(value, Place):
        return tensor(value.number)
    if isinstance(value, list):
        return [_filled(each, tensor) for each in value]
    return value


def _tensors_of(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for each in values for tensor in _tensors_of(each)]
    return []

"""Reads a forward from its tape: its calls, the storages they made, and what is held for backward.

Reports and traces are made from such a reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._tensors import tensors_in
from .._torch_compat import storage_bytes, storage_under
from ..policies._decisions import Answer
from ..policies._modules import root_of
from ..policies._operators import facts_of
from ..policies._policies import DEPENDS, Constant, Policy
from ..policies._unmatched import PolicyUse
from ..policies._views import Operator, OpView
from ._recorders import Recorder, Table
from ._tape import Region, Tape
from ._values import Value

T = TypeVar("T")


@dataclass(frozen=True)
class Storage:
    """A storage that the forward used.

    Attributes:
        size: its bytes; 0 for a storage from before.
        made_by: position of the call that made it; -1 for a storage from before.
        output: its number among those of the call.
        last: position of the call that last wrote to it or named it.
        again: the operator that made it again for a gradient inside the forward; "" otherwise.
        is_copy: whether the tape made it, of another storage.
    """

    size: int = 0
    made_by: int = -1
    output: int = 0
    last: int = -1
    again: str = ""
    is_copy: bool = False


@dataclass(frozen=True)
class ReadCall(Generic[T]):
    """One call of an operator that the policy is asked about.

    Attributes:
        op: the operator.
        index: number among the calls of the operator.
        said: what `describe` returned.
        answer: of the policy.
        made_bytes: of the storages that it made.
        inputs: positions of the calls that made its inputs, ascending.
        draws: whether it draws random numbers.
        why: reason why its result is held although the policy does not keep it.
        overwritten: whether a later call writes to its result.
        is_moved: whether a result was copied to the host.
    """

    op: Operator
    index: int
    said: T
    answer: Answer
    made_bytes: int
    inputs: tuple[int, ...]
    draws: bool
    why: str
    overwritten: bool = False
    is_moved: bool = False


class Reading(Policy, Generic[T]):
    """Asks a policy about every call, and lists the calls.

    Args:
        policy: decides.
        describe: called with each call and its answer.
        names: whether tensors that are given a name count as calls.

    Attributes:
        calls: in the order they ran.
    """

    def __init__(
        self, policy: Policy, describe: Callable[[OpView, Answer], T], *, names: bool
    ) -> None:
        self._policy, self._describe, self._names = policy, describe, names
        self.calls: list[ReadCall[T]] = []
        self._storages = WeakIdKeyDictionary()
        self._table = Table(self)

    def read(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[ReadTape, Any]:
        """Run a function; return its tape and result. While the result lives, values are held."""
        region = Region(self, self._table, PolicyUse(), root_of(function), checks=False)
        tape = ReadTape(region, self)
        return tape, tape.run(function, args, kwargs)

    def decide(self, view: OpView) -> Answer:
        """Return the policy's answer."""
        answer = self._policy.decide(view)
        args, kwargs, facts = view.args, dict(view.kwargs), facts_of(view.op)
        self._table.run_of(view.op, self)
        recorder, at = self._table.recorders[view.op], len(self.calls)
        read = {self.storage_of(each).made_by for each in tensors_in((args, kwargs))}
        for tensor in facts.written(args, kwargs):
            maker = self.storage_of(tensor).made_by
            if maker >= 0:
                self.change(maker, overwritten=True)
        results, made = tensors_in(view.output), list[int]()
        for tensor in results:
            storage = storage_under(tensor)
            if storage is None:
                continue
            if storage not in self._storages:
                self._storages[storage] = Storage(storage.nbytes(), at, len(made), at)
                made.append(storage.nbytes())
            elif not recorder.shares:
                self._storages[storage] = replace(self._storages[storage], last=at)
        self.calls.append(
            ReadCall(
                view.op,
                view.index,
                self._describe(view, answer),
                answer,
                sum(made),
                tuple(sorted(read - {-1})),
                facts.draws(args),
                _reason(recorder, all(each.is_floating_point() for each in results)),
            )
        )
        return answer

    def change(self, at: int, **facts: Any) -> None:
        """Change what is known of a call."""
        self.calls[at] = replace(self.calls[at], **facts)

    def constant(self, op: Operator) -> Constant:
        """Return DEPENDS, so that the policy is called every time."""
        del op
        return DEPENDS

    @property
    def offloads(self) -> bool:
        return self._policy.offloads

    @property
    def reads_modules(self) -> bool:
        return self._policy.reads_modules

    @property
    def reads_names(self) -> bool:
        return self._names

    def storage_of(self, tensor: torch.Tensor, new: Storage | None = None) -> Storage:
        """Return the storage of a tensor; one that was not seen is `new`, or from before."""
        storage = storage_under(tensor)
        if storage is None:
            return Storage()
        found: Storage = self._storages.setdefault(storage, new or Storage())
        return found

    def held(self, tensor: torch.Tensor) -> Storage:
        """Return the storage of a held tensor; one that was not seen was made by the tape."""
        storage = storage_under(tensor)
        if storage is None or storage in self._storages:
            return self.storage_of(tensor)
        return Storage(storage.nbytes(), is_copy=True)


class ReadTape(Tape):
    """A tape that lists what autograd saves.

    Attributes:
        saves: the values that it saved, in order.
        storages: their storages.
    """

    def __init__(self, region: Region, reading: Reading[Any]) -> None:
        super().__init__(region, None)
        self._reading = reading
        self.saves: list[ref[Value]] = []
        self.storages: WeakKeyDictionary[Value, Storage] = WeakKeyDictionary()

    def held_bytes(self) -> dict[int, int]:
        """Return the bytes held of results, by position of the call; inputs do not count.

        Each storage counts once.
        """
        found: dict[int, int] = {}
        counted = set()
        for value in self._live_holders():
            storage = None if value.held is None else storage_under(value.held)
            if value.held is None or storage is None or storage._cdata in counted:
                continue
            counted.add(storage._cdata)
            own = self._reading.held(value.held)
            if own.last >= 0:
                found[own.last] = found.get(own.last, 0) + storage_bytes(value.held)
            if own.again:
                why = "a gradient inside the forward recomputed it"
                self._reading.change(own.last, why=why)
        return found

    def note_mask(self, mask: torch.Tensor, version: int) -> None:
        super().note_mask(mask, version)
        seen = self.known.get(id(mask))
        if seen is not None and seen.value.made_by is not None:
            self._replaced(seen.value.made_by.inputs[0], mask)

    def _copy(self, value: Value, tensor: torch.Tensor) -> None:
        super()._copy(value, tensor)
        if value.held is not tensor:
            self._replaced(value, tensor)

    def _replaced(self, value: Value, tensor: torch.Tensor) -> None:
        """Note that a tensor is held instead of another one."""
        own = self._reading.storage_of(tensor)
        if value.held is not None and own.made_by >= 0:
            size = storage_bytes(value.held)
            self._reading.storage_of(value.held, replace(own, size=size, is_copy=True))

    def _move(self, value: Value, tensor: torch.Tensor) -> None:
        super()._move(value, tensor)
        last = self._reading.storage_of(tensor).last
        if value.held is None and last >= 0:
            self._reading.change(last, is_moved=True)

    def _pack(self, tensor: torch.Tensor) -> Any:
        saved = super()._pack(tensor)
        if isinstance(saved, Value):  # not a wrapper, whose parts are saved one by one
            self.saves.append(ref(saved))
            self.storages[saved] = self._reading.storage_of(tensor)
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        """Read a value for a gradient inside the forward; note which storage a replay restores."""
        tensor = super()._unpack(saved)
        call = saved.made_by if isinstance(saved, Value) else None
        if call is not None:
            again = replace(self.storages[saved], again=str(call.recorder.op))
            self._reading.storage_of(tensor, again)
        return tensor


def _reason(recorder: Recorder, is_float: bool) -> str:
    """Return why a result is held although the policy does not keep it."""
    if not torch.is_grad_enabled():
        return "it was made without gradients"
    if is_float and recorder.why == "integer results are held":
        return "it is small" if recorder.reduces else "it was written to"
    return recorder.why

"""What one forward of a region did, as a value: operators, bytes, work, what is saved.

All sizes and costs are ints, so that what a solver promises can be checked to the byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Set
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

from .._errors import BudgetError, shown, shown_text
from ..policies._checked import field_problem
from ..policies._json import load
from ..policies._plans import Backend, Call, Unit
from ._constants import Readings, Storage, TracedConstant

Row = TypeVar("Row")
_FORMAT = "sac_policies.trace/1"


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One operator call.

    Attributes:
        name: as `str(op)` spells it, "aten.mm.default".
        call: number among the calls of this operator in the region, from 0.
        out_bytes: bytes of the storages it made; 0 for views and in-place operators.
        cost: work to run it again, in the trace's unit.
        inputs: indices of the calls that made what it reads, ascending.
        group: calls that are decided together share it; random operators do.
        overwritten: whether a later call writes into what it made.
        draws: whether it draws random numbers: its result is held and never made again.
    """

    name: str
    call: int
    out_bytes: int
    cost: int
    inputs: tuple[int, ...]
    group: int
    overwritten: bool = False
    draws: bool = False

    @property
    def key(self) -> Call:
        """Name and call number, as plans list it."""
        return (self.name, self.call)


@dataclass(frozen=True, slots=True)
class TracedPack:
    """One tensor that autograd saved.

    Attributes:
        producer: node that can be replayed for it, "" without one.
        made_by: index of the call that made its storage, -1 for what the region was given.
        output: which of the storages that the call made, from 0; 0 for what was given.
        storage_bytes: bytes that keeping it takes: of its storage, or less.
        reads: indices of the constants that are held where it is made again.
    """

    producer: str
    made_by: int
    output: int
    storage_bytes: int
    reads: tuple[int, ...] = ()

    @property
    def storage(self) -> Storage:
        """Its storage: (call, which of that call's storages)."""
        return (self.made_by, self.output)


@dataclass(frozen=True, slots=True)
class Item:
    """Calls whose outputs are kept together or not at all.

    Attributes:
        ops: their positions in `Trace.ops`.
        kept_bytes: bytes that keeping all of them takes, over those that making them again does.
        cost: of running them again, in the trace's `unit`.
    """

    ops: tuple[int, ...]
    kept_bytes: int
    cost: int


@dataclass(frozen=True)
class Trace:
    """One forward of a region.

    Attributes:
        unit: of `TracedOp.cost`.
        ops: in the order they ran.
        packs: in the order autograd saved them.
        constants: what a region may hold besides what autograd saves.
    """

    unit: Unit
    ops: tuple[TracedOp, ...]
    packs: tuple[TracedPack, ...]
    constants: tuple[TracedConstant, ...] = ()

    def items(self, backend: Backend = "eager") -> tuple[Item, ...]:
        """List what a solver chooses from.

        Args:
            backend: "eager" chooses among the calls that made saved tensors, "compile" among all
                calls that make a value.
        """
        if backend == "compile":
            return _grouped(self.ops)
        sizes: dict[int, int] = {}
        for storage, size in sorted(self.replayable.items()):
            own = size - self._freed.get(storage, 0)
            sizes[storage[0]] = sizes.get(storage[0], 0) + own
        return tuple(Item((op,), size, self._replay_cost(op)) for op, size in sizes.items())

    def _replay_cost(self, op: int) -> int:
        """Work to run a call again with what it reads and nobody saved."""
        cost, todo, seen = self.ops[op].cost, list(self.ops[op].inputs), set(self._saved)
        while todo:
            at = todo.pop()
            if at not in seen and not self.ops[at].draws:
                seen.add(at)
                cost += self.ops[at].cost
                todo.extend(self.ops[at].inputs)
        return cost

    @cached_property
    def _saved(self) -> frozenset[int]:
        """Calls that made what autograd saved."""
        return frozenset(pack.made_by for pack in self.packs)

    def fixed_bytes(self, backend: Backend = "eager") -> int:
        """Bytes kept where all is made again that can be; some are of what that reads."""
        return self.bytes_kept(frozenset()) if backend == "eager" else 0

    def total_bytes(self, backend: Backend = "eager") -> int:
        """Bytes kept if everything that can be kept is."""
        if backend == "compile":
            return sum(item.kept_bytes for item in self.items(backend))
        return self.bytes_kept(frozenset(call for call, _ in self.replayable))

    def bytes_kept(self, saved: Set[int]) -> int:
        """Bytes that an eager region keeps, storage by storage.

        Args:
            saved: the calls of which it keeps what a replay could rebuild.
        """
        again = {storage for storage in self.replayable if storage[0] not in saved}
        kept = self._kept(again)
        return sum(kept.values()) + self._readings.held_bytes(again, kept)

    def is_kept(self, pack: TracedPack, saved: Set[int]) -> bool:
        """Whether a saved tensor is kept where these calls are."""
        return not pack.producer or (pack.storage in self.replayable and pack.made_by in saved)

    @cached_property
    def _readings(self) -> Readings:
        by_storage: dict[Storage, frozenset[int]] = dict.fromkeys(self.replayable, frozenset())
        always: frozenset[int] = frozenset()
        for pack in self.packs:
            if pack.storage in by_storage:
                by_storage[pack.storage] |= {*pack.reads}
            else:
                always |= {*pack.reads}
        return Readings(self.constants, by_storage, always, self._kept(self.replayable))

    def _kept(self, again: Container[Storage]) -> dict[Storage, int]:
        """Return what is kept of storages that the function made, but of those in `again`."""
        found: dict[Storage, int] = {}
        for pack in self.packs:
            is_kept = not pack.producer or pack.storage in self.replayable
            if pack.made_by >= 0 and is_kept and pack.storage not in again:
                found[pack.storage] = max(found.get(pack.storage, 0), pack.storage_bytes)
        return found

    @cached_property
    def _freed(self) -> dict[Storage, int]:
        return self._readings.freed(self.replayable)

    @property
    def slack_bytes(self) -> int:
        """Most by which `fixed_bytes` and the bytes of items may be over those of a plan.

        They are where several values are made again of one constant.
        """
        return self._readings.most_bytes() - sum(self._freed.values())

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the operators and saved tensors, not of sizes or times."""
        names = [op.name for op in self.ops]
        packs = [(pack.producer, *pack.storage) for pack in self.packs]
        return hashlib.sha256(json.dumps([names, packs]).encode()).hexdigest()[:16]

    @cached_property
    def replayable(self) -> dict[tuple[int, int], int]:
        """Storage to bytes, for saved storages that a replay can rebuild for any reader."""
        stuck = {pack.storage for pack in self.packs if not pack.producer}
        return {
            pack.storage: pack.storage_bytes
            for pack in self.packs
            if pack.made_by >= 0
            and pack.storage not in stuck
            and not self.ops[pack.made_by].overwritten
        }

    def to_json(self) -> str:
        """Write the trace as JSON text; `from_json` reads it back."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read what `to_json` wrote.

        Raises:
            BudgetError: the text is not such a trace.

        Example:
            >>> Trace.from_json(Trace("ns", (), ()).to_json()) == Trace("ns", (), ())
            True
        """
        data = _object(text)
        if data.get("format") != _FORMAT:
            raise BudgetError(
                f"sac_policies.Trace.from_json: format {shown(data.get('format'))} is read, but "
                f"only {_FORMAT!r} is known. Profile again with this version."
            )
        try:
            return _read(data)
        except Exception as error:  # whatever a damaged text leads to
            raise BudgetError(
                f"sac_policies.Trace.from_json: text cannot be read ({shown_text(str(error))}), "
                "but a trace is what to_json wrote. Profile again."
            ) from error

    @property
    def problem(self) -> str:
        """Why no forward can have done this, as of one read from text; "" where one can."""
        for at, op in enumerate(self.ops):
            numbers = (op.call, op.out_bytes, op.cost)
            if min(numbers) < 0 or not 0 <= op.group <= at:
                return f"operator {at} has numbers {numbers} and group {op.group}"
            if not all(0 <= each < at for each in op.inputs):
                return f"operator {at} reads those of {shown(op.inputs)}"
        calls, constants = range(-1, len(self.ops)), range(len(self.constants))
        for at, pack in enumerate(self.packs):
            if pack.made_by not in calls or min(pack.output, pack.storage_bytes) < 0:
                return f"saved tensor {at} is made by operator {pack.made_by}"
            if not all(each in constants for each in pack.reads):
                return f"saved tensor {at} reads constants {shown(pack.reads)}"
        for at, each in enumerate(self.constants):
            if each.made_by not in calls or min(each.output, each.storage_bytes) < 0:
                return f"constant {at} is made by operator {each.made_by}"
        return ""


def _grouped(ops: tuple[TracedOp, ...]) -> tuple[Item, ...]:
    groups: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        if op.out_bytes and not op.overwritten:
            groups.setdefault(op.group, []).append(i)
    return tuple(
        Item(tuple(g), sum(ops[i].out_bytes for i in g), sum(ops[i].cost for i in g))
        for g in groups.values()
    )


def _object(text: str) -> dict[str, Any]:
    try:
        data = load(text)
    except Exception as error:  # a text nested too deeply is a RecursionError
        raise BudgetError(
            f"sac_policies.Trace.from_json: text {shown(text, 40)} is not JSON "
            f"({shown_text(str(error))}), but a trace is a JSON object. Pass what to_json "
            "returned."
        ) from None
    return data if isinstance(data, dict) else {}


def _read(data: dict[str, Any]) -> Trace:
    given = {
        "unit": data.get("unit"),
        "ops": _rows(TracedOp, data.get("ops")),
        "packs": _rows(TracedPack, data.get("packs")),
        "constants": _rows(TracedConstant, data.get("constants", [])),
    }
    trace = _checked(Trace, given)
    if trace.problem:
        raise BudgetError(trace.problem)
    return trace


def _rows(kind: type[Row], rows: Any) -> tuple[Row, ...]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BudgetError(f"{shown(rows)} is not a list of objects")
    return tuple(
        _checked(kind, {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
        for row in rows
    )


def _checked(kind: type[Row], given: dict[str, Any]) -> Row:
    if problem := field_problem(kind, given):
        raise BudgetError(problem)
    return kind(**given)

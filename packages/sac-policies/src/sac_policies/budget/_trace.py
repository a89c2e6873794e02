"""A recorded forward of a region: operators, bytes, work, saved tensors.

All sizes and costs are ints, so that a plan's bytes can be checked exactly. Recomputing a value may
read tensors that autograd does not save: those are held, each once, until all values that read
them are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..policies._plans import Call, Unit


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One operator call.

    Attributes:
        name: `str(op)`, such as "aten.mm.default".
        call: number among the calls of this operator in the region, from 0.
        out_bytes: bytes of the storages it made; 0 for views and in-place operators.
        cost: work to run it again, in the trace's unit.
        inputs: indices of the calls that made its inputs, ascending.
        overwritten: whether a later call writes to its result.
        draws: whether it draws random numbers: its result is held and never recomputed.
    """

    name: str
    call: int
    out_bytes: int
    cost: int
    inputs: tuple[int, ...]
    overwritten: bool = False
    draws: bool = False

    @property
    def key(self) -> Call:
        """Name and call number, as in plans."""
        return (self.name, self.call)


class Held(NamedTuple):
    """Bytes that are held in one storage.

    Attributes:
        made_by: index of the call that made the storage; -1 for inputs of the region, and
            for copies and mask bits, which the tape makes.
        output: number of the storage among those of the call, from 0; 0 for inputs.
        storage_bytes: bytes of the storage, or of the copy or bits.
    """

    made_by: int
    output: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class TracedPack:
    """One tensor that autograd saved.

    Attributes:
        producer: the operator that recomputes it; "" if it must be held.
        made_by: index of the call that made its storage, -1 for inputs of the region.
        output: number of the storage among those of the call, from 0; 0 for inputs.
        storage_bytes: bytes of keeping it; at most those of its storage.
        reads: other tensors held if it is recomputed.
    """

    producer: str
    made_by: int
    output: int
    storage_bytes: int
    reads: tuple[Held, ...] = ()

    @property
    def storage(self) -> tuple[int, int]:
        """Its storage: (call, number among the call's storages)."""
        return (self.made_by, self.output)

    @property
    def held(self) -> Held:
        """The bytes that are held if the tensor is kept."""
        return Held(self.made_by, self.output, self.storage_bytes)


@dataclass(frozen=True, slots=True)
class Item:
    """A call whose result is kept or not.

    Attributes:
        op: its position in `Trace.ops`.
        kept_bytes: bytes of keeping it, minus those held for recomputing it.
        cost: work to run it again, with unsaved inputs, in the trace's `unit`.
    """

    op: int
    kept_bytes: int
    cost: int


@dataclass(frozen=True)
class Trace:
    """One forward of a region.

    Attributes:
        unit: of `TracedOp.cost`.
        ops: in the order they ran.
        packs: in the order autograd saved them.
    """

    unit: Unit
    ops: tuple[TracedOp, ...]
    packs: tuple[TracedPack, ...]

    def items(self) -> tuple[Item, ...]:
        """List the choices of a solver: the calls that made saved tensors."""
        weights = self._weights()
        return tuple(Item(op, weights[op], self._replay_cost(op)) for op in weights)

    def fixed_bytes(self) -> int:
        """Bytes kept if everything possible is recomputed, including inputs of recomputation."""
        return self.bytes_kept(frozenset())

    def total_bytes(self) -> int:
        """Bytes kept if everything possible is kept."""
        return self.bytes_kept(frozenset(call for call, _ in self.replayable))

    def bytes_kept(self, saved: Set[int]) -> int:
        """Return the bytes that a region keeps, storage by storage.

        Args:
            saved: the calls whose recomputable results it keeps.
        """
        held: set[Held] = set()
        for pack in self.packs:
            if not self.is_kept(pack, saved):
                held.update(pack.reads)
            elif pack.made_by >= 0:
                held.add(pack.held)
        return sum(each.storage_bytes for each in held)

    def is_kept(self, pack: TracedPack, saved: Set[int]) -> bool:
        """Whether a saved tensor is kept if these calls are."""
        return not pack.producer or (pack.storage in self.replayable and pack.made_by in saved)

    @cached_property
    def replayable(self) -> dict[tuple[int, int], int]:
        """Bytes of saved storages that a replay can rebuild for any reader, by storage."""
        stuck = {pack.storage for pack in self.packs if not pack.producer}
        return {
            pack.storage: pack.storage_bytes
            for pack in self.packs
            if pack.made_by >= 0
            and pack.storage not in stuck
            and not self.ops[pack.made_by].overwritten
        }

    def _weights(self) -> dict[int, int]:
        """Return the bytes of each call's result, minus those held only to recompute it."""
        reads: dict[int, set[Held]] = {call: set() for call, _ in sorted(self.replayable)}
        always: set[Held] = set()
        for pack in self.packs:
            if pack.storage in self.replayable:
                reads[pack.made_by].update(pack.reads)
            else:
                always.update(pack.reads if pack.producer else (pack.held,))
        readers = Counter(each for own in reads.values() for each in own - always)
        found = dict.fromkeys(reads, 0)
        for (call, _), size in self.replayable.items():
            found[call] += size
        for call, own in reads.items():
            alone = sum(each.storage_bytes for each in own if readers[each] == 1)
            found[call] = max(0, found[call] - alone)
        return found

    def _replay_cost(self, op: int) -> int:
        """Return the work of running a call again, with unsaved inputs."""
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
        """Return the calls that made saved tensors."""
        return frozenset(pack.made_by for pack in self.packs)

"""What one forward of a region did, as a value: operators, bytes, work, what is saved.

All sizes and costs are ints, so that a plan's bytes can be checked exactly. A value that is made
again may read tensors that autograd does not save: those are held for it, each once, until all
values that read them are kept.
"""

from __future__ import annotations

import hashlib
import json
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
        name: as `str(op)` spells it, "aten.mm.default".
        call: number among the calls of this operator in the region, from 0.
        out_bytes: bytes of the storages it made; 0 for views and in-place operators.
        cost: work to run it again, in the trace's unit.
        inputs: indices of the calls that made what it reads, ascending.
        overwritten: whether a later call writes into what it made.
        draws: whether it draws random numbers: its result is held and never made again.
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
        """Name and call number, as plans list it."""
        return (self.name, self.call)


class Held(NamedTuple):
    """Bytes that are held in one storage.

    Attributes:
        made_by: index of the call that made the storage; -1 for what the region was given, and
            for copies and the bits of masks, which the tape makes.
        output: which of the storages that the call made, from 0; 0 for what was given.
        storage_bytes: bytes of the storage, or of the copy or bits.
    """

    made_by: int
    output: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class TracedPack:
    """One tensor that autograd saved.

    Attributes:
        producer: the operator that makes it again; "" if it is held in any case.
        made_by: index of the call that made its storage, -1 for what the region was given.
        output: which of the storages that the call made, from 0; 0 for what was given.
        storage_bytes: bytes that keeping it takes: of its storage, or less.
        reads: what else is held if it is made again.
    """

    producer: str
    made_by: int
    output: int
    storage_bytes: int
    reads: tuple[Held, ...] = ()

    @property
    def storage(self) -> tuple[int, int]:
        """Its storage: (call, which of that call's storages)."""
        return (self.made_by, self.output)

    @property
    def held(self) -> Held:
        """What is held if it is kept."""
        return Held(self.made_by, self.output, self.storage_bytes)


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
    """

    unit: Unit
    ops: tuple[TracedOp, ...]
    packs: tuple[TracedPack, ...]

    def items(self) -> tuple[Item, ...]:
        """List what a solver chooses from: the calls that made saved tensors."""
        weights = self._weights()
        return tuple(Item((op,), weights[op], self._replay_cost(op)) for op in weights)

    def fixed_bytes(self) -> int:
        """Bytes kept where all is made again that can be; some are of what that reads."""
        return self.bytes_kept(frozenset())

    def total_bytes(self) -> int:
        """Bytes kept if everything that can be kept is."""
        return self.bytes_kept(frozenset(call for call, _ in self.replayable))

    def bytes_kept(self, saved: Set[int]) -> int:
        """Bytes that a region keeps, storage by storage.

        Args:
            saved: the calls of which it keeps what a replay could rebuild.
        """
        held: set[Held] = set()
        for pack in self.packs:
            if not self.is_kept(pack, saved):
                held.update(pack.reads)
            elif pack.made_by >= 0:
                held.add(pack.held)
        return sum(each.storage_bytes for each in held)

    def is_kept(self, pack: TracedPack, saved: Set[int]) -> bool:
        """Whether a saved tensor is kept where these calls are."""
        return not pack.producer or (pack.storage in self.replayable and pack.made_by in saved)

    @property
    def slack_bytes(self) -> int:
        """Most by which `fixed_bytes` and the bytes of items may be over those of a plan.

        They are where several values are made again of one tensor.
        """
        return self.fixed_bytes() + sum(self._weights().values()) - self.total_bytes()

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

    def _weights(self) -> dict[int, int]:
        """By call, bytes that keeping what it made takes, less those that are held for it alone."""
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

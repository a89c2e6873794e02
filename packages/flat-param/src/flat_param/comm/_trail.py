"""Record the collectives that this rank has started, in order, and the one it waits for.

Ranks that run units in different orders receive the wrong unit's parameters, without an error if
shapes are equal. Each rank keeps a checksum of the collectives it has started in each group, and
ranks compare them in the collective that ends a backward, see `_order`. A unit is identified by
the number of its `fully_shard` call in the group, which is the same on every rank.

Ranks that skip a unit can deadlock. After two seconds, a waiting rank writes to the store which
collective it waits for, and how many collectives it has started in each group. A rank is deadlocked
if another rank of the group has not started that collective and is deadlocked too. Slow ranks and
networks do not match this.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

ORDER_BYTES = 8  # a checksum and its complement, see Note [Order word] in _order.py
_KEPT = 4096  # labels; enough to name the first difference in any step

_made: Counter[tuple[int, ...]] = Counter()
_trails: WeakKeyDictionary[dist.ProcessGroup, Trail] = WeakKeyDictionary()


@dataclass(eq=False)
class Trail:
    """The collectives that this rank has started in one group.

    Attributes:
        ranks: global ranks of the group.
        key: name of the group, the same on all of its ranks.
        units: number of units that use it.
        started: number of collectives.
        checksum: of the collectives since ranks last compared, and of their order.
        recent: their labels, for messages.
    """

    ranks: tuple[int, ...]
    key: str
    units: int = 0
    started: int = 0
    checksum: int = 0
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Trail:
        """Return the trail of a group."""
        trail = _trails.get(group)
        if trail is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            trail = cls(ranks, f"{'-'.join(map(str, ranks))}/{_made[ranks]}")
            _made[ranks] += 1
            _trails[group] = trail
        return trail

    def add(self, label: str, mark: bytes) -> int:
        """Add a collective that is started now, and return its number."""
        self.started += 1
        self.checksum = zlib.crc32(mark, self.checksum)
        self.recent.append(label)
        return self.started

    def compared(self) -> None:
        """Start a new checksum after a comparison."""
        self.checksum = 0
        self.recent.clear()


def next_number(group: dist.ProcessGroup | None) -> int:
    """A number for a new unit of a group."""
    if group is None:
        return 0
    trail = Trail.of(group)
    trail.units += 1
    return trail.units


def first_difference(labels: Iterable[tuple[int, list[str]]]) -> str:
    """The first collective in which two ranks differ; empty if there is none."""
    (rank, mine), *others = labels
    for other, theirs in others:
        for here, there in zip_longest(mine, theirs, fillvalue="nothing more"):
            if here != there:
                return f"rank {rank} did {here} where rank {other} did {there}"
    return ""


@dataclass(frozen=True)
class Wait:
    """A collective that one rank waits for.

    Attributes:
        rank: global rank.
        label: the collective, in words.
        key: of the group's trail.
        ranks: of the group.
        number: of the collective in that group.
        started: by trail, the number of collectives that the rank has started.
    """

    rank: int
    label: str
    key: str
    ranks: tuple[int, ...]
    number: int
    started: Mapping[str, int]

    def post(self, store: Any) -> None:
        """Write it to the store. Not a collective."""
        store.set(_key(self.rank), json.dumps(vars(self)))

    @staticmethod
    def over(store: Any, rank: int) -> None:
        """Remove it from the store."""
        store.set(_key(rank), "")

    @staticmethod
    def of(store: Any, rank: int) -> Wait | None:
        """Return the entries that a rank has written."""
        text = store.get(_key(rank)).decode() if store.check([_key(rank)]) else ""
        return Wait(**json.loads(text)) if text else None


def wait_here(trail: Trail, label: str, number: int) -> Wait:
    """The wait of this rank."""
    started = {other.key: other.started for other in _trails.values()}
    return Wait(dist.get_rank(), label, trail.key, trail.ranks, number, started)


def in_vain(waits: Mapping[int, Wait]) -> dict[int, Wait]:
    """The waits that never end."""
    found = dict(waits)
    while True:
        ending = [rank for rank, wait in found.items() if not _lacks(wait, found)]
        if not ending:
            return found
        for rank in ending:
            del found[rank]


def _lacks(wait: Wait, others: Mapping[int, Wait]) -> bool:
    there = (others[rank] for rank in wait.ranks if rank in others)
    return any(other.started.get(wait.key, 0) < wait.number for other in there)


def deadlock(store: Any, mine: Wait) -> str:
    """Describe the waiting ranks if this rank is deadlocked; else empty. Not a collective."""
    waits: dict[int, Wait] = {mine.rank: mine}
    todo: list[Any] = list(mine.ranks)
    while todo:
        rank = todo.pop()
        wait = None if rank in waits else Wait.of(store, rank)
        if wait is not None:
            waits[rank] = wait
            todo += wait.ranks
    stuck = in_vain(waits)
    if mine.rank not in stuck:
        return ""
    return ", ".join(f"rank {rank} waits in {stuck[rank].label}" for rank in sorted(stuck))


def _key(rank: int) -> str:
    return f"flat_param/wait/{rank}"

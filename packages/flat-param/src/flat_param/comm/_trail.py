"""Which collectives this rank has started, in order, and which one it waits for.

Ranks whose units run in another order give each other the wrong unit's parameters, and finish
without an error where shapes are equal. Each rank therefore keeps a checksum of what it has started
in each group; ranks compare theirs in the collective that ends a backward, see `_order`.

Ranks that have left a unit out wait for each other for ever. A rank that has waited for two seconds
leaves a note in the group's store: what it waits for, and how much it has started in each group.

Rule 1: a rank waits in vain if some rank of the group has not started what it waits for, and waits
        in vain itself. Slow ranks and slow networks never look like that.
Rule 2: a unit counts by its number, the same on every rank: that of its `fully_shard` in the group.
Nothing is written or read while all is well.
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

from ._peer_messages import MessageStore

ORDER_BYTES = 8  # a checksum and its complement, see Note [Order word] in _order.py
_KEPT = 4096  # labels; enough to name the first difference in any step

_made: Counter[tuple[int, ...]] = Counter()
_trails: WeakKeyDictionary[dist.ProcessGroup, Trail] = WeakKeyDictionary()


@dataclass(eq=False)
class Trail:
    """What this rank has started in one group.

    Attributes:
        ranks: global ranks of the group.
        key: the group's name, the same on all of its ranks.
        units: how many units use it.
        started: collectives, since the group was made.
        checksum: of those since ranks last compared, and their order.
        recent: labels of the same, for messages.
    """

    ranks: tuple[int, ...]
    key: str
    units: int = 0
    started: int = 0
    checksum: int = 0
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Trail:
        """The one trail of a group."""
        trail = _trails.get(group)
        if trail is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            trail = cls(ranks, f"{'-'.join(map(str, ranks))}/{_made[ranks]}")
            _made[ranks] += 1
            _trails[group] = trail
        return trail

    def add(self, label: str, mark: bytes) -> int:
        """Note a collective that is started now, and return its number."""
        self.started += 1
        self.checksum = zlib.crc32(mark, self.checksum)
        self.recent.append(label)
        return self.started

    def compared(self) -> None:
        """Begin anew: all ranks have said the same, or know that they have not."""
        self.checksum = 0
        self.recent.clear()


def next_number(group: dist.ProcessGroup | None) -> int:
    """The number of one more unit in a group (Rule 2)."""
    if group is None:
        return 0
    trail = Trail.of(group)
    trail.units += 1
    return trail.units


def first_difference(labels: Iterable[tuple[int, list[str]]]) -> str:
    """Where two ranks part, or nothing.

    Example:
        >>> first_difference([(0, ["gather a", "gather b"]), (1, ["gather b", "gather a"])])
        'rank 0 did gather a where rank 1 did gather b'
    """
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
        rank: which, as a global rank.
        label: the collective, in words.
        key: of the group's trail.
        ranks: of the group.
        number: of the collective in that group.
        started: by trail, how many collectives the rank has started.
    """

    rank: int
    label: str
    key: str
    ranks: tuple[int, ...]
    number: int
    started: Mapping[str, int]

    def post(self, store: MessageStore) -> None:
        """Tell other ranks. Not a collective."""
        store.set(_key(self.rank), json.dumps(vars(self)))

    @staticmethod
    def over(store: MessageStore, rank: int) -> None:
        """Take the note back."""
        store.set(_key(rank), "")

    @staticmethod
    def of(store: MessageStore, rank: int) -> Wait | None:
        """What a rank waits for, if it has said so."""
        text = store.get(_key(rank)).decode() if store.check([_key(rank)]) else ""
        return Wait(**json.loads(text)) if text else None


def wait_here(trail: Trail, label: str, number: int) -> Wait:
    """What this rank waits for, with all that it has started."""
    started = {other.key: other.started for other in _trails.values()}
    return Wait(dist.get_rank(), label, trail.key, trail.ranks, number, started)


def in_vain(waits: Mapping[int, Wait]) -> dict[int, Wait]:
    """The waits that never end (Rule 1)."""
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


def deadlock(store: MessageStore, mine: Wait) -> str:
    """Who waits for what in vain, if this rank does; empty otherwise. Not a collective."""
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

"""The collectives that this rank has started in a group, and messages through the group's store.

Ranks that run units in different orders receive the wrong unit's parameters, without an error if
shapes are equal. Each rank keeps a checksum of the collectives it has started in each group, and
ranks compare them in the collective that ends a backward, see sharded/schedule/_order.py. A unit is
identified by the number of its `fully_shard` call in the group, which is the same on every rank.

Messages explain why a collective never ends. As long as collectives complete, nothing is written
or read.

- A rank whose collective fails raises an alarm. Every waiting rank sees it within a second and
  answers, and the error names the ranks that do not.
- Ranks that skip a unit can deadlock. After two seconds, a waiting rank writes which collective it
  waits for, and how many collectives it has started in each group. Ranks that wait for each other
  in a circle are deadlocked. Slow ranks and networks do not match this.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from .._torch_compat import default_store
from ._streams import SideWork

ORDER_BYTES = 8  # a checksum and its complement, see sharded/schedule/_order.py
_KEPT = 4096  # labels; enough to name the first difference in any step
_ANSWER_S = 3.0

_made: Counter[tuple[int, ...]] = Counter()
_trails: WeakKeyDictionary[dist.ProcessGroup, Trail] = WeakKeyDictionary()


class Unread(NamedTuple):
    """Words of a step, the copy to the host and its source, and labels of the collectives."""

    words: Tensor
    source: Tensor
    copy: SideWork
    labels: list[list[str]]


class Trail:
    """The collectives of one group, which communicators add. No method is a collective.

    Attributes:
        ranks: global ranks of the group.
        key: name of the group, the same on all of its ranks.
        backends: the backend of each device type: one group may have several.
        units: number of units that use it.
        started: number of collectives.
        checksum: of the collectives since ranks last compared, and of their order.
        recent: their labels, for messages.
        unread: words of the last step on a device, see sharded/schedule/_order.py.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.key = f"{'-'.join(map(str, self.ranks))}/{_made[self.ranks]}"
        _made[self.ranks] += 1
        pairs = [each.partition(":") for each in str(dist.get_backend_config(group)).split(",")]
        self.backends = {device: backend for device, _, backend in pairs}
        self.units = self.started = self.checksum = 0
        self.recent: deque[str] = deque(maxlen=_KEPT)
        self.unread: Unread | None = None
        self._store = default_store()
        self._rank = dist.get_rank()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Trail:
        """Return the trail of a group."""
        trail = _trails.get(group)
        if trail is None:
            trail = _trails[group] = cls(group)
        return trail

    def trouble(self) -> str:
        """The alarm of another rank; empty without one."""
        try:
            is_raised = self._store.check(["alarm"])
            return str(self._store.get("alarm").decode()) if is_raised else ""
        except RuntimeError:
            return "the store is gone"

    def diagnosis(self, reason: str) -> str:
        """Raise the alarm, wait at most three seconds for answers, and name the silent ranks."""
        try:
            told = reason if reason.startswith("rank ") else f"rank {self._rank}: {reason}"
            self._store.set("alarm", told)
            self._store.set(f"here/{self._rank}", "")
            silent, deadline = self.ranks, time.monotonic() + _ANSWER_S
            while silent and time.monotonic() < deadline:
                silent = tuple([r for r in silent if not self._store.check([f"here/{r}"])])
                time.sleep(0.05)
        except RuntimeError:
            return "rank 0, whose store no longer answers,"
        return f"rank {', '.join(map(str, silent))}" if silent else "no rank is gone, but one"

    def deadlock(self, label: str, number: int) -> str:
        """Write what this rank waits for; describe the deadlock that it is in, if there is one."""
        started = {trail.key: trail.started for trail in _trails.values()}
        mine = {"label": label, "key": self.key, "ranks": self.ranks, "number": number}
        try:
            self._store.set(f"wait/{self._rank}", json.dumps({**mine, "started": started}))
            stuck = self._circle(self._rank, {}, set())
        except RuntimeError:
            return ""
        return ", ".join(f"rank {rank} waits in {stuck[rank]['label']}" for rank in sorted(stuck))

    def _circle(self, rank: int, path: dict[int, Any], seen: set[int]) -> dict[int, Any]:
        """Waits from a rank to one that is on the path: each rank lacks the next one."""
        if rank in path:
            return path
        wait = self._wait_of(rank)
        if wait is None or rank in seen:
            return {}
        seen.add(rank)
        for other in wait["ranks"]:
            theirs = self._wait_of(other)
            if theirs is not None and theirs["started"].get(wait["key"], 0) < wait["number"]:
                found = self._circle(other, {**path, rank: wait}, seen)
                if found:
                    return found
        return {}

    def _wait_of(self, rank: int) -> Any:
        key = f"wait/{rank}"
        text = self._store.get(key) if self._store.check([key]) else b""
        return json.loads(text) if text else None

    def stop_waiting(self) -> None:
        """Remove the message that `deadlock` wrote."""
        with suppress(RuntimeError):
            self._store.set(f"wait/{self._rank}", "")


def first_difference(labels: Iterable[tuple[int, list[str]]], *, verb: str) -> str:
    """The first label in which two ranks differ; empty if there is none."""
    (rank, mine), *others = labels
    for other, theirs in others:
        for here, there in zip_longest(mine, theirs, fillvalue="nothing more"):
            if here != there:
                return f"rank {rank} {verb} {here} where rank {other} {verb} {there}"
    return ""

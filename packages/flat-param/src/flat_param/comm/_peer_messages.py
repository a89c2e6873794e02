"""Refusals and changes of one rank, sent to the others through the process group's store.

A rank that raises before a collective, or whose parameters were cast or moved, cannot say so in a
collective: the others are already waiting in another one. It writes each refusal and each change
to the store, under a number that counts its own.

- Ranks that run the same program refuse and change equally often. A rank that waits in a
  collective looks under the number after its own last; what it finds there, it did not do itself.
- After a change, a rank waits before its next collective until all ranks have made that change.

Nothing is written or read while no rank refuses or changes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_KINDS = ("refusal", "change")
_PAUSE_S = 0.02

_posted: Counter[tuple[tuple[int, ...], str]] = Counter()


@dataclass(frozen=True)
class PeerMessages:
    """Messages between the ranks of one group.

    Attributes:
        store: a `torch.distributed.Store` of all ranks, or None where torch has none.
        ranks: global ranks of the group.
        rank: this process, as a global rank.
    """

    store: Any
    ranks: tuple[int, ...]
    rank: int

    def refuse(self, reason: str) -> None:
        """Write why this rank does not start its next collective. Not a collective."""
        self.store.set(self._next("refusal"), f"rank {self.rank}: {reason}")

    def unshared(self) -> str:
        """What another rank refused or changed and this one has not; empty if nothing."""
        for kind in _KINDS:
            key = self._key(kind, _posted[self.ranks, kind] + 1)
            if self.store.check([key]):
                return str(self.store.get(key).decode())
        return ""

    def share_change(self, change: str, *, trouble: Callable[[], str]) -> str:
        """Wait until all ranks have made a change. Collective through the store.

        Args:
            change: the change, in the same words on every rank.
            trouble: called repeatedly; a text ends the wait.

        Returns:
            What is wrong; empty if every rank made the same change.
        """
        key = self._next("change")
        first: str = self.store.compare_set(key, "", f"rank {self.rank}: {change}").decode()
        if first.partition(": ")[2] != change:
            return first
        count = f"{key}/ranks"
        here = self.store.add(count, 1)
        deadline = time.monotonic() + self.store.timeout.total_seconds()
        while here < len(self.ranks):
            reason = trouble()
            if reason or time.monotonic() > deadline:
                return reason or f"only {here} of {len(self.ranks)} ranks made the change in time"
            time.sleep(_PAUSE_S)
            here = self.store.add(count, 0)
        return ""

    def _next(self, kind: str) -> str:
        _posted[self.ranks, kind] += 1
        return self._key(kind, _posted[self.ranks, kind])

    def _key(self, kind: str, number: int) -> str:
        return f"flat_param/{kind}/{'-'.join(map(str, self.ranks))}/{number}"

"""What one rank alone knows, told to the others through the process group's store.

A rank that refuses to go on, or whose parameters were cast or moved, cannot say so in a collective:
the others are on their way into another one. Each refusal and each change is therefore written to
the store, under a number that counts those of this rank.

Rule 1: ranks that run the same program refuse and change equally often. A rank that has waited in a
        collective for half a second looks under the number after its own last; what it finds there
        is of something that it did not do itself.
Rule 2: a rank that has changed waits before its next collective until all have made that change.
Nothing is written or read while all is well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

_KINDS = ("refusal", "change")
_PAUSE_S = 0.02

_posted: Counter[tuple[tuple[int, ...], str]] = Counter()


class MessageStore(Protocol):
    """What is used of `torch.distributed.Store`."""

    @property
    def timeout(self) -> timedelta:
        """How long ranks wait for each other."""

    def set(self, key: str, value: str) -> None:
        """Write a note."""

    def get(self, key: str) -> bytes:
        """Read a note that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all notes are there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at zero, and read it."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a note where none is; read what is there then."""


@dataclass(frozen=True)
class PeerMessages:
    """What the ranks tell each other that share a communicator.

    Attributes:
        store: shared by all ranks.
        ranks: global ranks of the group.
        rank: this process, as a global rank.
    """

    store: MessageStore
    ranks: tuple[int, ...]
    rank: int

    def refuse(self, reason: str) -> None:
        """Say why this rank does not start its next collective. Not a collective."""
        self.store.set(self._next("refusal"), f"rank {self.rank}: {reason}")

    def unshared(self) -> str:
        """What another rank refused or changed and this one has not (Rule 1); empty if nothing."""
        for kind in _KINDS:
            key = self._key(kind, _posted[self.ranks, kind] + 1)
            if self.store.check([key]):
                return self.store.get(key).decode()
        return ""

    def share_change(self, change: str, *, trouble: Callable[[], str]) -> str:
        """Wait until all ranks have made a change (Rule 2). Collective through the store.

        Args:
            change: what was changed, the same words on every rank.
            trouble: asked again and again; a text ends the wait.

        Returns:
            What is wrong; empty where every rank made the same change.
        """
        key = self._next("change")
        first = self.store.compare_set(key, "", f"rank {self.rank}: {change}").decode()
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

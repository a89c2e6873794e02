"""Messages between the ranks of a group through its store: failures, refusals, changes.

They explain why a collective never ends. As long as collectives complete and no rank refuses or
changes, nothing is written or read.

- A rank whose collective fails raises an alarm. Every waiting rank sees it within a second and
  answers, and the error names the ranks that do not.
- A rank that raises before a collective, or whose parameters were cast or moved, writes a message
  with the number of its refusals or changes so far. Ranks that run the same program have equal
  numbers. A message with a higher number comes from a rank that diverged.
- After a change, a rank waits before its next collective until all ranks have made that change.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .._torch_compat import default_store
from ._trail import Wait, deadlock

_ANSWER_S = 3.0
_PAUSE_S = 0.02

_posted: Counter[tuple[tuple[int, ...], str]] = Counter()


@dataclass(frozen=True)
class FaultDetector:
    """Messages and diagnoses in one group. No method is a collective, except `share_change`.

    Attributes:
        store: a `torch.distributed.Store` of all ranks.
        ranks: global ranks of the group.
        rank: this process, as a global rank.
    """

    store: Any
    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> FaultDetector:
        """The detector of a group."""
        return cls(default_store(), tuple(dist.get_process_group_ranks(group)), dist.get_rank())

    def trouble(self) -> str:
        """Why a collective may never end, with the failed rank's message; empty if unknown.

        The reason is the alarm, or a refusal or change that only another rank has made.
        """
        try:
            for kind in ("refusal", "change"):
                key = self._key(kind, _posted[self.ranks, kind] + 1)
                if self.store.check([key]):
                    return str(self.store.get(key).decode())
            if self.store.check([_key("alarm")]):
                return str(self.store.get(_key("alarm")).decode())
        except RuntimeError:
            return "the store is gone"
        return ""

    def deadlock(self, mine: Wait) -> str:
        """Post this rank's wait; return which ranks are in a deadlock, or ""."""
        try:
            mine.post(self.store)
            return deadlock(self.store, mine)
        except RuntimeError:
            return ""

    def stop_waiting(self) -> None:
        """Remove the message that `deadlock` posted."""
        with suppress(RuntimeError):
            Wait.over(self.store, self.rank)

    def refuse(self, reason: str) -> None:
        """Write why this rank does not start its next collective."""
        with suppress(RuntimeError):  # without a store, others see this rank as dead
            self.store.set(self._next("refusal"), f"rank {self.rank}: {reason}")

    def share_change(self, change: str) -> str:
        """Wait until all ranks have made a change. Collective through the store.

        Args:
            change: the change, in the same words on every rank.

        Returns:
            The difference; empty if every rank made the same change.
        """
        key = self._next("change")
        first: str = self.store.compare_set(key, "", f"rank {self.rank}: {change}").decode()
        if first.partition(": ")[2] != change:
            return first
        count = f"{key}/ranks"
        here = self.store.add(count, 1)
        deadline = time.monotonic() + self.store.timeout.total_seconds()
        while here < len(self.ranks):
            reason = self.trouble()
            if reason or time.monotonic() > deadline:
                return reason or f"only {here} of {len(self.ranks)} ranks made the change in time"
            time.sleep(_PAUSE_S)
            here = self.store.add(count, 0)
        return ""

    def diagnosis(self, reason: str) -> str:
        """Raise the alarm, wait at most three seconds for answers, and name the silent ranks."""
        try:
            told = reason if reason.startswith("rank ") else f"rank {self.rank}: {reason}"
            self.store.set(_key("alarm"), told)
            self.store.set(_key(str(self.rank)), "here")
            silent = self._silent()
        except RuntimeError:
            return "rank 0, whose store no longer answers,"
        names = ", ".join(str(rank) for rank in sorted(silent))
        return f"rank {names}" if names else "no rank is gone, but one"

    def _silent(self) -> set[int]:
        silent = set(self.ranks)
        deadline = time.monotonic() + _ANSWER_S
        while silent and time.monotonic() < deadline:
            silent = {rank for rank in silent if not self.store.check([_key(str(rank))])}
            time.sleep(0.05)
        return silent

    def _next(self, kind: str) -> str:
        _posted[self.ranks, kind] += 1
        return self._key(kind, _posted[self.ranks, kind])

    def _key(self, kind: str, number: int) -> str:
        return f"flat_param/{kind}/{'-'.join(map(str, self.ranks))}/{number}"


def _key(name: str) -> str:
    return f"flat_param/fault/{name}"

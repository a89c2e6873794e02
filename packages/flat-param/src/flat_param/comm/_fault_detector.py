"""Find out which rank is gone after a collective has failed.

A rank whose collective fails raises an alarm in the store of the process group. Every waiting rank
sees it within a second and answers, and the error names the ranks that do not. Nothing is written
while collectives complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from .._torch_compat import default_store
from ._peer_messages import PeerMessages
from ._trail import Wait, deadlock

_ANSWER_S = 3.0


class FaultDetector(PeerMessages):
    """Diagnoses failures in one group. Its methods do nothing if there is no store."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> FaultDetector:
        """The detector of a group. Not a collective."""
        return cls(default_store(), tuple(dist.get_process_group_ranks(group)), dist.get_rank())

    def trouble(self) -> str:
        """Why a collective may never end, in the words of the rank that failed; empty if unknown.

        Not a collective.
        """
        if self.store is None:
            return ""
        try:
            unshared = self.unshared()
            if not unshared and self.store.check([_key("alarm")]):
                return str(self.store.get(_key("alarm")).decode())
            return unshared
        except RuntimeError:
            return "the store is gone"

    def deadlock(self, mine: Wait) -> str:
        """Post what this rank waits for; say which ranks wait for each other for ever."""
        if self.store is None:
            return ""
        try:
            mine.post(self.store)
            return deadlock(self.store, mine)
        except RuntimeError:
            return ""

    def stop_waiting(self) -> None:
        """Remove what `deadlock` has posted."""
        if self.store is not None:
            with suppress(RuntimeError):
                Wait.over(self.store, self.rank)

    def refuse(self, reason: str) -> None:
        """Say why this rank does not start its next collective. Not a collective."""
        if self.store is not None:
            with suppress(RuntimeError):  # without the store, the others find this rank gone
                super().refuse(reason)

    def share_change(self, change: str, *, trouble: Callable[[], str] | None = None) -> str:
        """Wait until all ranks have made a change; return what is wrong, or ""."""
        if self.store is None:
            return ""
        return super().share_change(change, trouble=trouble or self.trouble)

    def diagnosis(self, reason: str) -> str:
        """Raise the alarm, wait at most three seconds for answers, and name the silent ranks.

        Not a collective.
        """
        if self.store is None:
            return f"one of ranks {_listed(set(self.ranks) - {self.rank})}"
        try:
            told = reason if reason.startswith("rank ") else f"rank {self.rank}: {reason}"
            self.store.set(_key("alarm"), told)
            self.store.set(_key(str(self.rank)), "here")
            silent = self._silent()
        except RuntimeError:
            return "rank 0, whose store no longer answers,"
        return f"rank {_listed(silent)}" if silent else "no rank is gone, but one"

    def _silent(self) -> set[int]:
        silent = set(self.ranks)
        deadline = time.monotonic() + _ANSWER_S
        while silent and time.monotonic() < deadline:
            silent = {rank for rank in silent if not self.store.check([_key(str(rank))])}
            time.sleep(0.05)
        return silent


def _key(name: str) -> str:
    return f"flat_param/fault/{name}"


def _listed(ranks: set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))

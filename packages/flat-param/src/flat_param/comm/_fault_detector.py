"""Find out which rank is gone after a collective has failed.

Ranks leave notes in the store that the process group was started with. A rank whose collective
fails raises an alarm there; every rank that is waiting sees it within a second, answers, and
the ranks that stay silent are named. A rank that refuses or has changed says so in a notice, see
`_peer_messages`. Nothing is written while all is well.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from .._torch_compat import default_store
from ._peer_messages import MessageStore, PeerMessages
from ._trail import Wait, deadlock

_ANSWER_S = 3.0


@dataclass(frozen=True)
class FaultDetector:
    """A place where the ranks of one group tell each other that they are still there.

    Attributes:
        store: shared by all ranks, or None where torch does not hand it out.
        ranks: global ranks of the group.
        rank: this process, as a global rank.
    """

    store: MessageStore | None
    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> FaultDetector:
        """Make the board of `group`. Not a collective."""
        return cls(default_store(), tuple(dist.get_process_group_ranks(group)), dist.get_rank())

    def trouble(self) -> str:
        """Why a collective may never end, in the words of the rank that knows; empty if unknown.

        A notice, an alarm that some rank has raised, or a store that is gone. Not a collective.
        """
        if self.store is None:
            return ""
        try:
            unshared = PeerMessages(self.store, self.ranks, self.rank).unshared()
            if not unshared and self.store.check([_key("alarm")]):
                return self.store.get(_key("alarm")).decode()
            return unshared
        except RuntimeError:
            return "the store is gone"

    def deadlock(self, mine: Wait) -> str:
        """Say what this rank waits for, and hear whether ranks wait for each other for ever."""
        if self.store is None:
            return ""
        try:
            mine.post(self.store)
            return deadlock(self.store, mine)
        except RuntimeError:
            return ""

    def stop_waiting(self) -> None:
        """Take back what `deadlock` has said."""
        if self.store is not None:
            with suppress(RuntimeError):
                Wait.over(self.store, self.rank)

    def refuse(self, reason: str) -> None:
        """Tell the group why this rank does not start its next collective. Not a collective."""
        if self.store is None:
            return
        with suppress(RuntimeError):  # without a store, the others find this rank gone instead
            PeerMessages(self.store, self.ranks, self.rank).refuse(reason)

    def share_change(self, change: str) -> str:
        """Wait until all ranks have made a change; what is wrong, or nothing."""
        if self.store is None:
            return ""
        return PeerMessages(self.store, self.ranks, self.rank).share_change(
            change, trouble=self.trouble
        )

    def diagnosis(self, reason: str) -> str:
        """Raise the alarm, wait for the answers, and name the ranks that stay silent.

        Takes at most three seconds. Not a collective.
        """
        if self.store is None:
            return f"one of ranks {_listed(set(self.ranks) - {self.rank})}"
        try:
            told = reason if reason.startswith("rank ") else f"rank {self.rank}: {reason}"
            self.store.set(_key("alarm"), told)
            self.store.set(_key(str(self.rank)), "here")
            silent = self._silent(self.store)
        except RuntimeError:
            return "rank 0, whose store no longer answers,"
        return f"rank {_listed(silent)}" if silent else "no rank is gone, but one"

    def _silent(self, store: MessageStore) -> set[int]:
        silent = set(self.ranks)
        deadline = time.monotonic() + _ANSWER_S
        while silent and time.monotonic() < deadline:
            silent = {rank for rank in silent if not store.check([_key(str(rank))])}
            time.sleep(0.05)
        return silent


def _key(name: str) -> str:
    return f"flat_param/fault/{name}"


def _listed(ranks: set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))

"""Edge: find out which rank is gone after a collective has failed.

Ranks leave notes in the store that the process group was started with. A rank whose collective
fails raises an alarm there; every rank that is waiting sees it within a second, answers, and
the ranks that stay silent are named. Nothing is written while all is well.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from ._torch_compat import default_store

_ANSWER_S = 3.0


class KeyStore(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Write a note."""

    def check(self, keys: list[str]) -> bool:
        """Whether all notes are there."""


@dataclass(frozen=True)
class FaultBoard:
    """A place where the ranks of one group tell each other that they are still there.

    Attributes:
        store: shared by all ranks, or None where torch does not hand it out.
        ranks: global ranks of the group.
        rank: this process, as a global rank.
    """

    store: KeyStore | None
    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> FaultBoard:
        """Make the board of `group`. Not a collective."""
        return cls(default_store(), tuple(dist.get_process_group_ranks(group)), dist.get_rank())

    def is_raised(self) -> bool:
        """Whether some rank has raised the alarm; a store that is gone counts as one."""
        try:
            return self.store is not None and bool(self.store.check([_key("alarm")]))
        except RuntimeError:
            return True

    def verdict(self, reason: str) -> str:
        """Raise the alarm, wait for the answers, and name the ranks that stay silent.

        Takes at most three seconds. Not a collective.
        """
        if self.store is None:
            return f"one of ranks {_listed(set(self.ranks) - {self.rank})}"
        try:
            self.store.set(_key("alarm"), f"rank {self.rank}: {reason}")
            self.store.set(_key(str(self.rank)), "here")
            silent = self._silent(self.store)
        except RuntimeError:
            return "rank 0, whose store no longer answers,"
        return f"rank {_listed(silent)}" if silent else "no rank is gone, but one"

    def _silent(self, store: KeyStore) -> set[int]:
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

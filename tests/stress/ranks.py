"""Ranks of a gloo group on this machine, which exchange words through its store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

TIMEOUT_S = 20.0
PATIENCE_S = 100.0  # longer than a collective's TIMEOUT_S


@dataclass(frozen=True)
class Group:
    """Membership of this process in the group."""

    store: dist.Store
    rank: int
    world: int

    def exchange(self, about: str, word: str) -> list[str]:
        """Send a word and return those of all ranks; once for each `about`."""
        self.store.set(f"{about}/{self.rank}", word)
        return [self.store.get(f"{about}/{rank}").decode() for rank in range(self.world)]


def join(folder: Path, rank: int, world: int) -> Group:
    """Join the group whose store is in a shared folder."""
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    words = dist.FileStore(f"{folder}/words", world)
    words.set_timeout(timedelta(seconds=PATIENCE_S))
    return Group(words, rank, world)

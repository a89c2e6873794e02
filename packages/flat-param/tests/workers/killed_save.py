"""A checkpoint is saved, then another in its place, during which a rank is killed."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from _harness import main, sharded

import flat_param

EVENTS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}


class Victim:
    """Counts this process's calls to the file system, and ends it at one of them."""

    def __init__(self, point: int) -> None:
        self.point = point
        self.count = -1
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Python tells of each call before it is made."""
        if self.count >= 0 and event in EVENTS:
            if self.count == self.point:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1


def run(rank: int, world: int, path: str, victim: int, point: int) -> dict[str, Any]:
    """Fill with ones and save; fill with twos and save, dying at the call of that number if any."""
    model = sharded()
    counter = Victim(point if rank == victim else -1)
    error = ""
    for value in (1.0, 2.0):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        dist.barrier()
        counter.count = 0 if value == 2.0 else -1
        try:
            dies = value == 2.0 and point >= 0
            flat_param.save_sharded(model, path, timeout_s=4 if dies else 30)
        except flat_param.FlatParamError as raised:
            error = str(raised)
    return {"calls": counter.count, "error": error}


if __name__ == "__main__":
    main(run, together=False)

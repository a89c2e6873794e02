"""A checkpoint is saved, then another in its place, during which a rank is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from _harness import main, sharded
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import flat_param
from flat_param import _sharded_save


def die(*_: Any, **__: Any) -> None:
    """As a killed process does: at once, and without cleaning up."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(rank: int, world: int, path: str, victim: int, point: str) -> None:
    """Fill with ones and save; fill with twos and save, dying at `point`."""
    model = sharded()
    for value in (1.0, 2.0):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        if value == 2.0 and rank == victim:
            if point == "data written":
                FileSystemWriter.finish = die
            elif point == "part complete":
                _sharded_save.put_in_place = die
            else:
                _sharded_save.commit = die
        flat_param.save_sharded(model, path)
        if value == 1.0:
            dist.barrier()


if __name__ == "__main__":
    main(run, together=False)

"""A checkpoint is saved, then another in its place in a thread, during which rank 1 is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from _harness import main, sharded

import flat_param
from flat_param.dcp import _dcp_write


def killed(number: int) -> None:
    """What rank 1's thread does where its bytes should reach the disk."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(rank: int, world: int, path: str) -> dict[str, Any]:
    """Fill with ones and save; fill with twos and save beside the steps."""
    model, error = sharded(), None
    for value in (1.0, 2.0):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        if rank == 1 and value == 2.0:
            _dcp_write.os.fsync = killed
        future = flat_param.async_save_sharded(model, path, timeout_s=30 if value == 1.0 else 4)
        error = future.exception()
    return {"error": str(error)}


if __name__ == "__main__":
    main(run, together=False)

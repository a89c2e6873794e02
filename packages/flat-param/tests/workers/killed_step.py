"""One rank is killed in the middle of a training step; the others say which."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from _harness import batches, loss_of, options_of, sharded, share

import flat_param


def run(rank: int, world: int, victim: int, way: str) -> dict[str, Any]:
    """What a survivor sees, and after how long."""
    model = sharded(**options_of(way))
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    if rank == victim:
        model.blocks[1].register_full_backward_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
    start = time.monotonic()
    try:
        for _ in range(3):
            loss_of(model, share(ids, rank)).backward()
    except flat_param.CommError as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": "", "seconds": time.monotonic() - start}

"""A rank does not take part in a collective of checkpoints; the first rank says so in time."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import flat_param

FOLDER = Path()
GROUP_S = 4


def run(rank: int, world: int, how: str) -> dict[str, Any]:
    """What the first rank sees, and after how long; it alone calls the function."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{FOLDER}/second-store", world)
    limit = timedelta(seconds=GROUP_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    model = flat_param.fully_shard(nn.Linear(3, 3))
    if how == "later call":
        flat_param.full_state_dict(model)
    start, error = time.monotonic(), ""
    if rank and how == "ended":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank:
        while not (FOLDER / "raised").exists():  # the group's timeout ends it
            time.sleep(0.1)
    else:
        try:
            if how == "ended":
                flat_param.save_sharded(model, f"{FOLDER}/saved")
            else:
                flat_param.full_state_dict(model)
        except flat_param.CheckpointError as raised:
            error = str(raised)
        (FOLDER / "raised").touch()
    return {"error": error, "seconds": time.monotonic() - start}

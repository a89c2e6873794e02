"""A rank does not take part in a collective of checkpoints; the first rank says so in time."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _harness import main
from torch import nn

import flat_param

GROUP_S = 4


def run(rank: int, world: int, how: str) -> dict[str, Any]:
    """What the first rank sees, and after how long; it alone calls the function."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{sys.argv[3]}/second-store", world)
    limit = timedelta(seconds=GROUP_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    model = flat_param.fully_shard(nn.Linear(3, 3))
    if how == "later call":
        flat_param.full_state_dict(model)
    start, error = time.monotonic(), ""
    if rank and how != "ended":
        while not Path(sys.argv[3], "result-0.json").exists():  # the group's timeout ends it
            time.sleep(0.1)
    elif not rank:
        try:
            if how == "ended":
                flat_param.save_sharded(model, f"{sys.argv[3]}/saved")
            else:
                flat_param.full_state_dict(model)
        except flat_param.CheckpointError as raised:
            error = str(raised)
    return {"error": error, "seconds": time.monotonic() - start}


if __name__ == "__main__":
    main(run, together=False)

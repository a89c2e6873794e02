"""One rank changes its module after sharding, the others do not: an error on all of them."""

from __future__ import annotations

import time
from typing import Any

import torch
from _harness import batches, loss_of, main, sharded, share
from torch import nn

import flat_param


def run(rank: int, world: int) -> dict[str, Any]:
    """What this rank sees, and after how long."""
    model = sharded()
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    if rank == world - 1:
        model.head.bias = nn.Parameter(torch.zeros(3))
    start = time.monotonic()
    try:
        loss_of(model, share(ids, rank)).backward()
    except flat_param.FlatParamError as error:
        text = f"{type(error).__name__}: {error}"
        time.sleep(5)  # leave when all have been told, as a job that writes its last words
        return {"error": text, "seconds": time.monotonic() - start - 5}
    return {"error": "", "seconds": time.monotonic() - start}


if __name__ == "__main__":
    main(run, together=False)

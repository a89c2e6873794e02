"""One rank leaves a unit out: the error on every rank names the unit that others wait for."""

from __future__ import annotations

import time
from typing import Any

from _harness import batches, loss_of, main, sharded, share
from torch import Tensor

import flat_param


def run(rank: int, world: int) -> dict[str, Any]:
    """What this rank sees, and after how long."""
    model, (ids,) = sharded(), batches(world, 1)
    loss_of(model, share(ids, rank)).backward()

    def forward(part: Tensor) -> Tensor:
        x = model.embed(part) * model.scale
        for block in (model.blocks[0], model.blocks[2]):
            x = block(x)
        return model.head(x)

    if rank == world - 1:
        model.forward = forward
    start = time.monotonic()
    try:
        loss_of(model, share(ids, rank)).backward()
    except flat_param.CommError as error:
        seconds = time.monotonic() - start
        time.sleep(5)  # leave when all have been told, as a job that writes its last words
        return {"error": str(error), "seconds": seconds}
    return {"error": "", "seconds": 0.0}


if __name__ == "__main__":
    main(run, together=False)

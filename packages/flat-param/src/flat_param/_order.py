"""Edge: what ranks say to each other at the end of a backward, in one small collective.

Which parameters each has used, and whether all have run the units in the same order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ._unit import Unit


def any_rank(used: list[bool], unit: Unit) -> list[bool]:
    """Which parameters some rank has used. Collective."""
    lanes = unit.lanes
    if lanes.world_size == 1:
        return used
    flags = torch.tensor(used, dtype=torch.uint8, device=unit.parts[0].device)
    lanes.reduce.all_reduce(flags, dist.ReduceOp.MAX).wait()
    lanes.replicate.all_reduce(flags, dist.ReduceOp.MAX).wait()
    # Reading the flags would make the host wait for the device; all True needs no reading.
    return used if all(used) else [bool(flag) for flag in flags.tolist()]

"""AdamW with 8-bit moments, one scale per block of 32, on shards that end at block boundaries.

    python docs/examples/adamw_8bit.py            # starts torchrun

Claim: weights are bit-identical to one process; shards that cut blocks are refused.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from eight_bits import BLOCK, AdamW8bit
from kept import on_ranks
from torch import Tensor, nn

import flat_param


def train(shares: list[Tensor], **options: object) -> dict[str, Tensor]:
    """Run five steps; the gradient is the mean over shares, summed in the order of ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(15, 50), nn.GELU(), nn.Linear(50, 7))
    model = flat_param.fully_shard(model, **options) if options else model
    optimizer = AdamW8bit(model.parameters(), {})
    for _ in range(5):
        optimizer.zero_grad()
        for share in shares:
            (model(share).square().mean() / (1 if options else 2)).backward()
        optimizer.step()
    return flat_param.full_state_dict(model)["model"]


def worker(*_: str) -> None:
    """Run one rank: its half with either boundary, and the whole model alone."""
    dist.init_process_group("gloo")
    halves = list(torch.randn(2, 8, 15, generator=torch.Generator().manual_seed(1)))
    alone, mine = train(halves).values(), [halves[dist.get_rank()]]
    blocks = train(mine, boundary=flat_param.Blocks(BLOCK)).values()
    assert all(map(torch.equal, blocks, alone))
    refused = ""
    try:
        train(mine, boundary="element")
    except flat_param.ParameterError as error:
        refused = str(error)
    assert "full_tensor()" in refused, "a scale of a part of a block was computed"
    dist.destroy_process_group()


if on_ranks(worker, (2, "")):
    print("claim holds: all weights are equal, every bit")

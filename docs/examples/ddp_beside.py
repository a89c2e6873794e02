"""DDP over blocks in `checkpoint_`, compared with torch's `checkpoint_wrapper`, on two ranks.

    python docs/examples/ddp_beside.py            # starts torchrun

Claim: weights are bit-identical to plain blocks; no more bytes are kept than by torch's wrapper.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group exists, which a later import keeps alive
from kept import on_ranks, side_by_side
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ckpt_wrap import checkpoint_


def train(change: object) -> nn.Module:
    """Train for three steps with changed blocks."""
    torch.manual_seed(0)
    layers = [(nn.Linear(32, 128), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(3)]
    ddp = DistributedDataParallel(nn.Sequential(*(change(nn.Sequential(*one)) for one in layers)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()
    return ddp


def compare() -> None:
    """Run all three. DDP is freed here: freed after its group, it may hang."""
    ways = {"plain": nn.Module.train, "checkpoint_": checkpoint_, "torch": checkpoint_wrapper}
    models = {name: train(change) for name, change in ways.items()}
    batch, first = torch.randn(64, 32), dist.get_rank() == 0
    found = side_by_side(models, lambda ddp: ddp(batch).square().mean(), say=first)
    ours, plain = models["checkpoint_"].state_dict(), models["plain"].state_dict()
    assert found["checkpoint_"].kept_bytes <= found["torch"].kept_bytes < found["plain"].kept_bytes
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def worker(*_: str) -> None:
    """Run one rank."""
    dist.init_process_group("gloo")
    compare()
    dist.barrier()  # a rank that exits blocks others in a collective
    dist.destroy_process_group()


if on_ranks(worker, (2, "")):
    print("claim holds: all weights are equal, every bit")

"""FSDP2 and flat-param's `fully_shard` train the same checkpointed model on two ranks.

    python docs/examples/fsdp2_beside.py          # starts torchrun

Claim: with blocks in `checkpoint_`, both train to the same weights, and names are plain.
"""

import copy

import torch
import torch.distributed as dist
from kept import on_ranks, side_by_side
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

import flat_param
from ckpt_wrap import checkpoint_


def train(model: nn.Sequential, shard: object) -> None:
    """Shard every block and the rest, and train for three steps."""
    for block in model[:-1]:
        shard(checkpoint_(block))
    optimizer = torch.optim.SGD(shard(model).parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


def worker(*_: str) -> None:
    """Run one rank: train with both libraries and compare the full weights."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    first = nn.Sequential(*blocks, nn.Linear(16, 4))
    models, names = {"FSDP2": first, "flat-param": copy.deepcopy(first)}, list(first.state_dict())
    train(models["FSDP2"], fsdp2)
    train(models["flat-param"], flat_param.fully_shard)
    leads = dist.get_rank() == 0
    side_by_side(models, lambda m: m(torch.ones(256, 16)).mean(), compare=False, say=leads)
    theirs = {name: value.full_tensor() for name, value in first.state_dict().items()}
    ours = flat_param.full_state_dict(models["flat-param"])["model"]
    assert list(theirs) == list(ours) == names
    assert all(map(torch.equal, ours.values(), theirs.values()))
    dist.destroy_process_group()


if on_ranks(worker, (2, "")):
    print("claim holds: all weights of both are equal, every bit")

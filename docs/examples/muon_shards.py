"""Muon on whole matrices and AdamW on the rest, of a model that two ranks share.

    python docs/examples/muon_shards.py           # starts torchrun

Claim: weights are bit-identical to one process; each matrix is on one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from kept import on_ranks
from torch import Tensor, nn

import flat_param


def model_of(seed: int = 0) -> nn.Sequential:
    """Three layers; the middle ones have equal shapes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.Linear(48, 4))


def train(model: nn.Module, shares: list[Tensor]) -> None:
    """Run five steps; the gradient is the mean over shares, summed in the order of ranks."""
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    others = [param for name, param in model.named_parameters() if not name.endswith("weight")]
    mine = [param for param in weights if param.numel()]  # a rank has a whole matrix, or none of it
    optimizers = [torch.optim.Muon(mine, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    for _ in range(5):
        model.zero_grad()
        for share in shares:
            model(share).square().mean().backward()
        for param in model.parameters() if len(shares) > 1 else ():
            param.grad /= len(shares)
        for optimizer in optimizers:
            optimizer.step()


def worker(*_: str) -> None:
    """Run one rank: its half, and the whole model alone."""
    dist.init_process_group("gloo")
    halves = list(torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)))
    whole = flat_param.by_name({"*weight": "tensor"})  # biases may be cut between elements
    train(model := flat_param.fully_shard(model_of(), boundary=whole), [halves[dist.get_rank()]])
    train(alone := model_of(), halves)
    whole_state = flat_param.full_state_dict(model)["model"]
    assert all(map(torch.equal, whole_state.values(), alone.state_dict().values()))
    dist.destroy_process_group()


if on_ranks(worker, (2, "")):
    print("claim holds: all weights are those of one process, every bit")

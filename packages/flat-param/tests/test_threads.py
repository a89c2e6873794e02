"""Training of a sharded module in another thread than the one that sharded it."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from flat_param import fully_shard

pytestmark = pytest.mark.usefixtures("group_of_one")


def test_training_in_another_thread_is_plain(mlp: nn.Sequential) -> None:
    """A new thread for each step; losses and parameters are those of the plain module, bitwise."""
    plain, sharded = copy.deepcopy(mlp), fully_shard(mlp)
    found = []
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 10).view(2, 5)).square().sum()
            loss.backward()
            optimizer.step()
            return loss.item()

        losses = []
        for _ in range(3):
            with ThreadPoolExecutor(1) as thread:
                losses.append(thread.submit(step).result())
        found.append((losses, [value.clone() for value in model.state_dict().values()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))

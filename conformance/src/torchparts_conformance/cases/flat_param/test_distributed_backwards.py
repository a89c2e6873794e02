"""Backward passes of a sharded module inside another backward.

On the CPU, one and two ranks with gloo. On an accelerator, its own backend with as many ranks as
devices, at most two.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchparts_conformance import requirement
from torchparts_conformance.cases._devices import lag, no_races
from torchparts_conformance.cases.flat_param._sharded import (
    distance,
    most_ranks,
    place,
    stepped,
)

WIDTH, UNITS, STEPS, ROWS = 6, 3, 3, 4


class _Again(nn.Module):
    """A reentrant checkpoint of its inner module, or that module unchanged."""

    def __init__(self, inner, again):
        super().__init__()
        self.inner, self.again = inner, again

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True) if self.again else self.inner(x)


def _plain(where, way=""):
    """Linear layers around blocks, with reentrant checkpoints inside or around units."""
    torch.manual_seed(1)
    blocks = []
    for _ in range(UNITS):
        layers = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        unit = nn.Sequential(_Again(layers, way in ("inside", "both")))
        blocks.append(_Again(unit, way in ("around", "both")))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 3)).to(where)


def _sharded(part, where, way="", **options):
    model = _plain(where, way)
    for block in model[1:-1]:
        part.fully_shard(block.inner, **options)
    return part.fully_shard(model, **options)


def _batches(world_size, where, step=0):
    """Return one batch per rank, optionally with requires_grad."""
    given = torch.Generator().manual_seed(step)
    data = torch.randn(world_size, ROWS, WIDTH, generator=given).to(where)
    return [batch.requires_grad_() for batch in data]


def _loss(model, batch):
    return model(batch).square().mean()


def _losses(plain, model, data, rank):
    """Return the mean loss over ranks in one process, and this rank's loss."""
    whole = sum(_loss(plain, batch) for batch in data) / len(data)
    return whole, _loss(model, data[rank])


def _are_same(model, plain):
    """Whether steps end in the same values: the mean over one or two ranks is exact."""
    return distance(stepped(model), stepped(plain)) == 0


def _again(part, rank, world_size, kind, way):
    """Whether each of three steps equals that of one process without checkpoints."""
    where, options = place(kind, rank)
    plain, model, same = _plain(where), _sharded(part, where, way, **options), []
    with no_races(kind):
        lag(kind, kernel_us=20, comm_us=50)
        for step in range(STEPS):
            for module in (plain, model):
                module.zero_grad()
            for loss in _losses(plain, model, _batches(world_size, where, step), rank):
                loss.backward()
            same.append(_are_same(model, plain))
    return same


@requirement(
    "FP-246",
    "Reentrant checkpoints (`use_reentrant=True`) inside a unit, around it, or both MUST give "
    "bitwise the gradients of a plain module without checkpoints, on one and two ranks.",
    rationale=(
        "each reentrant checkpoint runs a backward inside the outer backward; gradients that are "
        "reduced before it has finished are lost or appear in the next step"
    ),
    profile="distributed",
)
@pytest.mark.parametrize("way", ["inside", "around", "both"])
@pytest.mark.parametrize("count", [1, 2])
def test_reentrant_checkpoints(part, device, ranks, count, way):
    """Inside units, around them, and both."""
    size = min(count, most_ranks(device))
    assert ranks(size, _again, device, way) == [[True] * STEPS] * size

"""Sharded steps with the host far ahead of the device: streams, threads, overlap.

On the CPU, two ranks with gloo. On an accelerator, its own backend with as many ranks as devices,
at most two. `_devices` describes how a missing wait is noticed.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases._devices import lag, no_races
from torchparts_conformance.cases.flat_param._sharded import (
    distance,
    most_ranks,
    place,
    whole_state,
)

WIDTH, UNITS, STEPS, ROWS = 64, 6, 3, 8


def _plain(where):
    torch.manual_seed(1)
    units = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS))
    return nn.Sequential(*units).to(where)


def _sharded(part, where, **options):
    model = _plain(where)
    for unit in model:
        part.fully_shard(unit, **options)
    return part.fully_shard(model, **options)


def _batches(rank, count):
    given = torch.Generator().manual_seed(rank)
    return torch.randn(count, ROWS, WIDTH, generator=given)


def _expected(where, world_size, micro_batches):
    """State of the model after one process trained on the batches of all ranks."""
    model = _plain(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [_batches(rank, STEPS * micro_batches).to(where) for rank in range(world_size)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            for mine in data:
                batch = mine[step * micro_batches + micro]
                (model(batch).square().mean() / world_size).backward()
        optimizer.step()
    return whole_state(model)


def _far_ahead(part, rank, world_size, kind, way):
    """Distance to training in one process, with the device far behind."""
    where, options = place(kind, rank)
    micro_batches = 2 if way == "microbatches" else 1
    if way == "kept":
        options["reshard_after_forward"] = False
    with no_races(kind):
        model = _sharded(part, where, **options)
        data = _batches(rank, STEPS * micro_batches).to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lag(kind, kernel_us=20, comm_us=500)
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                is_last = micro + 1 == micro_batches
                with contextlib.nullcontext() if is_last else model.no_sync():
                    batch = data[step * micro_batches + micro]
                    model(batch).square().mean().backward()
            optimizer.step()
        return distance(whole_state(model), _expected(where, world_size, micro_batches))


@requirement(
    "FP-235",
    "However far the host runs ahead of the device, training MUST equal that of one process: with"
    " prefetched units in forward and backward, with units not resharded after forward, and with "
    "microbatches of which only the last reduces gradients.",
    rationale="collectives overlap with the step; a missing wait is a race that shows only rarely",
    profile="distributed",
)
@pytest.mark.parametrize("way", ["freed", "kept", "microbatches"])
def test_steps_with_the_host_far_ahead(part, device, ranks, way):
    """Parameters resharded after forward or kept, and two microbatches."""
    for away in ranks(most_ranks(device), _far_ahead, device, way):
        assert away < 1e-6

"""All parts together over 2 and 4 gloo ranks; each rank trains on its rows of the same batch."""

from __future__ import annotations

import pytest
import torch

from torchparts_conformance import requirement
from torchparts_conformance.cases.combined._training import (
    BATCH,
    BLOCK_FLOPS,
    BLOCKS,
    NAMES,
    PRODUCTS,
    STEPS,
    Seen,
    batch,
    checkpoint_blocks,
    make_model,
    offload_blocks,
    train,
)

WORLDS = pytest.mark.parametrize("world_size", [2, 4])


def _sharded(parts, policy=None, *, offload=False, checkpoint=True):
    """Return the model with each block checkpointed and sharded as a unit."""
    model = make_model()
    if checkpoint:
        checkpoint_blocks(parts, model, policy)
    if offload:
        offload_blocks(parts, model)
    for block in model[:BLOCKS]:
        parts.flat_param.fully_shard(block)
    return parts.flat_param.fully_shard(model)


def _rows(step, rank, world_size):
    per_rank = BATCH // world_size
    return batch(step)[rank * per_rank : (rank + 1) * per_rank]


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(model, rank, world_size):
    """Train like `train` on one process; return this rank's losses."""
    optimizer, losses = _optimizer(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(_rows(step, rank, world_size)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _whole(parts, model):
    state = parts.flat_param.full_state_dict(model)["model"]
    return {name: value.tolist() for name, value in state.items()}


def _assert_plain(results):
    """Assert that the mean loss and every rank's full parameters equal plain training."""
    plain = train(make_model())
    losses = torch.tensor([result[0] for result in results]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(plain.losses), rtol=1e-5, atol=1e-6)
    for _, params in results:
        assert list(params) == list(plain.params)
        for name, value in plain.params.items():
            torch.testing.assert_close(torch.tensor(params[name]), value, rtol=1e-5, atol=1e-6)


def _all_four(parts, rank, world_size):
    model = _sharded(parts, PRODUCTS, offload=True)
    seen = Seen(parts, model)
    with seen.watching():
        model(_rows(0, rank, world_size)).square().mean().backward()
    model.zero_grad()
    with parts.mod_tracker.profile_flops(model) as report:
        model(_rows(0, rank, world_size)).square().mean().backward()
    root = type(model).__name__
    flops = [report[f"{root}.{index}"] for index in range(BLOCKS)]
    model.zero_grad()
    return {
        "names": seen.names,
        "flops": [(row.forward, row.recompute) for row in flops],
        "training": (_train(model, rank, world_size), _whole(parts, model)),
    }


@requirement(
    "CB-032",
    "All four parts on 2 and 4 ranks MUST train as the plain model, with plain names and exact "
    "FLOPs by phase on each rank.",
    rationale="each part can be right alone and wrong in combination",
    profile="distributed",
)
@WORLDS
def test_all_four_over_ranks(ranks, world_size):
    """Training, names and FLOPs equal the plain model's on every rank."""
    results = ranks(world_size, _all_four)
    for result in results:
        assert result["names"]["forward"] == NAMES
        assert set(result["names"].get("recompute", [])) <= set(NAMES)
        assert result["flops"] == [[BLOCK_FLOPS // world_size, 0]] * BLOCKS
    _assert_plain([result["training"] for result in results])

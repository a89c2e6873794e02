"""The parts together over 2 and 4 gloo ranks; each rank sees its rows of the same batch."""

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
    Block,
    Seen,
    batch,
    checkpoint_blocks,
    make_model,
    offload_blocks,
    train,
)

WORLDS = pytest.mark.parametrize("world_size", [2, 4])


def _sharded(parts, policy=None, *, offload=False, checkpoint=True):
    """Give the model with each block checkpointed and a unit of its own."""
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
    """Train as `train` does on one process; give this rank's losses."""
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


def _trained(parts, rank, world_size, save_products, offload):
    model = _sharded(parts, PRODUCTS if save_products else None, offload=offload)
    losses = _train(model, rank, world_size)
    return losses, _whole(parts, model)


def _assert_plain(results):
    """Hold the mean of the ranks' losses and every rank's whole parameters to plain training."""
    plain = train(make_model())
    losses = torch.tensor([result[0] for result in results]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(plain.losses), rtol=1e-5, atol=1e-6)
    for _, params in results:
        assert list(params) == list(plain.params)
        for name, value in plain.params.items():
            torch.testing.assert_close(torch.tensor(params[name]), value, rtol=1e-5, atol=1e-6)


@requirement(
    "CB-030",
    level="MUST",
    text=(
        "A model sharded over 2 and over 4 ranks whose blocks are checkpointed in place MUST "
        "train as the plain model, up to rounding of sums."
    ),
    rationale="recompute needs parameters that were given back after forward",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
@WORLDS
def test_sharded_and_checkpointed_trains_as_plain(ranks, world_size):
    """Losses and parameters of three steps are those of one process."""
    _assert_plain(ranks(world_size, _trained, False, False))


@requirement(
    "CB-031",
    level="MUST",
    text=(
        "A sharded model with a selective policy and offload on its blocks MUST train as the "
        "plain model, up to rounding of sums."
    ),
    rationale="the reason for one suite",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
@WORLDS
def test_sharded_selective_and_offloaded_trains_as_plain(ranks, world_size):
    """A policy and offload on each block change neither losses nor parameters."""
    _assert_plain(ranks(world_size, _trained, True, True))


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
    level="MUST",
    text=(
        "All four parts on 2 and 4 ranks MUST train as the plain model, with plain names and "
        "exact FLOPs by phase on each rank."
    ),
    rationale="the reason for one suite",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
@WORLDS
def test_all_four_over_ranks(ranks, world_size):
    """Training, names and FLOPs are the plain ones on every rank."""
    results = ranks(world_size, _all_four)
    for result in results:
        assert result["names"]["forward"] == NAMES
        assert set(result["names"].get("recompute", [])) <= set(NAMES)
        assert result["flops"] == [[BLOCK_FLOPS // world_size, 0]] * BLOCKS
    _assert_plain([result["training"] for result in results])


def _save(parts, rank, world_size, folder):
    model = _sharded(parts)
    optimizer = _optimizer(model)
    model(_rows(0, rank, world_size)).square().mean().backward()
    optimizer.step()
    parts.flat_param.save_sharded(model, folder, optimizer=optimizer)
    return _whole(parts, model)


def _load(parts, rank, world_size, folder):
    model = _sharded(parts, PRODUCTS)
    with torch.no_grad(), model.whole_params(write_back=True):
        for parameter in model.parameters():
            parameter.zero_()
    parts.flat_param.load_sharded(model, folder, optimizer=_optimizer(model))
    return _whole(parts, model)


@requirement(
    "CB-033",
    level="MUST",
    text=(
        "A checkpoint of a sharded, checkpointed model written by 2 ranks MUST load on 1 and on"
        " 4 ranks, under the plain model's keys."
    ),
    rationale="checkpoints outlive the world size",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_checkpoint_loads_on_another_world_size(ranks, world_size, tmp_path):
    """What 2 ranks wrote is read by 1 and by 4, under the plain keys."""
    folder = str(tmp_path / "checkpoint")
    written = ranks(2, _save, folder)[0]
    assert list(written) == list(make_model().state_dict())
    assert ranks(world_size, _load, folder) == [written] * world_size


def _bytes(parts, rank, world_size, checkpoint):
    model = _sharded(parts, checkpoint=checkpoint)
    optimizer = _optimizer(model)
    model(_rows(0, rank, world_size)).square().mean().backward()
    optimizer.step()
    held = list(model.parameters())
    states = [optimizer.state[parameter]["momentum_buffer"] for parameter in held]
    plan = parts.flat_param.plan_training(
        parts.flat_param.unit_shapes(make_model(), units=Block),
        world_size=world_size,
        state_tensors=1,
        rank=rank,
    ).rank_bytes
    return {
        "found": [_storage_bytes(held), _storage_bytes([p.grad for p in held])],
        "state": _nbytes(states),
        "planned": [plan.params, plan.grads, plan.optimizer],
    }


def _storage_bytes(tensors):
    """Add up storages, each once: parameters are pieces of one buffer for each unit."""
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for address, size in kept.items() if address)


def _nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@requirement(
    "CB-034",
    level="MUST",
    text=(
        "Bytes of parameters, gradients and optimizer state on each rank MUST be what the "
        "planner said, whether or not blocks are checkpointed."
    ),
    rationale="a plan is only useful if it is true",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
@WORLDS
@pytest.mark.parametrize("checkpoint", [False, True], ids=["plain", "checkpointed"])
def test_memory_is_as_planned(ranks, world_size, checkpoint):
    """Bytes kept on each rank between steps are those of the plan."""
    for result in ranks(world_size, _bytes, checkpoint):
        params, grads, optimizer = result["planned"]
        assert result["found"] == [params, grads]
        assert result["state"] == optimizer

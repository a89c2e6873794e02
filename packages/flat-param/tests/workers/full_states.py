"""Whole state dicts on one rank, or in CPU memory; one check per claim."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from _harness import batches, loss_of, main, plain, raises, run_checks, sharded, share
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import flat_param
from flat_param.checkpoint import _state_dict
from flat_param.sharded import _full_params


def trained(rank: int, world: int, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0)
    (ids,) = batches(world, 1)
    loss_of(model, share(ids, rank)).backward()
    optimizer.step()
    return optimizer


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Every value by its path."""
    if isinstance(state, dict):
        return {
            k: v for name, part in state.items() for k, v in flat(part, f"{prefix}{name}/").items()
        }
    return {prefix: state}


def same(first: Any, second: Any) -> None:
    """Assert that two states have the same keys and values."""
    ours, theirs = flat(first), flat(second)
    assert sorted(ours) == sorted(theirs)
    for key, value in ours.items():
        equal = (
            torch.equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key]
        )
        assert equal, key


def check_first_rank_alone_has_all(rank: int, world: int) -> None:
    """The same values as on every rank, and empty dicts on the others, whatever divides them."""
    mesh = init_device_mesh("cpu", (world, 1))
    for options in (
        {},
        {"boundary": "tensor"},
        {"strategy": "NO_SHARD"},
        {"strategy": "HYBRID_SHARD", "mesh": mesh},
    ):
        model = sharded(**options)
        optimizer = trained(rank, world, model)
        everywhere = flat_param.full_state_dict(model, optimizer=optimizer)
        for moves in (False, True):
            found = flat_param.full_state_dict(
                model, optimizer=optimizer, rank0_only=True, offload_to_cpu=moves
            )
            same(found, everywhere if rank == 0 else {"model": {}, "optim": {}})
        alone = flat_param.full_state_dict(model, rank0_only=True)
        assert list(alone) == ["model"]
        same(alone["model"], everywhere["model"] if rank == 0 else {})
        same(flat_param.full_state_dict(model, optimizer=optimizer), everywhere)


def check_it_is_fsdp1s(rank: int, world: int) -> None:
    """Model and optimizer, with FSDP1's options of the same names."""
    if world == 1:
        return  # FSDP1 divides nothing
    torch.manual_seed(0)
    theirs = FullyShardedDataParallel(
        plain(scalars=False), device_id=torch.device("cpu"), use_orig_params=True
    )
    ours = sharded(scalars=False)
    their_optimizer, our_optimizer = trained(rank, world, theirs), trained(rank, world, ours)
    configs = (
        FullStateDictConfig(rank0_only=True),  # offload_to_cpu crashes it on the CPU
        FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        kind = StateDictType.FULL_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(theirs, kind, *configs):
            model = theirs.state_dict()
            optim = FullyShardedDataParallel.optim_state_dict(theirs, their_optimizer)
    found = flat_param.full_state_dict(
        ours, optimizer=our_optimizer, rank0_only=True, offload_to_cpu=True
    )
    close(found["model"], dict(model))
    close(found["optim"].get("state", {}), optim.get("state", {}))
    assert bool(found["model"]) == bool(model) == (rank == 0)


def close(first: Any, second: Any) -> None:
    """The same up to the order of sums; FSDP1 has state of what was never used, too."""
    ours, theirs = flat(first), flat(second)
    assert ours.keys() <= theirs.keys()
    assert all("unused" in key for key in theirs.keys() - ours.keys())
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key])


def check_others_hold_one_unit_at_a_time(rank: int, world: int) -> None:
    """What is gathered on another rank is gone before the next is."""
    model = sharded()
    gathered: list[StorageWeakRef] = []
    most = [0]
    real = _full_params.ShardedParams.gather_into

    def gather_into(part: Any, full: Tensor, **rest: Any) -> Any:
        # gloo's thread lets go of a tensor a moment after whoever waits is told.
        end = time.monotonic() + 10
        while rank and time.monotonic() < end and not all(each.expired() for each in gathered):
            time.sleep(0.001)
        most[0] = max(most[0], sum(not each.expired() for each in gathered))
        gathered.append(StorageWeakRef(full.untyped_storage()))
        return real(part, full, **rest)

    _full_params.ShardedParams.gather_into = gather_into
    try:
        flat_param.full_state_dict(model, rank0_only=True)
    finally:
        _full_params.ShardedParams.gather_into = real
    assert len(gathered) == 4
    assert (most[0] == 0) == (rank > 0)


def check_what_is_in_no_unit_moves_too(rank: int, world: int) -> None:
    """Buffers and state of ignored parameters, beside what was gathered."""
    moved: list[int] = []
    real = _state_dict._may_move

    def may_move(value: object) -> bool:
        moved.append(id(value))
        return real(value)

    model = plain()
    flat_param.fully_shard(model, ignored_params=set(model.head.parameters()))
    optimizer = trained(rank, world, model)
    _state_dict._may_move = may_move
    try:
        flat_param.full_state_dict(model, optimizer=optimizer, offload_to_cpu=True)
    finally:
        _state_dict._may_move = real
    assert id(optimizer.state[model.head.weight]["exp_avg"]) in moved


def check_dtensors_are_refused_by_name(rank: int, world: int) -> None:
    """In a unit or in none, since no rank has all; not without `rank0_only`."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))

    def cut() -> nn.Parameter:
        return nn.Parameter(distribute_tensor(torch.ones(2 * world, 2), mesh["tp"], [Shard(0)]))

    inside, outside = nn.Linear(2, 2 * world), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inside.weight = cut()
    flat_param.fully_shard(inside, mesh=mesh["dp"])
    flat_param.fully_shard(outside[0])
    outside[1].weight = cut()
    for module, name in ((inside, "weight"), (outside, "1.weight")):
        text = f"flat_param.full_state_dict: parameter '{name}' is a DTensor, but rank0_only"
        raises(
            flat_param.StateError,
            text,
            lambda module=module: flat_param.full_state_dict(module, rank0_only=True),
        )
        assert name in flat_param.full_state_dict(module, offload_to_cpu=True)["model"]


if __name__ == "__main__":
    main(lambda rank, world: run_checks(globals(), rank, world))

"""The quicker checks of the other workers, and one round of a checkpoint, in two seconds."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import hooks
import torch
import torch.distributed as dist
import unit_dtypes
import unit_memory
import unit_optimizers
import unit_options
import unit_passes
import unit_values
from _harness import (
    STRATEGIES,
    batches,
    distance,
    loss_of,
    main,
    plain,
    run_checks,
    sharded,
    share,
)
from checkpoints import assert_same, fresh, refused, saved, state

import flat_param

CHOSEN = {
    unit_options: (
        "first_rank_can_speak_for_all",
        "ranks_come_from_a_mesh_or_a_group",
    ),
    unit_values: ("plain_state_loads_and_mismatches_are_named",),
    unit_passes: (
        "layer_unused_on_one_rank_gets_the_mean_with_zero",
        "no_sync_accumulates_and_stays_silent",
    ),
    unit_memory: ("peak_of_whole_parameters_is_as_planned",),
    unit_dtypes: ("dtype_change_is_followed",),
    unit_optimizers: (
        "clipping_knows_all_ranks",
        "torch_clipping_is_right_on_shards",
        "whole_tensor_optimizers_match_one_process_or_refuse",
    ),
    hooks: ("units_in_another_order_are_named_on_every_rank",),
    checkpoints: (
        "adafactor_state_is_kept",
        "damaged_files_are_refused_by_name",
        "mismatched_checkpoints_are_refused_by_name",
    ),
}


def check_one_layout_is_loaded_into_another(rank: int, world: int) -> None:
    """Parameters, moments, steps and options are those that were saved; training goes on."""
    path, whole = saved(rank, world, "round", strategy="FULL_SHARD")
    for options in ({"strategy": "SHARD_GRAD_OP", "boundary": "row"}, {"strategy": "NO_SHARD"}):
        model, optimizer = fresh(**options)
        flat_param.load_sharded(model, path, optimizer=optimizer)
        assert_same(state(model, optimizer), whole)
        loss_of(model, share(batches(world)[2], rank)).backward()
        optimizer.step()


def check_resharding_offline_changes_nothing(rank: int, world: int) -> None:
    """From two ranks to three, in one process."""
    path, whole = saved(rank, world, "offline")
    if rank == 0:
        flat_param.reshard_checkpoint(path, path.with_name("three"), world_size=3)
    dist.barrier()
    model, optimizer = fresh()
    flat_param.load_sharded(model, path.with_name("three"), optimizer=optimizer)
    assert_same(state(model, optimizer), whole)


def check_a_flipped_bit_is_refused(rank: int, world: int) -> None:
    """In the middle of a part's data."""
    path, _ = saved(rank, world, "flipped")
    if rank == 0:
        part = next(path.glob("*-rank-1-of-*/*.distcp"))
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    dist.barrier()
    model, optimizer = fresh()
    refused(lambda: flat_param.load_sharded(model, path, optimizer=optimizer), "checksum")


def check_every_rank_has_the_same_sum(rank: int, world: int) -> None:
    """Of every strategy: whole parameters after a step are one process's."""
    for strategy in STRATEGIES:
        reference, model = plain(), sharded(strategy=strategy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
        (ids,) = batches(world, 1)
        loss_of(reference, ids).backward()
        loss_of(model, share(ids, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert distance(model.state_dict(), reference.state_dict()) < 1e-6


def run(rank: int, world: int, folder: str) -> dict[str, str]:
    """All checks."""
    checkpoints.FOLDER = Path(folder)
    chosen = {
        f"check_{claim}": getattr(module, f"check_{claim}")
        for module, claims in CHOSEN.items()
        for claim in claims
    }
    return run_checks({**globals(), **chosen}, rank, world)


if __name__ == "__main__":
    main(run)

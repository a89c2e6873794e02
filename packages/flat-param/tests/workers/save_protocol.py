"""Saves that go wrong or follow each other, one check per claim."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _harness import fill, main, run_checks, sharded, values
from torch import nn

import flat_param
from flat_param.checkpoint import _meeting
from flat_param.dcp import _dcp_write

FOLDER = Path()


def parts(path: Path) -> list[str]:
    """What lies there beside the metadata."""
    return sorted(name for name in os.listdir(path) if name != ".metadata")


def check_lone_call_is_not_joined_by_a_later_step(rank: int, world: int) -> None:
    """Rank 0 saves step 1 alone, both save step 2: the checkpoint is of step 2."""
    model, path = sharded(), FOLDER / "lone"
    fill(model, 1.0)
    if rank == 0:
        assert not flat_param.save_sharded(model, path)
    fill(model, 2.0)
    assert flat_param.save_sharded(model, path)
    dist.barrier()
    assert values(path) == [2.0]
    fill(model, 3.0)
    assert flat_param.save_sharded(model, path)
    dist.barrier()
    assert values(path) == [3.0]


def check_lone_call_of_the_other_rank_is_not_joined(rank: int, world: int) -> None:
    """The same where the rank that leads is the one that waits."""
    model, path = sharded(), FOLDER / "other"
    fill(model, 1.0)
    if rank == 1:
        assert not flat_param.save_sharded(model, path)
    fill(model, 2.0)
    assert flat_param.save_sharded(model, path)
    dist.barrier()
    assert values(path) == [2.0]


class Halves(nn.Module):
    """Two layers of one size: no parameter is cut between two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)


def check_lone_call_is_not_joined_where_nothing_is_cut(rank: int, world: int) -> None:
    """The same where each rank has whole parameters."""
    path = FOLDER / "halves"
    model = flat_param.fully_shard(Halves())
    assert all(p.numel() in (0, 6, 36) for p in model.parameters())
    fill(model, 1.0)
    if rank == 0:
        assert not flat_param.save_sharded(model, path, timeout_s=60)
    fill(model, 2.0)
    assert flat_param.save_sharded(model, path, timeout_s=60)
    dist.barrier()
    fill(model, 3.0)
    flat_param.load_sharded(model, path)
    state = model.state_dict()
    assert torch.cat([v.flatten() for v in state.values()]).unique().tolist() == [2.0]


def check_named_steps_are_compared(rank: int, world: int) -> None:
    """Where the caller says the step, that decides, whatever was written."""
    model, path = sharded(), FOLDER / "named"
    fill(model, 1.0)
    if rank == 0:
        fill(model, 1.0)
    for step in (1, 2) if rank == 0 else (2,):
        assert flat_param.save_sharded(model, path, step=step) == (step == 2)
    dist.barrier()


def check_lone_call_ends_and_spoils_nothing(rank: int, world: int) -> None:
    """It names the rank that did not come; the next saves, by all, are right."""
    model, path = sharded(), FOLDER / "ends"
    fill(model, 1.0)
    for lonely in (0, 1):
        if rank == lonely:
            start = time.monotonic()
            with pytest.raises(flat_param.CommError, match=rf"rank {1 - rank} did not answer"):
                flat_param.save_sharded(model, path, timeout_s=0.3)
            assert time.monotonic() - start < 5
        dist.barrier()
        assert not path.exists() or len(parts(path)) == 2
        assert flat_param.save_sharded(model, path)
    dist.barrier()
    assert values(path) == [1.0]


def full_disk(number: int) -> Any:
    """What `os.fsync` does there."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_full_disk_on_one_rank_is_named_on_all(rank: int, world: int) -> None:
    """Nothing is left of the attempt, the earlier checkpoint is whole, and all may try again."""
    model, path = sharded(), FOLDER / "full"
    fill(model, 1.0)
    assert flat_param.save_sharded(model, path)
    dist.barrier()
    before = parts(path)
    fill(model, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_dcp_write.os, "fsync", full_disk)
        with pytest.raises(flat_param.CheckpointError, match=r"is full \(No space") as raised:
            flat_param.save_sharded(model, path)
    assert ("part 1 of 2 cannot be saved" in str(raised.value)) == (rank == 0)
    assert "bytes are free), but this part needs" in str(raised.value)
    dist.barrier()
    assert parts(path) == before
    assert values(path) == [1.0]
    assert flat_param.save_sharded(model, path)
    dist.barrier()
    assert values(path) == [2.0]
    assert len(parts(path)) == 2


def check_hundreds_of_saves_to_one_path(rank: int, world: int) -> None:
    """Without a collective between them, each returns True and the last is there."""
    model, path = sharded(), FOLDER / "many"
    for step in range(300):
        fill(model, float(step))
        assert flat_param.save_sharded(model, path)
    dist.barrier()
    assert values(path) == [299.0]
    assert len(parts(path)) == 2


def check_part_of_another_attempt_is_not_taken(rank: int, world: int) -> None:
    """One that lies under the right name, but has another attempt's data, is refused."""
    model, path = sharded(), FOLDER / "swapped"
    fill(model, 1.0)
    assert flat_param.save_sharded(model, path)
    dist.barrier()
    old = {file: file.read_bytes() for file in sorted(path.glob("*-rank-1-*/*"))}
    old |= {file: file.read_bytes() for file in sorted(path.glob("*-rank-1-*/.metadata"))}
    dist.barrier()
    fill(model, 2.0)
    commit = flat_param.checkpoint._sharded_save.commit

    def swap_first(path: Path, *args: Any) -> None:
        (folder,) = (f for f in path.glob("*-rank-1-*") if f not in {g.parent for g in old})
        for file, data in old.items():
            (folder / file.name).write_bytes(data)
        commit(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_param.checkpoint._sharded_save, "commit", swap_first)
        with pytest.raises(flat_param.CheckpointError, match="is not what rank 1 has written"):
            flat_param.save_sharded(model, path)
    dist.barrier()
    assert values(path) == [1.0]


def check_another_path_or_model_is_refused(rank: int, world: int) -> None:
    """Ranks that meet to save different things are told so."""
    model = sharded()
    with pytest.raises(flat_param.CheckpointError, match="the path is a on the first rank and b"):
        flat_param.save_sharded(model, FOLDER / "ab"[rank])
    dist.barrier()
    assert not [part for name in "ab" if (FOLDER / name).exists() for part in parts(FOLDER / name)]


def check_error_before_writing_is_an_error_on_all(rank: int, world: int) -> None:
    """An optimizer of another module on one rank: the other does not wait for it."""
    model, path = sharded(), FOLDER / "before"
    trained = nn.Linear(2, 2) if rank == 0 else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    error = flat_param.ParameterError if rank == 0 else flat_param.CheckpointError
    with pytest.raises(error, match="that the module does not have"):
        flat_param.save_sharded(model, path, optimizer=optimizer)


def check_ranks_meet_without_a_store(rank: int, world: int) -> None:
    """Where torch does not hand it out, in collectives."""
    model, path = sharded(), FOLDER / "storeless"
    fill(model, 4.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_meeting, "default_store", lambda: None)
        assert flat_param.save_sharded(model, path)
    dist.barrier()
    assert values(path) == [4.0]


def check_copies_take_part(rank: int, world: int) -> None:
    """NO_SHARD has copies on all ranks: one is saved, and all hear of it."""
    model, path = sharded(strategy="NO_SHARD"), FOLDER / "copies"
    fill(model, 5.0)
    for _ in range(3):
        assert flat_param.save_sharded(model, path)
    dist.barrier()
    assert len(parts(path)) == 1
    assert values(path) == [5.0]


def run(rank: int, world: int, folder: str) -> dict[str, str]:
    """All checks."""
    global FOLDER
    FOLDER = Path(folder)
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)

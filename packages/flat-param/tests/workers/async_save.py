"""Saves that go on in a thread, one check per claim."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _harness import batches, fill, loss_of, main, run_checks, sharded, share, values
from torch import nn

import flat_param
from flat_param.checkpoint import _meeting, _writer
from flat_param.dcp import _dcp_write

FOLDER = Path()


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Nothing reaches the disk before the event."""
    may_write, real = threading.Event(), os.fsync

    def fsync(number: int) -> None:
        assert may_write.wait(60)
        real(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dcp_write.os, "fsync", fsync)
        try:
            yield may_write
        finally:
            may_write.set()


@contextmanager
def full_disk(here: bool) -> Iterator[None]:
    """No room, in the middle of this rank's part."""

    def fsync(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(_dcp_write.os, "fsync", fsync)
        yield


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    """Two steps, with all their collectives."""
    for ids in batches(world, 2):
        optimizer.zero_grad()
        loss_of(model, share(ids, rank)).backward()
        optimizer.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, buffers and moments, whole. Collective."""
    whole = flat_param.full_state_dict(model, optimizer=optimizer)
    moments = {
        f"{name}.{key}": value
        for name, each in whole["optim"]["state"].items()
        for key, value in each.items()
    }
    return {k: v.clone() for k, v in {**whole["model"], **moments}.items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


def check_steps_go_on_while_bytes_leave(rank: int, world: int) -> None:
    """Training while nothing reaches the disk changes nothing of what is saved."""
    path, model = FOLDER / "steps", sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank, world)
    before = state(model, optimizer)
    with slow_disk() as may_write:
        future = flat_param.async_save_sharded(model, path, optimizer=optimizer)
        optimizer.param_groups[0]["lr"] = 0.5
        model.scale.fill_(3.0)
        train(model, optimizer, rank, world)
        assert not future.done()
        assert not equal(state(model, optimizer), before)
        may_write.set()
        assert future.result() is True
    dist.barrier()
    loaded = sharded(seed=9)
    other = torch.optim.AdamW(loaded.parameters(), lr=0.1)
    flat_param.load_sharded(loaded, path, optimizer=other)
    assert equal(state(loaded, other), before)
    assert other.param_groups[0]["lr"] == 1e-2


def check_next_save_waits(rank: int, world: int) -> None:
    """Asynchronous or not: it looks at its module when the one before is over."""
    model, paths = sharded(), [FOLDER / f"waits-{index}" for index in range(3)]
    with slow_disk() as may_write:
        fill(model, 1.0)
        first = flat_param.async_save_sharded(model, paths[0])
        fill(model, 2.0)
        threading.Timer(0.2, may_write.set).start()
        second = flat_param.async_save_sharded(model, paths[1])
        assert first.done()
        fill(model, 3.0)
        assert flat_param.save_sharded(model, paths[2]) is True
        assert second.done()
    assert [first.result(), second.result()] == [True, True]
    dist.barrier()
    assert [values(path) for path in paths] == [[1.0], [2.0], [3.0]]


def check_lone_call_is_not_joined_by_a_later_step(rank: int, world: int) -> None:
    """Rank 0 saves step 1 alone, all save step 2: the checkpoint is of step 2."""
    model, path = sharded(), FOLDER / "lone"
    fill(model, 1.0)
    lone = flat_param.async_save_sharded(model, path) if rank == 0 else None
    fill(model, 2.0)
    future = flat_param.async_save_sharded(model, path)
    assert future.result() is True
    assert lone is None or lone.result() is False
    dist.barrier()
    assert values(path) == [2.0]


def check_error_of_one_rank_is_in_every_future(rank: int, world: int) -> None:
    """And the checkpoint before is whole; a save after it is right."""
    model, path = sharded(), FOLDER / "error"
    fill(model, 1.0)
    assert flat_param.save_sharded(model, path)
    fill(model, 2.0)
    with full_disk(rank == 1):
        error = flat_param.async_save_sharded(model, path).exception()
    assert isinstance(error, flat_param.CheckpointError)
    assert ("part 1 of" in str(error)) == (rank != 1)
    assert "is full (No space" in str(error)
    dist.barrier()
    assert values(path) == [1.0]
    assert flat_param.async_save_sharded(model, path).result() is True
    dist.barrier()
    assert values(path) == [2.0]


def check_error_that_nobody_asked_for_is_told_by_the_next_save(rank: int, world: int) -> None:
    """On the ranks that have not asked by its words, on the others by theirs."""
    model, path = sharded(), FOLDER / "unasked"
    fill(model, 1.0)
    assert flat_param.save_sharded(model, path)
    fill(model, 2.0)
    with full_disk(rank == 1):
        future = flat_param.async_save_sharded(model, path)
        while not future.done():
            time.sleep(0.01)
    if rank == 0:
        assert future.exception() is not None
    with pytest.raises(flat_param.CheckpointError) as raised:
        flat_param.save_sharded(model, path)
    assert "before this one has failed, but its future was never asked" in str(raised.value)
    assert ("part 1 of" in str(raised.value).partition("asynchronous")[0]) == (rank == 0)
    dist.barrier()
    assert values(path) == [1.0]
    assert flat_param.save_sharded(model, path) is True
    dist.barrier()
    assert values(path) == [2.0]


def check_rank_that_does_not_come_is_named(rank: int, world: int) -> None:
    """By the future; training is not held up meanwhile."""
    model, path = sharded(), FOLDER / "absent"
    if rank == 0:
        returned, real = threading.Event(), _writer._carry_out

        def carry_out(*given: Any) -> None:
            returned.wait(60)
            real(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_writer, "_carry_out", carry_out)
            future = flat_param.async_save_sharded(model, path, timeout_s=0.5)
        assert not future.done()
        returned.set()
        with pytest.raises(flat_param.CommError, match=r"rank 1.* did not answer within 0.5 s"):
            future.result()
    dist.barrier()
    assert flat_param.async_save_sharded(model, path).result() is True
    dist.barrier()


def check_group_without_a_store_is_refused(rank: int, world: int) -> None:
    """Collectives of a thread would come between those of training."""
    model = sharded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_meeting, "default_store", lambda: None)
        with pytest.raises(flat_param.CommError, match="torch gives no access to the process"):
            flat_param.async_save_sharded(model, FOLDER / "no-store")
    assert not (FOLDER / "no-store").exists()


def check_child_has_nothing_under_way(rank: int, world: int) -> None:
    """A child forked during a save neither waits for it nor ends it."""
    model, path = sharded(), FOLDER / "forked"
    fill(model, 1.0)
    with slow_disk() as may_write:
        future = flat_param.async_save_sharded(model, path)
        child = os.fork()
        if not child:
            threading.Timer(20, os._exit, (1,)).start()
            flat_param.checkpoint._writer.wait_for_last()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        may_write.set()
        assert future.result() is True
    dist.barrier()
    assert values(path) == [1.0]


def run(rank: int, world: int, folder: str) -> dict[str, str]:
    """All checks."""
    global FOLDER
    FOLDER = Path(folder)
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)

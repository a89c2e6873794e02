"""Saves that go on beside training, on two ranks."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    loss_of,
    mine,
    sharded,
    whole_state,
)


def _whole(part: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    state = part.full_state_dict(model, optimizer=optimizer)
    moments = state["optim"]["state"]
    found = {f"{n}.{key}": value for n in moments for key, value in moments[n].items()}
    return {key: torch.as_tensor(v).clone() for key, v in {**state["model"], **found}.items()}


def _step(model: Any, optimizer: Any, rank: int, world_size: int) -> None:
    loss_of(model, mine(batch(world_size), rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained_meanwhile(part: Any, rank: int, world_size: int, folder: str) -> list[Any]:
    model, loaded = sharded(part), sharded(part, 5)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, loaded)]
    for each in zip((model, loaded), optimizers, strict=True):
        _step(*each, rank, world_size)
    before = _whole(part, model, optimizers[0])
    future = part.async_save_sharded(model, folder, optimizer=optimizers[0])
    _step(model, optimizers[0], rank, world_size)
    moved = distance(_whole(part, model, optimizers[0]), before) > 0
    future.result()
    done = future.done()
    dist.barrier()
    part.load_sharded(loaded, folder, optimizer=optimizers[1])
    return [moved, done, distance(_whole(part, loaded, optimizers[1]), before)]


@requirement(
    "FP-230",
    level="MUST",
    text=(
        "`async_save_sharded` MUST save the parameters and optimizer state of its call, "
        "whatever training does before its future is done, and the future MUST end where "
        "`save_sharded` would."
    ),
    rationale=(
        "a copy that is taken late, or not at all, is a mixture of two steps that no checksum shows"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_async_save_is_of_its_call(part, ranks, tmp_path):
    """A step after the call, and before its end, is not in it."""
    assert ranks(2, _trained_meanwhile, str(tmp_path / "saved")) == [[True, True, 0.0]] * 2


def _fill(model: Any, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def _values(part: Any, folder: str) -> list[float]:
    model = part.fully_shard(nn.Linear(512, 512))
    part.load_sharded(model, folder)
    state = whole_state(model)
    return torch.cat([value.flatten() for value in state.values()]).unique().tolist()


def _saved_twice(part: Any, rank: int, world_size: int, folder: str) -> list[Any]:
    model, futures = part.fully_shard(nn.Linear(512, 512)), []
    for step in range(4):
        _fill(model, float(step))
        try:
            future = part.async_save_sharded(model, f"{folder}/{step}")
        except RuntimeError:
            futures[-1].result()
            future = part.async_save_sharded(model, f"{folder}/{step}")
        futures.append(future)
    _fill(model, 9.0)
    for future in futures:
        future.result()
    ended = [future.done() for future in futures]
    dist.barrier()
    return [ended, [_values(part, f"{folder}/{step}") for step in range(4)]]


@requirement(
    "FP-231",
    level="MUST",
    text=(
        "A save that is begun while another is under way MUST wait for it or raise an error, "
        "and what it has saved MUST be of its own call."
    ),
    rationale=(
        "two snapshots take twice the memory, and parts of two attempts at one path take each "
        "other's place"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_async_saves_follow_each_other(part, ranks, tmp_path):
    """Four without a pause between them: each checkpoint has its own values."""
    wanted = [[True] * 4, [[0.0], [1.0], [2.0], [3.0]]]
    assert ranks(2, _saved_twice, str(tmp_path)) == [wanted, wanted]


@contextmanager
def _files_end_at(size: int) -> Iterator[None]:
    """No file of this process can grow larger: the write fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _refused(call: Any) -> bool:
    try:
        call()
    except (RuntimeError, OSError):
        return True
    return False


def _failed(part: Any, rank: int, world_size: int, folder: str) -> list[Any]:
    model = part.fully_shard(nn.Linear(512, 512))
    _fill(model, 1.0)
    part.save_sharded(model, folder)
    dist.barrier()
    _fill(model, 2.0)
    with _files_end_at(2**17) if rank == 1 else nullcontext():
        future = part.async_save_sharded(model, folder)
        while not future.done():
            time.sleep(0.01)
    told = _refused(lambda: part.save_sharded(model, folder))
    dist.barrier()
    kept = _values(part, folder)
    part.save_sharded(model, folder)
    dist.barrier()
    return [told, future.exception() is not None, kept, _values(part, folder)]


@requirement(
    "FP-232",
    level="MUST",
    text=(
        "An asynchronous save that fails on one rank MUST fail on every rank, and where nobody "
        "has asked its future, the next save MUST raise the error; the checkpoint before MUST "
        "stay whole."
    ),
    rationale=(
        "an error in a thread that nobody joins is lost, and the run goes on for days without a"
        " checkpoint"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_error_of_an_async_save_is_told_by_the_next(part, ranks, tmp_path):
    """One rank cannot write: both hear of it, once, and the next save but one is right."""
    wanted = [True, True, [1.0], [2.0]]
    assert ranks(2, _failed, str(tmp_path / "saved")) == [wanted, wanted]

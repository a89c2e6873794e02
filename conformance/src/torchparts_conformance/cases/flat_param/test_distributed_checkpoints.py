"""Checkpoints of sharded modules, on two ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    loss_of,
    mine,
    plain,
    sharded,
)


def _trained(part: Any, rank: int, world_size: int, seed: int = 0) -> tuple[Any, Any]:
    model = sharded(part, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, mine(batch(world_size), rank)).backward()
    optimizer.step()
    return model, optimizer


def _same(part: Any, first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
    states = [part.full_state_dict(model, optimizer=opt) for model, opt in (first, second)]
    moments = [state["optim"]["state"] for state in states]
    weights = distance(states[0]["model"], states[1]["model"])
    rest = [distance(moments[0][name], moments[1][name]) for name in moments[0]]
    return list(moments[0]) == list(moments[1]) and weights == 0 and max(rest) == 0


def _state_dict(part: Any, rank: int, world_size: int) -> list[Any]:
    state, reference = sharded(part, 3).state_dict(), plain(3).state_dict()
    kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in reference.items()]
    same = [(name, tensor.shape, tensor.dtype) for name, tensor in state.items()] == kinds
    loaded = plain(4)
    loaded.load_state_dict(state)
    return [same, max(distance(state, reference), distance(loaded.state_dict(), reference))]


@requirement("FP-106")
def test_state_dict_is_the_plain_one(part, ranks):
    """Keys, shapes, dtypes and values, on both ranks, also once loaded."""
    assert ranks(2, _state_dict) == [[True, 0.0], [True, 0.0]]


def _round_trip(part: Any, rank: int, world_size: int, folder: str) -> list[Any]:
    first = _trained(part, rank, world_size)
    first[0].comm_counts()
    part.save_sharded(first[0], folder, optimizer=first[1])
    silent = not first[0].comm_counts()
    dist.barrier()
    second = _trained(part, rank, world_size, seed=5)
    part.load_sharded(second[0], folder, optimizer=second[1])
    return [silent, _same(part, first, second)]


@requirement("FP-107")
def test_sharded_save_is_silent_and_comes_back(part, ranks, tmp_path):
    """No collective; the same parameters, moments and steps."""
    assert ranks(2, _round_trip, str(tmp_path / "saved")) == [[True, True], [True, True]]


def _resharded(part: Any, rank: int, world_size: int, folder: str) -> bool:
    first = _trained(part, rank, world_size)
    part.save_sharded(first[0], f"{folder}/two", optimizer=first[1])
    dist.barrier()
    if rank == 0:
        part.reshard_checkpoint(f"{folder}/two", f"{folder}/three", world_size=3)
    dist.barrier()
    second = _trained(part, rank, world_size, seed=5)
    part.load_sharded(second[0], f"{folder}/three", optimizer=second[1])
    return _same(part, first, second)


@requirement("FP-108")
def test_checkpoint_cut_anew_holds_the_same(part, ranks, tmp_path):
    """From two ranks to three and back into two."""
    assert ranks(2, _resharded, str(tmp_path)) == [True, True]


class _Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def _hostile(part: Any, rank: int, world_size: int, folder: str) -> list[bool]:
    model = sharded(part)
    saved, mark = Path(folder, "saved"), Path(folder, f"executed-{rank}")
    part.save_sharded(model, saved)
    dist.barrier()
    if rank == 0:
        (saved / ".metadata").write_bytes(pickle.dumps(_Touch(str(mark))))
    dist.barrier()
    try:
        part.load_sharded(model, saved)
    except RuntimeError:
        return [True, mark.exists()]
    return [False, mark.exists()]


@requirement("FP-109")
def test_hostile_checkpoint_is_an_error_not_an_execution(part, ranks, tmp_path):
    """Refused, and the file is not there."""
    assert ranks(2, _hostile, str(tmp_path)) == [[True, False], [True, False]]

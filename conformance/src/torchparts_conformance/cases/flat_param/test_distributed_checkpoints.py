"""Checkpoints of sharded modules, on two ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import distance, plain, sharded, whole_state


def _state_dict(part: Any, rank: int, world_size: int) -> list[Any]:
    model, reference = sharded(part, 3), plain(3).state_dict()
    kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in reference.items()]
    same = [(name, t.shape, t.dtype) for name, t in model.state_dict().items()] == kinds
    state, loaded = whole_state(model), plain(4)
    loaded.load_state_dict(state)
    return [same, max(distance(state, reference), distance(loaded.state_dict(), reference))]


@requirement(
    "FP-106",
    "state_dict() of a sharded module MUST have the plain module's keys, shapes and dtypes on "
    "every rank, its full tensors MUST equal the plain module's, and the plain module MUST load "
    "them.",
    rationale="pytorch#102667: LOCAL_STATE_DICT does not load again even on two ranks",
    profile="distributed",
)
def test_state_dict_equals_the_plain_one(part, ranks):
    """Keys, shapes, dtypes and values, on both ranks, also after loading."""
    assert ranks(2, _state_dict) == [[True, 0.0], [True, 0.0]]


class _Touch:
    """Unpickling it creates a file."""

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


@requirement(
    "FP-109",
    "A checkpoint whose metadata contains code MUST be refused without running that code.",
    rationale="torch.distributed.checkpoint unpickles its metadata",
    profile="distributed",
)
def test_hostile_checkpoint_is_refused_without_running_code(part, ranks, tmp_path):
    """Loading raises, and the file was not created."""
    assert ranks(2, _hostile, str(tmp_path)) == [[True, False], [True, False]]


def _damaged(part: Any, rank: int, world_size: int, folder: str, which: str) -> list[bool]:
    model, other = sharded(part), sharded(part, 5)
    part.save_sharded(model, folder)
    dist.barrier()
    if rank == 0:
        files = sorted(Path(folder).rglob("*.distcp"), key=lambda file: str(file.parent)[-9:])
        file = files[-1] if which == "last" else files[0]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    dist.barrier()
    before = {name: tensor.clone() for name, tensor in whole_state(other).items()}
    try:
        part.load_sharded(other, folder)
        refused = False
    except RuntimeError:
        refused = True
    return [refused, distance(whole_state(other), before) == 0]


@requirement(
    "FP-115",
    "Loading a sharded checkpoint MUST raise an error if a byte of its data was changed.",
    rationale=(
        "torch.distributed.checkpoint compares no checksum, so training silently continues with "
        "damaged weights"
    ),
    profile="distributed",
)
def test_changed_byte_is_refused(part, ranks, tmp_path):
    """In the first rank's part, which at least the first rank reads."""
    found = ranks(2, _damaged, str(tmp_path / "saved"), "first")
    assert any(refused for refused, _ in found)


@requirement(
    "FP-116",
    "A sharded load that fails on one rank MUST fail on all ranks and MUST leave the parameters "
    "of every rank unchanged.",
    rationale="otherwise a caller that catches the error trains a mixture of two models",
    profile="distributed",
)
def test_load_that_fails_on_one_rank_changes_none(part, ranks, tmp_path):
    """Damage in one rank's part raises on both ranks, and both keep their parameters."""
    found = ranks(2, _damaged, str(tmp_path / "saved"), "last")
    assert found == [[True, True], [True, True]]

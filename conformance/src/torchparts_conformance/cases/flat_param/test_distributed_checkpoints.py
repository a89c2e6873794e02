"""Checkpoints of sharded modules, on two ranks."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._sharded import (
    batch,
    distance,
    loss_of,
    mine,
    plain,
    sharded,
    whole_state,
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
    model, reference = sharded(part, 3), plain(3).state_dict()
    kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in reference.items()]
    same = [(name, t.shape, t.dtype) for name, t in model.state_dict().items()] == kinds
    state, loaded = whole_state(model), plain(4)
    loaded.load_state_dict(state)
    return [same, max(distance(state, reference), distance(loaded.state_dict(), reference))]


@requirement(
    "FP-106",
    level="MUST",
    text=(
        "state_dict() of a sharded module MUST have the plain module's keys, shapes and dtypes on"
        " every rank; its tensors made whole MUST have the values, and load into one."
    ),
    rationale="pytorch#102667: LOCAL_STATE_DICT does not even load again on two ranks",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
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


@requirement(
    "FP-107",
    level="MUST",
    text=(
        "A sharded save MUST NOT gather parameters, and loading it MUST bring back parameters and"
        " optimizer state bit for bit."
    ),
    rationale="pytorch#138467: FSDP1's sharded state dict gathers everything first",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_sharded_save_gathers_nothing_and_comes_back(part, ranks, tmp_path):
    """No gather; the same parameters, moments and steps."""
    assert ranks(2, _round_trip, str(tmp_path / "saved")) == [[True, True], [True, True]]


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


@requirement(
    "FP-109",
    level="MUST",
    text="A checkpoint whose metadata would run code MUST be refused without running it.",
    rationale="torch.distributed.checkpoint unpickles its metadata",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_hostile_checkpoint_is_an_error_not_an_execution(part, ranks, tmp_path):
    """Refused, and the file is not there."""
    assert ranks(2, _hostile, str(tmp_path)) == [[True, False], [True, False]]


def _fill(model: Any, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


def _values(model: Any) -> list[float]:
    """The different numbers in a model's parameters."""
    names = dict(model.named_parameters())
    state = whole_state(model)
    return torch.cat([state[name].flatten() for name in names]).unique().tolist()


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
    level="MUST",
    text="A changed byte in the data of a sharded checkpoint MUST be an error when it is loaded.",
    rationale=(
        "torch.distributed.checkpoint compares no checksum; damaged weights train on without a word"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_changed_byte_is_refused(part, ranks, tmp_path):
    """In the part of the first rank, which the first rank reads at least."""
    found = ranks(2, _damaged, str(tmp_path / "saved"), "first")
    assert any(refused for refused, _ in found)


@requirement(
    "FP-116",
    level="MUST",
    text=(
        "A sharded load that fails on one rank MUST fail on all, and leave every rank's "
        "parameters as they were."
    ),
    rationale="otherwise a caller who goes on after the error trains a model that is half another",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_load_that_fails_on_one_rank_changes_none(part, ranks, tmp_path):
    """Damage in one rank's part: an error on both, and both keep their parameters."""
    found = ranks(2, _damaged, str(tmp_path / "saved"), "last")
    assert found == [[True, True], [True, True]]


def _saved_again_and_again(part: Any, rank: int, world_size: int, folder: str) -> list[float]:
    model, loaded = sharded(part), sharded(part, 5)
    for step in range(20):
        _fill(model, float(step))
        part.save_sharded(model, folder)
    dist.barrier()
    part.load_sharded(loaded, folder)
    return _values(loaded)


@requirement(
    "FP-185",
    level="MUST",
    text=(
        "Sharded saves to one path that follow each other, with no collective between them, "
        "MUST all succeed, and the last MUST be what is loaded."
    ),
    rationale=(
        "of 300, 11 said they had succeeded: a rank that was ahead removed the parts of one "
        "that was behind"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_saves_to_one_path_follow_each_other(part, ranks, tmp_path):
    """Twenty, with nothing between them that the ranks wait in."""
    assert ranks(2, _saved_again_and_again, str(tmp_path / "saved")) == [[19.0], [19.0]]


_FULL_AT = 2**17
"""Bytes: a quarter of a rank's part, and far more than the ranks' own store on the disk needs."""


@contextmanager
def _files_end_at(size: int) -> Iterator[None]:
    """No file of this process can grow larger: the write fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _files(folder: str) -> dict[str, int]:
    return {str(file): file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()}


def _no_room(part: Any, rank: int, world_size: int, folder: str) -> list[Any]:
    model, loaded = (part.fully_shard(nn.Linear(512, 512)) for _ in "ab")
    path = f"{folder}/saved"
    _fill(model, 1.0)
    part.save_sharded(model, path)
    dist.barrier()
    before, refused = _files(folder), []
    dist.barrier()
    _fill(model, 2.0)
    for _ in range(2):
        try:
            with _files_end_at(_FULL_AT) if rank == 1 else nullcontext():
                part.save_sharded(model, path)
            refused.append(False)
        except (RuntimeError, OSError):
            refused.append(True)
    dist.barrier()
    nothing_left = _files(folder) == before
    part.load_sharded(loaded, path)
    earlier = _values(loaded)
    part.save_sharded(model, path)
    dist.barrier()
    part.load_sharded(loaded, path)
    return [refused, nothing_left, earlier, _values(loaded)]


@requirement(
    "FP-186",
    level="MUST",
    text=(
        "A sharded save that cannot be written on one rank MUST be an error on all, MUST leave "
        "every file and the checkpoint before it as they were, and the next save MUST succeed."
    ),
    rationale="each failure left its draft, until the disk was full for good",
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_save_without_room_leaves_what_was_there(part, ranks, tmp_path):
    """Two fail as one rank cannot write; then there is room again."""
    wanted = [[True, True], True, [1.0], [2.0]]
    assert ranks(2, _no_room, str(tmp_path)) == [wanted, wanted]


_LAST = 40.0


def _read_while_saved(part: Any, rank: int, world_size: int, folder: str) -> list[str]:
    """Rank 0 saves alone, and rank 1 loads alone until all has been saved."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("one", "alone"))["alone"]
    model, path, end = sharded(part, mesh=mesh), Path(folder, "saved"), Path(folder, "end")
    _fill(model, 0.0)
    if rank == 0:
        part.save_sharded(model, path)
    dist.barrier()
    if rank == 0:
        for step in range(int(_LAST)):
            _fill(model, step + 1.0)
            part.save_sharded(model, path)
        end.touch()
        return []
    wrong, is_over = [], False
    while not is_over:
        is_over = end.exists()
        try:
            part.load_sharded(model, path)
        except RuntimeError as error:
            if is_over or "save" not in str(error):
                wrong.append(f"loading ended in {str(error)!r}")
            continue
        found = _values(model)
        if len(found) > 1 or (is_over and found != [_LAST]):
            wrong.append(f"{found} were loaded")
    return wrong[:3]


@requirement(
    "FP-187",
    level="MUST",
    text=(
        "A load while saves to its path are under way MUST give one of them whole, or an error "
        "that speaks of the save."
    ),
    rationale=(
        "an evaluation that reads while training saves; 32 of 256 loads ended in an error that "
        "blamed damage"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_load_during_saves_gives_one_of_them(part, ranks, tmp_path):
    """Never a mixture; the last once nobody saves any more."""
    assert ranks(2, _read_while_saved, str(tmp_path)) == [[], []]


def _scales_by_rank(part: Any, rank: int, world_size: int, folder: str) -> list[Any]:
    model, optimizer = _trained(part, rank, world_size)
    held = [values for param, values in optimizer.state.items() if param.numel()]
    for values in held:
        values["scales"] = torch.full((3,), float(rank))
    path = Path(folder, "saved")
    try:
        part.save_sharded(model, path, optimizer=optimizer)
    except RuntimeError as error:
        return [any(name in str(error) for name, _ in model.named_parameters()), path.exists()]
    dist.barrier()
    again, its = _trained(part, rank, world_size, 5)
    part.load_sharded(again, path, optimizer=its)
    found = [values.get("scales") for param, values in its.state.items() if param.numel()]
    as_saved = [each is not None and each.tolist() == [float(rank)] * 3 for each in found]
    return [len(found) == len(held) and all(as_saved), False]


@requirement(
    "FP-237",
    level="MUST",
    text=(
        "Optimizer state that is not of its parameter's shape, such as a scale for each block "
        "that a rank holds, MUST come back from a sharded checkpoint as each rank had it, or "
        "the save MUST be refused on every rank by the parameter's name."
    ),
    rationale=(
        "state of one rank alone looks like a checkpoint, and the other ranks train on with its"
        " numbers"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("cpu",),
)
def test_state_of_another_shape_is_kept_or_refused(part, ranks, tmp_path):
    """Each rank has its own scales again, or hears why not, and nothing was written."""
    assert ranks(2, _scales_by_rank, str(tmp_path)) == [[True, False], [True, False]]

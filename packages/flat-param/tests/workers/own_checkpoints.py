"""`save_sharded` and its relatives on two ranks; one check per claim.

Writes checkpoints into a folder, some of which `dcp_resume.py` loads.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _harness import raises
from _states import (
    UNUSED,
    full_values,
    optimizer_of,
    plain,
    plain_values,
    same,
    sharded,
    train,
    trained,
    truth,
    values_of,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import flat_param
from flat_param import CheckpointError, StateError
from flat_param.checkpoint._files import CheckedWriter

FOLDER = Path()
UNUSED.append("yes")


def at(name: str) -> str:
    """A path that all ranks have."""
    return f"{FOLDER}/own-{name}"


def saved(name: str) -> tuple[nn.Module, Any, str]:
    """A trained model, its optimizer, and where they were saved."""
    model, optimizer = trained(3)
    flat_param.save_sharded(model, at(name), optimizer=optimizer)
    return model, optimizer, at(name)


def unchanged_by(kind: type[Exception], text: str, call: Callable[[Any, Any], object]) -> None:
    """Assert that a load raises on every rank, and leaves model and optimizer alone."""
    model, optimizer = trained(1, 5)
    before = values_of(model, optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    raises(kind, text, lambda: call(model, optimizer))
    same(values_of(model, optimizer), before)
    assert [g["lr"] for g in groups] == [g["lr"] for g in optimizer.param_groups]
    assert model.note == "new"


def load_from(path: str) -> Callable[[Any, Any], None]:
    """Loads model and optimizer."""
    return lambda model, optimizer: flat_param.load_sharded(model, path, optimizer=optimizer)


def check_saved_and_loaded(rank: int, world: int) -> None:
    """Into a model whose optimizer has made no step and has its groups in another order."""
    for boundary in ("element", "row", "tensor"):
        model, optimizer = trained(3, boundary=boundary)
        model.note = "saved"
        path = at(boundary)
        assert flat_param.save_sharded(model, path, optimizer=optimizer) is None
        other = sharded(9, boundary=boundary)
        fresh = optimizer_of(other, flipped=True)
        with torch.no_grad():
            other.scale.fill_(0.0)
        flat_param.load_sharded(other, path, optimizer=fresh)
        same(values_of(other, fresh), truth(3))
        assert [group["lr"] for group in fresh.param_groups] == [0.02, 0.01]
        assert other.note == "saved"
        assert other.scale == 2.0
        train(other, fresh, 3, 5)
        same(values_of(other, fresh), truth(5))
        flat_param.load_sharded(model, path)
        dist.barrier()
        kept = sorted(os.listdir(path))
        assert len(kept) == 2, kept


def check_save_deletes_only_what_it_replaces(rank: int, world: int) -> None:
    """Not checkpoints inside the folder, folders of users, or files of others in its own folder."""
    path = Path(at("nested"))
    model, optimizer = trained(3)
    flat_param.save_sharded(model, path / "save-step-1000", optimizer=optimizer)
    flat_param.save_sharded(model, path / "save-0123456789ab")
    flat_param.save_sharded(model, path)
    (ours,) = {file.parent for file in path.glob("save-*/*.distcp")}
    dist.barrier()
    if rank == 0:
        (path / "save-notes").mkdir()
        (path / "save-notes/thesis.txt").write_text("mine")
        (path / "save-ba9876543210").symlink_to(path / "save-notes")
        (ours / "README").write_text("mine, too")
    dist.barrier()
    flat_param.save_sharded(model, path)
    dist.barrier()
    assert [file.name for file in ours.iterdir()] == ["README"]
    assert (path / "save-ba9876543210/thesis.txt").read_text() == "mine"
    for name in ("", "save-step-1000", "save-0123456789ab"):
        flat_param.load_sharded(sharded(9), path / name)
    torchs = Path(at("of-torch"))
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=torchs)
    files = sorted(torchs.glob("*.distcp"))
    flat_param.save_sharded(model, torchs)
    dist.barrier()
    assert files
    assert sorted(torchs.glob("*.distcp")) == files


def _params(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if "/" not in key}


def _data_files(path: str) -> list[Path]:
    return sorted(Path(path).glob("*/*.distcp"))


def check_damage_is_an_error_and_changes_nothing(rank: int, world: int) -> None:
    """Each bit counts: of weights, of metadata; and so does each missing byte, or file."""
    _, _, path = saved("damaged")
    file, metadata = _data_files(path)[1], Path(path, ".metadata")
    first = _data_files(path)[0]

    def flip(which: Path, position: float) -> Callable[[], None]:
        def change() -> None:
            data = bytearray(which.read_bytes())
            data[int(len(data) * position)] ^= 4
            which.write_bytes(data)

        return change

    def tail(which: Path) -> Callable[[], None]:
        return lambda: os.truncate(which, which.stat().st_size - 700)

    for what, change in (
        ("checksum", flip(file, 0.5)),
        ("checksum", flip(first, 0.02)),
        ("cut short", tail(file)),
        ("cut short", file.unlink),
        ("their checksum differs", flip(metadata, 0.5)),
        ("damaged", flip(metadata, 0.999)),
        (
            "damaged",
            lambda: flip(metadata, (metadata.stat().st_size - 12) / metadata.stat().st_size)(),
        ),
        ("metadata", lambda: os.truncate(metadata, 100)),
        ("no .metadata", metadata.unlink),
    ):
        if rank == 0:
            shutil.copytree(path, at("copy"))
            change()
        dist.barrier()
        unchanged_by(CheckpointError, what, load_from(path))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
            shutil.copytree(at("copy"), path)
            shutil.rmtree(at("copy"))
        dist.barrier()
    flat_param.load_sharded(sharded(9), path)


class Hostile:
    """Runs code where it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (self.file,)


def check_hostile_files_run_nothing(rank: int, world: int) -> None:
    """In metadata, in a value, in a file of `torch.save`; and no file outside is read."""
    model, optimizer, path = saved("hostile")
    metadata, mark = Path(path, ".metadata"), at("mark")
    good = metadata.read_bytes()
    dist.barrier()
    outside = pickle.loads(good)
    next(iter(outside.storage_data.values())).relative_path = "../outside"
    long_list = pickle.loads(good)
    key = next(key for key in long_list.planner_data if key.startswith("optim.param_groups"))
    long_list.planner_data[key] = ("optim", "param_groups", 10**9, "lr")
    setter = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x04evilI1\ns\x86b."
    for bad, text in (
        (pickle.dumps(Hostile(mark)), "Do not trust this file"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "Do not trust this file"),
        (pickle.dumps(outside), "not inside"),
        (pickle.dumps(long_list), "a list with more items"),
        (pickle.dumps({"a": 1}), "Metadata are expected"),
        (setter, "metadata"),
    ):
        if rank == 0:
            metadata.write_bytes(bad)
        dist.barrier()
        unchanged_by(CheckpointError, text, load_from(path))
        dist.barrier()
    from torch.distributed.checkpoint.metadata import Metadata

    assert not hasattr(Metadata, "evil")
    optimizer.param_groups[0]["hostile"] = Hostile(mark)
    flat_param.save_sharded(model, path, optimizer=optimizer)
    unchanged_by(CheckpointError, "needs code to be loaded", load_from(path))
    if rank == 0:
        torch.save({"model": Hostile(mark)}, at("hostile.pt"))
    dist.barrier()
    unchanged_by(CheckpointError, "cannot be read", load_from(at("hostile.pt")))
    assert not os.path.exists(mark)


def check_other_models_are_refused(rank: int, world: int) -> None:
    """By name and shape, with nothing changed; also a folder without a checkpoint."""
    layer = flat_param.fully_shard(nn.Linear(5, 5))
    flat_param.save_sharded(layer, at("other"))
    unchanged_by(StateError, "Missing key(s)", lambda m, _: _load(m, at("other")))
    wide = flat_param.fully_shard(nn.Linear(5, 6))
    raises(CheckpointError, "Size mismatch", lambda: _load(wide, at("other")))
    optimizer = torch.optim.SGD(layer.parameters())
    text = "has no optimizer state"
    raises(CheckpointError, text, lambda: _load(layer, at("other"), optimizer))
    os.makedirs(at("empty"), exist_ok=True)
    dist.barrier()
    unchanged_by(CheckpointError, "has no .metadata", load_from(at("empty")))


def _load(model: Any, path: str, optimizer: Any = None) -> None:
    flat_param.load_sharded(model, path, optimizer=optimizer)


class Inner(nn.Module):
    """Its names begin with `model.`, as those of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.model(x)
        return y


def check_folders_of_plain_models(rank: int, world: int) -> None:
    """A bare state dict, and one with an optimizer's state by name."""
    one = Inner()
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.5)
    one(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    dcp.save(one.state_dict(), checkpoint_id=at("bare"))
    state = {"model": one.state_dict(), "optim": get_optimizer_state_dict(one, optimizer)}
    dcp.save(state, checkpoint_id=at("named"))
    for name in ("bare", "named"):
        other = flat_param.fully_shard(Inner())
        fresh = torch.optim.AdamW(other.parameters())
        flat_param.load_sharded(other, at(name), optimizer=fresh if name == "named" else None)
        found = flat_param.full_state_dict(other, optimizer=fresh)
        same(found["model"], one.state_dict())
    state["optim"] = optimizer.state_dict()
    dcp.save(state, checkpoint_id=at("position"))
    raises(StateError, "is by position", lambda: _load(other, at("position"), fresh))
    assert fresh.param_groups[0]["lr"] == 0.5
    for param, key in ((one.model.weight, "model.weight"), (one.model.bias, "model.bias")):
        same(found["optim"]["state"][key], optimizer.state[param])


class Inheriting(torch.optim.AdamW):
    """Steps as its base class does, whose step torch gives hooks, too."""

    def step(self, closure: Any = None) -> Any:
        """Step."""
        return super().step(closure)


def check_offloaded_steps_count_once(rank: int, world: int) -> None:
    """Not once for each of a rank's buckets, of which ranks have different numbers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(1, 1))
    flat_param.fully_shard(model, boundary="tensor")
    torch.optim.AdamW(model.parameters())
    optimizer = Inheriting(model.parameters())
    flat_param.offload_optimizer(optimizer, folder=FOLDER, bucket_numel=1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    flat_param.save_sharded(model, at("offloaded"), optimizer=optimizer)


def check_ranks_at_different_steps_are_refused(rank: int, world: int) -> None:
    """Named steps, counted steps, paths: an error on all ranks, and the old checkpoint stays."""
    model, optimizer, path = saved("steps")

    def save(where: str = path, **options: Any) -> None:
        flat_param.save_sharded(model, where, optimizer=optimizer, **options)

    raises(CheckpointError, "the step is 7 on rank 0 and 8", lambda: save(step=7 + rank))
    raises(CheckpointError, "Pass the same path on all ranks", lambda: save(f"{path}-{rank}"))
    if rank:
        optimizer.step()
    raises(CheckpointError, "the step is", save)
    save(step=3)
    assert not os.path.exists(f"{path}-{rank}")


def check_error_of_one_rank_is_one_of_all(rank: int, world: int) -> None:
    """Before anything is written, while it is, and while metadata are."""
    model, optimizer, path = saved("errors")
    before = sorted(os.listdir(path))
    if rank:
        optimizer.state[model.embed.weight]["odd"] = torch.ones(3)
    text = "optimizer state 'odd'" if rank else "rank 1 has failed"
    kind = StateError if rank else CheckpointError
    raises(kind, text, lambda: flat_param.save_sharded(model, path, optimizer=optimizer))
    for victim, name, error in ((1, "write_data", Full), (0, "finish", Full)):
        with failing(rank == victim, name, error):
            raises(
                CheckpointError,
                f"rank {victim} cannot write its part",
                lambda: flat_param.save_sharded(model, path),
            )
        dist.barrier()
        assert sorted(os.listdir(path)) == before
    other, fresh = trained(1, 5)
    flat_param.load_sharded(other, path, optimizer=fresh)
    same(values_of(other, fresh), truth(3))


class Full(OSError):
    """An error that cannot be sent to other ranks."""

    def __reduce__(self) -> Any:
        raise TypeError


@contextmanager
def failing(fails: bool, name: str, error: type[OSError] = OSError) -> Iterator[None]:
    """A disk that is full."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise error(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(CheckedWriter, name, full)
        yield


def check_async_save_is_of_its_call(rank: int, world: int) -> None:
    """Training goes on; what it changes is not saved. The next save waits."""
    model, optimizer = trained(3)
    model.note = "then"
    path = at("async")
    threads = threading.active_count()
    future = flat_param.async_save_sharded(model, path, optimizer=optimizer)
    train(model, optimizer, 3, 5)
    model.note = "later"
    beside = flat_param.full_state_dict(model, optimizer=optimizer)
    flat_param.load_full_state_dict(sharded(9), beside["model"])
    future.result()
    assert future.done()
    other, fresh = trained(1, 5)
    flat_param.load_sharded(other, path, optimizer=fresh)
    same(values_of(other, fresh), truth(3))
    assert other.note == "then"
    futures = [flat_param.async_save_sharded(model, path, step=n) for n in range(3)]
    flat_param.save_sharded(model, path)
    assert all(each.done() for each in futures)
    assert threading.active_count() <= threads + 1


def check_error_of_an_async_save(rank: int, world: int) -> None:
    """All ranks log it and their futures raise it; the next save is not affected."""
    model, optimizer, path = saved("unread")
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flat_param").addHandler(handler)
    with failing(rank == 1, "write_data"):
        future = flat_param.async_save_sharded(model, path)
        raises(CheckpointError, "rank 1 cannot write its part", future.result)
    logging.getLogger("flat_param").removeHandler(handler)
    (text,) = told
    assert f"the save to '{path}' failed: flat_param.save_sharded: rank 1 cannot write" in text
    flat_param.save_sharded(model, path, optimizer=optimizer)


def check_full_state(rank: int, world: int) -> None:
    """Whole and plain, on every rank or on the first; in another order of groups; and back."""
    cases: tuple[tuple[str, dict[str, bool]], ...] = (
        ("element", {"rank0_only": True}),
        ("row", {}),
        ("tensor", {"rank0_only": True, "offload_to_cpu": True}),
    )
    for boundary, options in cases:
        model, optimizer = trained(3, boundary=boundary)
        state = flat_param.full_state_dict(model, optimizer=optimizer, **options)
        if not options or rank == 0:
            same(full_values(state, model), truth(3))
            assert {type(v) for v in full_values(state, model).values()} == {torch.Tensor}
        else:
            assert state == {"model": {}, "optim": {}}
        other = sharded(9, boundary="row" if boundary == "element" else "element")
        fresh = optimizer_of(other, flipped=True)
        flat_param.load_full_state_dict(other, state, optimizer=fresh)
        same(values_of(other, fresh), truth(3))
        assert [group["lr"] for group in fresh.param_groups] == [0.02, 0.01]
        train(other, fresh, 3, 5)
        same(values_of(other, fresh), truth(5))
        alone = flat_param.full_state_dict(model, **options)
        assert list(alone) == ["model"]
        flat_param.load_full_state_dict(sharded(9), alone)


def check_full_state_of_a_plain_model(rank: int, world: int) -> None:
    """By name, as torch gives it; and a plain model and optimizer take ours."""
    model = plain()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 3)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    other = sharded(9)
    fresh = optimizer_of(other)
    flat_param.load_full_state_dict(other, state, optimizer=fresh)
    same(values_of(other, fresh), truth(3))
    full = flat_param.full_state_dict(other, optimizer=fresh)
    again = plain(9)
    again_optimizer = optimizer_of(again)
    again.load_state_dict(full["model"])
    again_optimizer.load_state_dict(full["optim"])
    same(plain_values(again, again_optimizer), truth(3))


def check_bad_full_state_changes_nothing(rank: int, world: int) -> None:
    """On any rank, where one rank's is bad."""
    model, optimizer = trained(3)
    state = flat_param.full_state_dict(model, optimizer=optimizer)
    for part in ("model", "optim"):
        given = {"model": dict(state["model"]), "optim": dict(state["optim"])}
        if rank and part == "model":
            given["model"]["layers.1.up.bias"] = torch.ones(3)
        elif rank:
            given["optim"]["state"] = {"unknown": {}}
        unchanged_by(
            StateError if rank else CheckpointError,
            "layers.1.up.bias" if part == "model" else "unknown",
            lambda m, o, given=given: flat_param.load_full_state_dict(m, given, optimizer=o),
        )
    given = {"model": {}, "optim": {}} if rank else {"model": state["model"], "optim": {}}
    unchanged_by(
        (StateError, CheckpointError),
        "load_full_state_dict",
        lambda m, o: flat_param.load_full_state_dict(m, given, optimizer=o),
    )


def check_files_of_whole_tensors(rank: int, world: int) -> None:
    """safetensors, `torch.save`, and folders as transformers writes them, with tied names left out.

    Buffers and parameters; a file cut short or a missing key changes nothing.
    """
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = plain()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 3)
    state = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    tensors = {k: v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    names = sorted(tensors)
    folders = {kind: Path(at(kind)) for kind in ("one", "many", "bin", "many-bin")}
    if rank == 0:
        for folder in folders.values():
            folder.mkdir()
        halves = [
            {k: tensors[k].clone() for k in names[:4]},
            {k: tensors[k].clone() for k in names[4:]},
        ]
        save_file({k: v.clone() for k, v in tensors.items()}, folders["one"] / "model.safetensors")
        torch.save(tensors, folders["bin"] / "pytorch_model.bin")
        optim = get_optimizer_state_dict(model, optimizer)
        torch.save({"model": model.state_dict(), "optim": optim}, at("file.pt"))
        for kind, name in (("many", "model.safetensors"), ("many-bin", "pytorch_model.bin")):
            stem, _, end = name.partition(".")
            files = [f"{stem}-0000{n}-of-00002.{end}" for n in (1, 2)]
            for half, file in zip(halves, files, strict=True):
                write = save_file if end == "safetensors" else torch.save
                write(half, folders[kind] / file)
            weights = {k: f for half, f in zip(halves, files, strict=True) for k in half}
            index = json.dumps({"weight_map": weights})
            (folders[kind] / f"{name}.index.json").write_text(index)
    dist.barrier()
    for kind in (*folders, "one/model.safetensors"):
        other = HeadTied(9)
        flat_param.load_sharded(other, at(kind))
        found = values_of(other, optimizer_of(other))
        same(found, _params(truth(3)))
    other = sharded(9)
    fresh = optimizer_of(other)
    flat_param.load_sharded(other, at("file.pt"), optimizer=fresh)
    same(values_of(other, fresh), truth(3))
    unchanged_by(
        CheckpointError,
        "no optimizer state",
        load_from(at("one")),
    )
    dist.barrier()
    if rank == 0:
        file = folders["one"] / "model.safetensors"
        os.truncate(file, file.stat().st_size - 8)
        (folders["many"] / "model-00002-of-00002.safetensors").unlink()
    dist.barrier()
    for kind in ("one", "many"):
        unchanged_by(CheckpointError, "cannot be read", lambda m, o, k=kind: _load(m, at(k)))


class HeadTied(nn.Module):
    """The model without what files of weights do not have."""

    def __new__(cls, seed: int) -> Any:
        """It has no extra state."""
        from _states import Model

        plain_ones = {n: getattr(nn.Module, n) for n in ("get_extra_state", "set_extra_state")}
        bare = type("Bare", (Model,), plain_ones)
        torch.manual_seed(seed)
        model = bare()
        for layer in model.layers:
            flat_param.fully_shard(layer)
        return flat_param.fully_shard(model)

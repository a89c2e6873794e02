"""Checkpoints with damage of every kind, on one rank; one check per claim."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _harness import main, run_checks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import flat_param
from flat_param._torch_compat import without_storage_warning
from flat_param.dcp import _dcp_metadata, _inert, _stored

FOLDER = Path()


def trained(seed: int = 0, *, shard: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with a buffer, after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 2))
    model.register_buffer("scale", torch.tensor(2.0))
    if shard:
        flat_param.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Everything that a load could change, as bytes."""
    state = flat_param.full_state_dict(model, optimizer=optimizer)
    tensors = [*state["model"].values()]
    tensors += [v for each in state["optim"]["state"].values() for v in each.values()]
    options = json.dumps(state["optim"]["param_groups"], default=str)
    return b"".join(bytes(t.flatten().view(torch.uint8).tolist()) for t in tensors) + (
        options.encode()
    )


def saved(name: str) -> Path:
    """A checkpoint of our own."""
    model, optimizer = trained()
    flat_param.save_sharded(model, FOLDER / name, optimizer=optimizer)
    return FOLDER / name


def foreign(name: str) -> Path:
    """The same model's, as torch.distributed.checkpoint saves it: without checksums."""
    model, optimizer = trained(shard=False)
    weights, moments = get_state_dict(model, optimizer)
    with without_storage_warning():  # torch's own writer, on 2.9
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=FOLDER / name)
    return FOLDER / name


def with_crc(data: bytes) -> bytes:
    """Metadata whose last four bytes fit the rest again, as a writer's mistake would leave it."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


class Target:
    """A model and optimizer that nothing may change."""

    def __init__(self) -> None:
        self.model, self.optimizer = trained(seed=9)
        self.before = flat(self.model, self.optimizer)

    def refuses(self, path: Path, text: str = "flat_param") -> None:
        """Only the package's own error, and everything is as it was."""
        with pytest.raises(flat_param.CheckpointError, match=text):
            flat_param.load_sharded(self.model, path, optimizer=self.optimizer)
        assert flat(self.model, self.optimizer) == self.before

    def survives(self, path: Path) -> bool:
        """The same, or it loads; whether it did."""
        try:
            flat_param.load_sharded(self.model, path, optimizer=self.optimizer)
        except flat_param.CheckpointError:
            assert flat(self.model, self.optimizer) == self.before
            return False
        self.before = flat(self.model, self.optimizer)
        return True


def flipped(data: bytes, bit: int) -> bytes:
    """One bit the other way."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def check_every_flipped_bit_is_refused(rank: int, world: int) -> None:
    """Of every stored entry, and of the metadata, wherever it is."""
    path, target, choose = saved("bits"), Target(), random.Random(0)
    for file in (next(path.glob("*-rank-0-*")) / "__0_0.distcp", path / ".metadata"):
        data = file.read_bytes()
        for _ in range(40):
            file.write_bytes(flipped(data, choose.randrange(8 * len(data))))
            target.refuses(path)
        file.write_bytes(data)
    assert target.survives(path)


def check_data_of_another_checkpoint_is_refused(rank: int, world: int) -> None:
    """A file of the same name and size from a checkpoint of the same model."""
    path, target = saved("swapped"), Target()
    flat_param.save_sharded(target.model, FOLDER / "source", optimizer=target.optimizer)
    (source,) = (FOLDER / "source").glob("*-rank-0-*/__0_0.distcp")
    (file,) = path.glob("*-rank-0-*/__0_0.distcp")
    assert source.stat().st_size == file.stat().st_size
    shutil.copy(source, file)
    target.refuses(path, "has the checksum .* was saved")
    with pytest.raises(flat_param.CheckpointError, match="has the checksum"):
        flat_param.reshard_checkpoint(path, FOLDER / "cut", world_size=2)
    assert not (FOLDER / "cut").exists() or not os.listdir(FOLDER / "cut")


def check_resharding_writes_checksums(rank: int, world: int) -> None:
    """What was cut anew is protected as well."""
    path, target = FOLDER / "anew", Target()
    flat_param.reshard_checkpoint(saved("for-anew"), path, world_size=3)
    (file,) = path.glob("*-rank-1-*/__0_0.distcp")
    file.write_bytes(flipped(file.read_bytes(), 8 * (file.stat().st_size // 2)))
    target.refuses(path, "has the checksum")


def check_mutated_metadata_is_refused_cleanly(rank: int, world: int) -> None:
    """Bytes changed, cut off or doubled; with a footer that fits, or in torch's own file."""
    target, choose = Target(), random.Random(2)
    for path, mend in ((saved("mutated"), with_crc), (foreign("mutated-dcp"), bytes)):
        file = path / ".metadata"
        data = file.read_bytes()
        for _ in range(100):
            changed = bytearray(data)
            start = choose.randrange(len(data))
            kind = choose.randrange(4)
            if kind == 0:
                changed[start] = choose.randrange(256)
            elif kind == 1:
                del changed[start : start + choose.randrange(1, 9)]
            elif kind == 2:
                changed[start:start] = changed[start : start + choose.randrange(1, 40)]
            else:
                changed[start : start + 4] = choose.randbytes(4)
            file.write_bytes(mend(bytes(changed)))
            target.survives(path)
        for length in (0, 1, 10, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:length])
            target.survives(path)


WRONG: tuple[Any, ...] = (None, -1, 1 << 80, 1.5, "x", b"x", [], {}, (), [None], {"x": 1}, "\0")


def places(metadata: Any) -> list[tuple[Any, Any]]:
    """Every field and entry of torch's metadata that can be replaced: its owner and its name."""
    found: list[tuple[Any, Any]] = [(metadata, name) for name in vars(metadata)]
    key = "model.0.weight"
    tensor = metadata.state_dict_metadata[key]
    found += [(metadata.state_dict_metadata, key), (metadata.state_dict_metadata, 3)]
    found += [(metadata.state_dict_metadata, "optim.param_groups.x.lr")]
    found += [(metadata.state_dict_metadata, "optim.state.")]
    found += [(tensor, name) for name in vars(tensor)]
    found += [(tensor.chunks[0], name) for name in vars(tensor.chunks[0])]
    index = next(i for i in metadata.storage_data if i.fqn == key)
    info = metadata.storage_data[index]
    found += [(metadata.storage_data, index), (metadata.storage_data, 3)]
    return found + [(info, name) for name in ("relative_path", "offset", "length")]


def check_wrong_types_are_refused_cleanly(rank: int, world: int) -> None:
    """Each field of torch's metadata replaced by a value of another kind."""
    path, target = foreign("types"), Target()
    file = path / ".metadata"
    data = file.read_bytes()
    for position in range(len(places(pickle.loads(data)))):
        for wrong in WRONG:
            metadata = pickle.loads(data)
            owner, name = places(metadata)[position]
            if isinstance(owner, dict):
                owner[name] = wrong
            else:
                object.__setattr__(owner, name, wrong)
            file.write_bytes(pickle.dumps(metadata))
            target.survives(path)


def check_claimed_sizes_are_checked_first(rank: int, world: int) -> None:
    """A state of 4 EiB in a few bytes is refused before it gets memory."""
    path, target = foreign("claimed"), Target()
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    tensor = metadata.state_dict_metadata["optim.state.0.weight.exp_avg"]
    tensor.size = tensor.chunks[0].sizes = torch.Size((1 << 30, 1 << 30))
    file.write_bytes(pickle.dumps(metadata))
    target.refuses(path, "but only [0-9]+ bytes are stored")
    tensor.chunks[0].sizes = torch.Size((11, 7))
    file.write_bytes(pickle.dumps(metadata))
    target.refuses(path, "has 77 of its [0-9]+ elements")


def check_many_rectangles_take_linear_time(rank: int, world: int) -> None:
    """Ten times as many take about ten times as long, in time of this process alone."""
    seconds = []
    for count in (1_000, 10_000):
        path = FOLDER / f"many-{count}"
        path.mkdir()
        size = len_of_one(path / "data")
        stored = {
            (i,): _stored.StoredChunk((i,), (1,), _stored.Place("data", i * size, size, 0))
            for i in range(count)
        }
        os.truncate(path / "data", count * size)
        entry = _stored.StoredTensor(torch.float32, (count,), tuple(stored.values()))
        origin = _stored.Origin("0" * 12, 1, None, ())
        whole = _stored.Stored({"model.weight": entry}, origin)
        (path / ".metadata").write_bytes(_dcp_metadata.encode_metadata(whole))
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(count))
        flat_param.fully_shard(module)
        start = time.process_time()
        with pytest.raises(flat_param.CheckpointError, match="has the checksum"):
            flat_param.load_sharded(module, path)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 30 * seconds[0], seconds


def len_of_one(path: Path) -> int:
    """Bytes of a stored number."""
    torch.save(torch.zeros(1), path)
    return path.stat().st_size


def check_rectangles_that_overlap_are_refused(rank: int, world: int) -> None:
    """Twice the first half of a tensor has all its elements, and not its second half."""
    path, target = foreign("overlap"), Target()
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    tensor = metadata.state_dict_metadata["model.0.weight"]
    index = next(i for i in metadata.storage_data if i.fqn == "model.0.weight")
    first, *_ = tensor.chunks
    for offset, size in (((0, 0), (6, 7)), ((1, 0), (5, 7))):
        chunk = type(first)(torch.Size(offset), torch.Size(size))
        tensor.chunks.append(chunk)
        other = type(index)(index.fqn, torch.Size(offset))
        (path / f"extra-{offset[0]}").write_bytes(bytes(4 * math.prod(size)))
        info = type(metadata.storage_data[index])(f"extra-{offset[0]}", 0, 4 * math.prod(size))
        metadata.storage_data[other] = info
    tensor.chunks.remove(first)
    file.write_bytes(pickle.dumps(metadata))
    target.refuses(path, "of the 77 elements needed here, or some of them twice")


def check_pickles_cannot_change_classes(rank: int, world: int) -> None:
    """A BUILD on the class itself, which would change it for the whole process."""
    name = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    hostile = b"\x80\x02c" + name + b"N}X\x05\x00\x00\x00ownedK\x01s\x86b."
    assert pickle.loads(hostile).owned == 1  # so it is with pickle itself
    del dcp.metadata.Metadata.owned
    with pytest.raises(TypeError):
        _inert.load_inert(hostile)
    assert not hasattr(dcp.metadata.Metadata, "owned")


def _refuses_rows() -> bool:
    """Whether torch refuses a row for a number: 2.9 takes its first element."""
    module = nn.Module()
    module.number = nn.Parameter(torch.tensor(2.0))
    try:
        module.load_state_dict({"number": torch.ones(2)})
    except RuntimeError:
        return True
    return False


def check_plain_files_are_all_or_nothing(rank: int, world: int) -> None:
    """A full state dict that does not fit: missing keys, wrong shapes and kinds, half a state."""
    model, optimizer = trained()
    whole = flat_param.full_state_dict(model, optimizer=optimizer)
    target, path = Target(), FOLDER / "plain.pt"
    names = list(whole["model"])
    for change in (
        {"model": {**whole["model"], "scale": torch.tensor(5.0), "new": torch.ones(1)}},
        {"model": {n: whole["model"][n] for n in names[:-1]}},
        *([{"model": {**whole["model"], names[0]: torch.ones(2)}}] if _refuses_rows() else []),
        {"model": {**whole["model"], names[1]: torch.ones(2)}},
        {"model": {**whole["model"], names[0]: 7}},
        {"optim": {}},
        {"optim": 3},
        {"optim": {"state": {}, "param_groups": []}},
        {"optim": {"state": {"nobody": {}}, "param_groups": whole["optim"]["param_groups"]}},
        {"optim": {"state": 5, "param_groups": whole["optim"]["param_groups"]}},
    ):
        torch.save({**whole, **change}, path)
        with pytest.raises(flat_param.FlatParamError):
            flat_param.load_sharded(target.model, path, optimizer=target.optimizer)
        assert flat(target.model, target.optimizer) == target.before
    torch.save(whole, path)
    assert target.survives(path)


def run(rank: int, world: int, folder: str) -> dict[str, str]:
    """All checks."""
    global FOLDER
    FOLDER = Path(folder)
    return run_checks(globals(), rank, world)


if __name__ == "__main__":
    main(run)

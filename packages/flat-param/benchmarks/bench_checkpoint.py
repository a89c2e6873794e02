"""At which part of the disk's rate are checkpoints saved and loaded; what do checksums cost?

One rank; 64 MiB of parameters and 512 MiB in tensors of 4 MiB, so that what is paid for each save
or load can be told from what is paid for each byte. The disk alone writes and syncs a new file of
the same bytes, or reads the checkpoint's files into a block of 1 MiB; the rate is its time over
ours. Loads come from the page cache, where a checksum cannot hide behind the disk, and once more
from the disk. What is deleted is deleted between the rounds, ours by `save_sharded`'s own thread.
Candidates take turns, wall time, least of the rounds; and the processor's time of all threads.

    pytest -s packages/flat-param/benchmarks/bench_checkpoint.py
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import flat_param
from flat_param.dcp import _dcp_write, _entries
from flat_param.dcp._checksum import Checksums
from flat_param.dcp._removal import wait_for_room

torch.set_num_threads(1)
SIZES = {"64 MiB": (16, 12), "512 MiB": (128, 4)}  # layers of 4 MiB, and rounds
_BLOCK_BYTES = 1 << 20


class _Unread:
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class _NotLoaded(Checksums):
    def of(self, *args: Any) -> Any:
        super().of(*args)
        return _Unread()

    def _add(self, block: memoryview, crc: int) -> int:
        return 0


class _NotSaved(Checksums):
    def of(self, *args: object) -> int:
        return 0


@contextmanager
def _without_checksums() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_entries, "Checksums", _NotLoaded)
        patch.setattr(_dcp_write, "Checksums", _NotSaved)
        yield


def _turns(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The least time of each in milliseconds, and the processor's, `<name>, processor`."""
    least: dict[str, float] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            before()
            wait_for_room()
            start = time.perf_counter(), time.process_time()
            step()
            for clock, first, now in (
                ("", start[0], time.perf_counter()),
                (", processor", start[1], time.process_time()),
            ):
                took = (now - first) * 1e3
                least[name + clock] = min(least.get(name + clock, took), took)
    return least


def _tell(benchmark, times: Mapping[str, float]) -> None:
    benchmark.extra_info |= times
    shown = ", ".join(f"{name} {took:.1f} ms" for name, took in times.items())
    if "disk alone" in times:
        rates = ((name, times["disk alone"] / times[name]) for name in ("ours", "torch"))
        shown += "; of the disk's rate " + ", ".join(f"{name} {rate:.2f}" for name, rate in rates)
    sys.stderr.write(f"\n{benchmark.name}: {shown}\n")
    benchmark.pedantic(lambda: None)


@pytest.fixture(params=SIZES)
def rounds(request: pytest.FixtureRequest) -> int:
    """How often each candidate takes its turn; fewer times with the large model."""
    return SIZES[request.param][1]


@pytest.fixture
def model(rounds: int) -> Iterator[nn.Module]:
    """Sharded over a world of one."""
    layers = next(layers for layers, each in SIZES.values() if each == rounds)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield flat_param.fully_shard(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)]))
    finally:
        dist.destroy_process_group()


def _write(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), _BLOCK_BYTES):
            file.write(data[start : start + _BLOCK_BYTES])
        os.fsync(file.fileno())


def _read(folder: Path) -> None:
    block = bytearray(_BLOCK_BYTES)
    for path in folder.rglob("*.distcp"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def _forget(folder: Path) -> None:
    """Have the next reader go to the disk."""
    for path in folder.rglob("*.distcp"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plain(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {name: tensor.clone() for name, tensor in model.state_dict().items()}}


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_save(benchmark, model, rounds, tmp_path):
    """`save_sharded` with and without; `dcp.save` of the plain state."""
    state, pending = _plain(model), []
    vector = torch.cat([tensor.flatten() for tensor in state["model"].values()])
    raw = memoryview(vector.numpy()).cast("B")

    def ours() -> None:
        flat_param.save_sharded(model, tmp_path / "ours")

    def without() -> None:
        with _without_checksums():
            flat_param.save_sharded(model, tmp_path / "without")

    def torchs() -> None:
        dcp.save(state, checkpoint_id=tmp_path / "torch")

    def begins() -> None:
        pending.append(flat_param.async_save_sharded(model, tmp_path / "async"))

    def ends() -> None:
        while pending:
            pending.pop().result()

    steps = {"ours": ours, "without checksums": without, "torch": torchs}
    steps["disk alone"] = lambda: _write(tmp_path / "alone", raw)
    steps["asynchronous, until it returns"] = begins

    def before() -> None:
        ends()
        (tmp_path / "alone").unlink(missing_ok=True)

    _tell(benchmark, _turns(steps, rounds, before))


@pytest.mark.parametrize("source", ["cached", "from the disk"])
def test_load(benchmark, model, rounds, tmp_path, source):
    """`load_sharded` with and without; `dcp.load` of the same files into the plain state."""
    state, path = _plain(model), tmp_path / "saved"
    flat_param.save_sharded(model, path)

    def ours() -> None:
        flat_param.load_sharded(model, path)

    def without() -> None:
        with _without_checksums():
            flat_param.load_sharded(model, path)

    def torchs() -> None:
        dcp.load(state, checkpoint_id=path)

    steps = {"ours": ours, "without checksums": without, "torch": torchs}
    steps["disk alone"] = lambda: _read(path)
    _tell(benchmark, _turns(steps, rounds, lambda: source == "cached" or _forget(path)))


def test_checksum(benchmark, tmp_path):
    """The checksum of 64 MiB that are cached, against reading them, and reading them for a CRC."""
    path, size = tmp_path / "data", 64 << 20
    path.write_bytes(torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes())
    checksums, block = Checksums(), bytearray(1 << 20)

    def read(each: Callable[[bytearray], object]) -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                each(block)

    def ours() -> None:
        with path.open("rb") as file:
            checksums.of(file, 0, size)

    steps = {"checksum": ours, "reading": lambda: read(len), "CRC-32": lambda: read(zlib.crc32)}
    _tell(benchmark, _turns(steps, rounds=12))

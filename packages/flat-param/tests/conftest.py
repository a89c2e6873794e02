"""Fixtures for all tests of this package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)

WORKERS = Path(__file__).parent / "workers"


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def mlp() -> nn.Sequential:
    """Two layers of odd sizes, so that 16-byte alignment leaves gaps."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


@pytest.fixture
def own_all() -> Callable[[Iterable[Tensor], Tensor], bool]:
    """Whether every tensor lies in the memory of one buffer."""

    def check(tensors: Iterable[Tensor], buffer: Tensor) -> bool:
        home = buffer.untyped_storage().data_ptr()
        return all(tensor.untyped_storage().data_ptr() == home for tensor in tensors)

    return check


@pytest.fixture
def holder() -> Callable[..., nn.Module]:
    """Make a module of given tensors, as parameters p0, p1, ..."""

    def make(*tensors: Tensor) -> nn.Module:
        module = nn.Module()
        for index, tensor in enumerate(tensors):
            trainable = tensor.is_floating_point() or tensor.is_complex()
            kept = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, trainable)
            module.register_parameter(f"p{index}", kept)
        return module

    return make


class Notes:
    """A `torch.distributed.Store` in one process."""

    timeout = timedelta(seconds=0.2)

    def __init__(self) -> None:
        self._notes: dict[str, Any] = {}

    def set(self, key: str, value: str) -> None:
        """Write a note."""
        self._notes[key] = value

    def get(self, key: str) -> bytes:
        """Read a note."""
        return str(self._notes[key]).encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all notes are there."""
        return all(key in self._notes for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        self._notes[key] = self._notes.get(key, 0) + amount
        return int(self._notes[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a note where none is."""
        return str(self._notes.setdefault(key, desired)).encode()


@pytest.fixture
def notes() -> Notes:
    """A store that only this process has."""
    return Notes()


@pytest.fixture(scope="session")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The process of workers/_nursery.py, of which all ranks are children."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(WORKERS / "_nursery.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.communicate()


@pytest.fixture(scope="session")
def ranks(
    nursery: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """Run a script of tests/workers once per gloo rank, and return its results by rank.

    The same call gives the same results again without another run. Ranks in `killed` must die of
    SIGKILL and have no result.
    """

    @cache
    def run(
        world: int,
        script: str,
        *args: Any,
        timeout_s: int = 60,
        killed: tuple[int, ...] = (),
    ) -> list[Any]:
        folder = tmp_path_factory.mktemp(script)
        tail = [str(world), str(folder), str(timeout_s), json.dumps(args)]
        order = {
            "script": str(WORKERS / f"{script}.py"),
            "ranks": [[str(rank), *tail] for rank in range(world)],
            "folder": str(folder),
            "timeout_s": timeout_s,
        }
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        print(json.dumps(order), file=nursery.stdin, flush=True)
        for rank, status in enumerate(json.loads(nursery.stdout.readline())):
            expected = -signal.SIGKILL if rank in killed else 0
            stderr = (folder / f"stderr-{rank}").read_text()
            assert status == expected, f"rank {rank} of {script} ended with {status}:\n{stderr}"
        return [
            None if rank in killed else json.loads((folder / f"result-{rank}.json").read_text())
            for rank in range(world)
        ]

    return run

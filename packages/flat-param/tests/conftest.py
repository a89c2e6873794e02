"""Fixtures for all tests of this package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
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


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
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
        command = [sys.executable, "-W", "error", str(WORKERS / f"{script}.py")]
        tail = [str(world), str(folder), str(timeout_s), json.dumps(args)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*command, str(rank), *tail], env=environment, stderr=subprocess.PIPE, text=True
            )
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.wait(timeout_s)
        finally:
            for process in processes:
                process.kill()
            errors = [process.communicate()[1] for process in processes]
        for rank, process in enumerate(processes):
            expected = -signal.SIGKILL if rank in killed else 0
            assert process.returncode == expected, f"rank {rank} of {script}:\n{errors[rank]}"
        return [
            None if rank in killed else json.loads((folder / f"result-{rank}.json").read_text())
            for rank in range(world)
        ]

    return run

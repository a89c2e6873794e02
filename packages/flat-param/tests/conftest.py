"""Fixtures for all tests of this package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import flat_params_of, fully_shard
from flat_param.handle import FlatParamHandle

torch.set_num_threads(1)

WORKERS = Path(__file__).parent / "workers"
TORCH_2_9 = "ignore:Deallocating Tensor that still has live PyObject references:UserWarning"
"""A warning about weak references to tensors that only 2.9 gives, as in pyproject.toml."""


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
        return all(_lies_in(tensor, buffer) for tensor in tensors)

    return check


def _lies_in(tensor: Tensor, buffer: Tensor) -> bool:
    start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= stop


@pytest.fixture
def aliased() -> Callable[[nn.Module], bool]:
    """Whether all parameters lie in the buffers of the module's flat view, each once."""

    def check(module: nn.Module) -> bool:
        flat = flat_params_of(module)
        homes = [flat.as_vector(name) for name in flat.layouts]
        found = [[_lies_in(param, home) for home in homes] for param in module.parameters()]
        places = {param.data_ptr() for param in module.parameters()}
        return (
            all(map(any, found))
            and all(map(any, zip(*found, strict=True)))
            and len(places) == len(found)
        )

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


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def pair(group_of_one: None) -> nn.Module:
    """Two units in one around them, which compute in float64."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    precise = MixedPrecisionPolicy(param_dtype=torch.float64)
    for each in (model[0], model[1], model):
        fully_shard(each, mp_policy=precise)
    return model


class _Group:
    """A process group that has only a rank and a size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.fixture
def handle_of() -> Callable[..., FlatParamHandle]:
    """Flatten all of a module into a handle; with `world`, as one of so many ranks."""

    def make(
        module: nn.Module, rank: int = 0, world: int | None = None, **changes: Any
    ) -> FlatParamHandle:
        group: Any = None if world is None else _Group(rank, world)
        return FlatParamHandle(list(module.parameters()), module, process_group=group, **changes)

    return make


@pytest.fixture(scope="session")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The process of workers/_nursery.py, of which all ranks are children."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-W", TORCH_2_9, str(WORKERS / "_nursery.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.communicate()


@dataclass(frozen=True)
class Run:
    """One run of a script of tests/workers on all ranks of a group.

    Attributes:
        world: how many ranks.
        script: its name.
        args: for its function.
        timeout_s: of its group, and after which ranks are killed.
        killed: ranks that must die of SIGKILL, and have no result.
    """

    world: int
    script: str
    args: tuple[Any, ...] = ()
    timeout_s: int = 60
    killed: tuple[int, ...] = ()

    def order(self, folder: Path) -> dict[str, Any]:
        """The line for the nursery."""
        tail = [str(self.world), str(folder), str(self.timeout_s), json.dumps(self.args)]
        return {
            "script": str(WORKERS / f"{self.script}.py"),
            "ranks": [[str(rank), *tail] for rank in range(self.world)],
            "folder": str(folder),
            "timeout_s": self.timeout_s,
        }

    def results(self, folder: Path, statuses: list[int]) -> list[Any]:
        """By rank; fails where a rank ended otherwise than it should."""
        found: list[Any] = []
        for rank, status in enumerate(statuses):
            killed = rank in self.killed
            said = (folder / f"stderr-{rank}").read_text()
            words = f"rank {rank} of {self.script} ended with {status}:\n{said}"
            assert status == (-signal.SIGKILL if killed else 0), words
            result = folder / f"result-{rank}.json"
            found.append(None if killed else json.loads(result.read_text()))
        return found


class Ranks:
    """Runs scripts of tests/workers once per gloo rank; the same run is done once."""

    def __init__(self, nursery: subprocess.Popen[str], make_folder: Callable[[str], Path]) -> None:
        self._nursery, self._make_folder = nursery, make_folder
        self._done: dict[Run, tuple[Path, list[int]]] = {}

    def __call__(self, world: int, script: str, *args: Any, **options: Any) -> list[Any]:
        """The results by rank; see `Run`."""
        return self.results_of(Run(world, script, args, **options))

    def folder(self, world: int, script: str, *args: Any, **options: Any) -> Path:
        """The folder of a run that was done."""
        return self._done[Run(world, script, args, **options)][0]

    def results_of(self, run: Run) -> list[Any]:
        """The same of a run that may have been done ahead."""
        if run not in self._done:
            self.ahead([run])
        return run.results(*self._done[run])

    def ahead(self, runs: Sequence[Run]) -> None:
        """Do several runs, a few at a time: for those that wait more than they compute."""
        folders = [self._make_folder(run.script) for run in runs]
        orders = [run.order(folder) for run, folder in zip(runs, folders, strict=True)]
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        print(json.dumps(orders), file=self._nursery.stdin, flush=True)
        statuses = json.loads(self._nursery.stdout.readline())
        self._done |= zip(runs, zip(folders, statuses, strict=True), strict=True)


@pytest.fixture(scope="session")
def ranks(nursery: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What runs a script of tests/workers once per gloo rank."""
    return Ranks(nursery, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def run() -> type[Run]:
    """To describe runs of `ranks.ahead`."""
    return Run

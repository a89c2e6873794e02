"""Fixtures for all tests of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from flat_param import fully_shard
from torchparts_conformance.cases.flat_param import _builds
from torchparts_conformance.ranks import RankError, Ranks, Run

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
def holder() -> Callable[..., nn.Module]:
    """Make a module of given tensors, as parameters p0, p1, ..."""
    return _builds.holder


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


class Scripts:
    """Runs scripts of tests/workers on ranks; the same run is done once."""

    def __init__(self, ranks: Ranks, make_folder: Callable[[str], Path]) -> None:
        self._ranks, self._make_folder = ranks, make_folder
        self._done: dict[Any, tuple[Path, list[Any] | Exception]] = {}

    def __call__(self, world: int, script: str, *args: Any, **options: Any) -> list[Any]:
        """Return the results by rank; the options are those of a `Run`."""
        call = (world, script, args, *options.items())
        if call not in self._done:
            run, folder = self._run(world, script, *args, **options)
            try:
                self._done[call] = folder, self._ranks.results_of([run])[0]
            except (AssertionError, RankError) as error:
                self._done[call] = folder, error
        results = self._done[call][1]
        if isinstance(results, Exception):
            raise results
        return results

    def _run(self, world: int, script: str, *args: Any, **options: Any) -> tuple[Run, Path]:
        folder = self._make_folder(script)
        given = (script, str(folder), *args)
        return Run(f"{WORKERS}/_harness.py::be_rank", world, given, **options), folder

    def folder(self, world: int, script: str, *args: Any, **options: Any) -> Path:
        """Return the folder of a run that was done."""
        return self._done[(world, script, args, *options.items())][0]

    def at_once(self, calls: Iterable[tuple[str, int, tuple, dict]]) -> list[list[Any]]:
        """Do several runs, each of a script, a world size, arguments, options; return results."""
        runs = [
            self._run(world, script, *args, **options)[0] for script, world, args, options in calls
        ]
        return self._ranks.results_of(runs)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    """What runs a script of tests/workers once per gloo rank."""
    made = Ranks("flat_param", "pytest", options=["-W", "error", "-W", TORCH_2_9])
    yield Scripts(made, tmp_path_factory.mktemp)
    made.close()

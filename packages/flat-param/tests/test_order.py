"""What ranks say at the end of a backward; here they are threads that meet in a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flat_param import CommError
from flat_param.comm._comm import CommLog, Communicator, Pending
from flat_param.comm._groups import CommGroups
from flat_param.comm._trail import Trail
from flat_param.sharded import _order
from flat_param.sharded._order import agree_on_step

WORLD = 2
_here = threading.local()


class Table:
    """Where the ranks of a group put what they give each other."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(WORLD, timeout=30), [None] * WORLD

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every rank has given, by rank."""
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class OfThreads(Communicator):
    """A communicator of threads: the largest of each element, and shared notes."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(None, log=CommLog())
        self.table, self.rank, self.world_size = table, rank, WORLD
        self.trail = Trail(tuple(range(WORLD)), "threads")

    def _start(
        self, what: str, call: Callable[..., Any], *args: Any, of_unit: bool = True
    ) -> Pending:
        tensor, op = args
        assert (what, op, of_unit) == ("all_reduce", dist.ReduceOp.MAX, False)
        found = self.table.exchange(self.rank, tensor.clone())
        tensor.copy_(torch.stack(found).amax(0))
        return Pending(self, what)

    def share(self, note: Any) -> list[Any]:
        """Every rank's note."""
        return self.table.exchange(self.rank, note)


Unit = Any
Step = Callable[[Unit, int], list[bool]]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run a function of a unit and a rank on both ranks; what each returns or raises."""
    monkeypatch.setattr(_order.dist, "get_rank", lambda: _here.rank)

    def run(step: Step, *, copies: bool = False) -> list[Any]:
        table = Table()

        def work(rank: int) -> Any:
            _here.rank = rank
            alone, met = Communicator(None, log=CommLog()), OfThreads(table, rank)
            split, copied = (alone, met) if copies else (met, alone)
            comms = CommGroups(split, split, copied, CommLog())
            parts = [SimpleNamespace(device=torch.device("cpu"))]
            try:
                return step(SimpleNamespace(comms=comms, parts=parts, trail=met.trail), rank)
            except CommError as error:
                return str(error)

        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(work, range(WORLD)))

    return run


@pytest.mark.parametrize("copies", [False, True])
def test_parameter_that_one_rank_has_used_is_used(
    on_ranks: Callable[..., list[Any]], copies: bool
) -> None:
    """Every rank learns of it, whether ranks divide the parameters or hold copies."""

    def step(unit: Unit, rank: int) -> list[bool]:
        return agree_on_step([rank == 0, False, True], unit)

    assert on_ranks(step, copies=copies) == [[True, False, True]] * WORLD


@pytest.mark.parametrize("copies", [False, True])
def test_units_in_another_order_are_an_error_on_both_ranks(
    on_ranks: Callable[..., list[Any]], copies: bool
) -> None:
    """With the first difference; it is found where parameters are divided, and between copies."""

    def step(unit: Unit, rank: int) -> list[bool]:
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            unit.trail.add(f"all_gather of {name}", name.encode())
        return agree_on_step([True], unit)

    first, second = on_ranks(step, copies=copies)
    assert first == second
    assert first.startswith(
        "flat_param.fully_shard: rank 0 did all_gather of a where rank 1 did all_gather of b, but"
    )


def test_each_step_is_compared_anew(on_ranks: Callable[..., list[Any]]) -> None:
    """What was alike is not kept, and a later difference is found."""

    def step(unit: Unit, rank: int) -> list[bool]:
        for name in ("a", "b", "a"):
            unit.trail.add(name, name.encode())
            agree_on_step([True], unit)
            assert not unit.trail.recent
        unit.trail.add(f"unit {rank}", bytes([rank]))
        return agree_on_step([True], unit)

    for error in on_ranks(step):
        assert "rank 0 did unit 0 where rank 1 did unit 1" in error


def test_one_rank_says_nothing() -> None:
    """It has nobody to agree with."""
    alone = Communicator(None, log=CommLog())
    used = [True, False]
    comms = CommGroups(alone, alone, alone, alone.log)
    assert agree_on_step(used, SimpleNamespace(comms=comms, parts=[])) is used  # type: ignore[arg-type]
    assert alone.log.counts == {}

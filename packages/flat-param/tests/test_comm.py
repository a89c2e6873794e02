"""What a communicator counts, and what it does alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from flat_param.comm import _comm
from flat_param.comm._comm import CommCount, CommLog, Communicator, Pending

WORLD = 4


class Started(Communicator):
    """One of several ranks, whose collectives are noted and not carried out."""

    def __init__(self, world_size: int, backend: str = "nccl") -> None:
        super().__init__(None, log=CommLog())
        self.world_size, self._carriers = world_size, {"cpu": backend}
        self.started: list[str] = []
        self.calls: list[Callable[..., Any]] = []

    def _start(
        self, what: str, call: Callable[..., Any], *args: Any, of_unit: bool = True
    ) -> Pending:
        self.started.append(what)
        self.calls.append(call)
        return Pending(self, what)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_bytes_are_those_that_one_rank_sends(world: int, backend: str) -> None:
    """To every other rank its part; a sum that all have is a sum of parts and a gather of them."""
    comm = Started(world, backend)
    part, full = torch.zeros(3), torch.zeros(3 * world)
    comm.all_gather(full, part)
    comm.reduce_scatter(part, full)
    comm.all_reduce(full)
    comm.broadcast(full)
    assert comm.log.counts == {
        "all_gather": CommCount(1, (world - 1) * part.nbytes),
        "reduce_scatter": CommCount(1, (world - 1) * part.nbytes),
        "all_reduce": CommCount(1, 2 * (world - 1) * part.nbytes),
        "broadcast": CommCount(1, full.nbytes),
    }
    assert comm.started == ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"),
    [
        ("cpu:gloo,cuda:nccl", True, False),
        ("cpu:gloo,cuda:gloo", True, True),
        ("cuda:nccl", False, False),
        ("cpu:gloo", True, False),
        ("cpu:mpi", False, False),
    ],
)
def test_each_device_has_its_own_backend(
    config: str, cpu: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group for two kinds of devices moves tensors of one by gloo, and waits for no other."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    comm = Started(2)
    comm._carriers = _comm._carriers_of(cast(Any, None))
    assert (comm.is_gloo("cpu"), comm.is_gloo("cuda")) == (cpu, cuda)


@pytest.mark.parametrize(
    ("backend", "world", "exchanges"),
    [("gloo", 2, True), ("gloo", 3, False), ("nccl", 2, False)],
)
def test_two_ranks_of_gloo_exchange_what_they_gather(
    backend: str, world: int, exchanges: bool
) -> None:
    """Its gather would copy all of it once more; others have a gather that does not."""
    comm = Started(world, backend)
    part, full = torch.arange(3.0), torch.zeros(3 * world)
    comm.all_gather(full, part)
    assert comm.calls == [dist.all_to_all_single if exchanges else _comm._all_gather]
    assert torch.equal(full[:3], part) == exchanges  # its own, which nobody has to send


def test_one_rank_communicates_nothing() -> None:
    """It has all there is; what is gathered and summed is a copy, or is there already."""
    comm = Communicator(None, log=CommLog())
    part, full = torch.arange(3.0), torch.zeros(3)
    comm.all_gather(full, part).wait()
    assert torch.equal(full, part)
    comm.reduce_scatter(full, part * 2).wait()
    assert torch.equal(full, part * 2)
    comm.all_reduce(full).wait()
    comm.broadcast(full).wait()
    assert torch.equal(full, part * 2)
    assert comm.share("note") == ["note"]
    assert comm.log.counts == {}


def test_no_collective_has_a_name_that_torch_gives_up() -> None:
    """It would warn in every process, and be gone one day."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for collective in (_comm._all_gather, _comm._reduce_scatter):
            out, given = torch.zeros(3), torch.arange(3.0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                work = collective(out, given, async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(out, given)
    finally:
        dist.destroy_process_group()


class Work:
    """A collective of gloo, which is done once the host has waited for it."""

    done = False

    def wait(self, limit: Any) -> bool:
        """Be done."""
        self.done = True
        return True


def test_the_host_waits_for_gloo() -> None:
    """What gloo has moved is there when the wait returns."""
    work = Work()
    Pending(Communicator(None, log=CommLog()), "all_gather", cast("Any", work)).wait()
    assert work.done

"""The thread that moves state: in order, beside the step, and never silently wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
import torch

from flat_param.offload._mover import Mover
from flat_param.offload._tiers import FolderTier, HostTier

LONG_S = 20


class Telling(HostTier):
    """CPU memory that says when it was read or written, and by whom."""

    def __init__(self) -> None:
        self.settled: list[Any] = []
        self.go, self.error = Event(), None
        self.go.set()

    def settle(self, stored: Any) -> None:
        """Be told; wait where the test says so."""
        assert self.go.wait(LONG_S)
        assert current_thread() is not main_thread()
        self.settled.append([tensor.tolist() for tensor in stored])
        if self.error is not None:
            raise self.error


def test_values_arrive_and_are_put_away(tmp_path: Path) -> None:
    """Copies, in memory of their own."""
    memory = FolderTier(tmp_path).allocate(8).view(torch.float32)
    memory.copy_(torch.tensor([1.0, 2.0]))
    with Mover(FolderTier(tmp_path)) as mover:
        (near,) = mover.fetch([memory], [torch.device("cpu")]).result()
        near += 1
        assert memory.tolist() == [1.0, 2.0]
        used = [near]
        mover.store([near], [memory], used=used)
        mover.wait()
        assert memory.tolist() == [2.0, 3.0]
        assert used == []


def test_caller_goes_on_while_state_moves() -> None:
    """Neither call waits for its copy; the next one to be stored waits for the last."""
    tier = Telling()
    tier.go.clear()
    values = [torch.full((1,), float(index)) for index in range(3)]
    with Mover(tier) as mover:
        arriving = mover.fetch(values[:1], [torch.device("cpu")])
        mover.store([torch.ones(1)], values[1:2], used=[])
        later = mover.fetch(values[2:], [torch.device("cpu")])
        assert not arriving.done()
        assert not later.done()
        tier.go.set()
        assert later.result()[0].tolist() == [2.0]
    assert tier.settled == [[[0.0]], [[1.0]], [[2.0]]]  # in the order in which they were asked for


def test_what_fails_in_the_thread_fails_where_it_is_waited_for() -> None:
    """Also what is stored last."""
    tier = Telling()
    tier.error = OSError("broken")
    with Mover(tier) as mover:
        with pytest.raises(OSError, match="broken"):
            mover.fetch([torch.ones(1)], [torch.device("cpu")]).result()
        mover.store([torch.ones(1)], [torch.ones(1)], used=[])
        with pytest.raises(OSError, match="broken"):
            mover.wait()


def test_what_failed_to_be_stored_fails_where_the_next_is() -> None:
    """Nothing is stored over it, and it is told once."""
    tier, place = Telling(), torch.zeros(1)
    tier.error = OSError("broken")
    with Mover(tier) as mover:
        mover.store([torch.ones(1)], [torch.ones(1)], used=[])
        with pytest.raises(OSError, match="broken"):
            mover.store([torch.ones(1)], [place], used=[])
    assert place.tolist() == [0.0]


def test_end_waits_for_what_is_under_way() -> None:
    """After an error too, what has not begun is left out; nothing is written later."""
    tier, place = Telling(), torch.zeros(1)
    tier.go.clear()
    with pytest.raises(KeyboardInterrupt), Mover(tier) as mover:
        mover.store([torch.ones(1)], [place], used=[])
        left_out = mover.fetch([place], [torch.device("cpu")])
        tier.go.set()
        raise KeyboardInterrupt
    assert place.tolist() == [1.0]
    assert left_out.cancelled() or left_out.done()


def test_end_waits_until_the_thread_is_done() -> None:
    """It goes on once it is waited for, and no sooner."""
    tier, place = Telling(), torch.zeros(1)
    tier.go.clear()
    try:
        with Mover(tier) as mover:
            mover.fetch([torch.ones(1)], [torch.device("cpu")])  # stays until the thread is joined
            mover.store([torch.ones(1)], [place], used=[])
            (thread,) = mover._thread._threads
            join = thread.join
            thread.join = lambda *limit: (tier.go.set(), join(*limit))
        assert place.tolist() == [1.0]
    finally:
        tier.go.set()


on_an_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator"
)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first; where it reports races itself, none may be left unread."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    if hasattr(module, "simulate"):
        module.reset()
        module.simulate(virtual=True, kernel_us=100)
    yield torch.device(kind.type, 0)
    found = module.races() if hasattr(module, "races") else []
    if hasattr(module, "reset"):
        module.reset()
    assert found == []


@pytest.mark.accelerator
@on_an_accelerator
def test_copies_to_an_accelerator_wait_for_what_computes(device: torch.device) -> None:
    """Values are those that the stream of the caller had when it asked."""
    tier = HostTier()
    place = tier.allocate(4 << 20).view(torch.float32)
    with Mover(tier) as mover:
        near = torch.zeros(1 << 20, device=device)
        for _ in range(50):
            near += 1
        mover.store([near], [place], used=[])
        mover.wait()
        assert bool((place == 50).all())
        (back,) = mover.fetch([place], [device]).result()
        assert bool((back == 50).all())


@pytest.mark.accelerator
@on_an_accelerator
def test_what_was_fetched_is_not_freed_while_it_is_read(device: torch.device) -> None:
    """Its memory belongs to the stream of copies, which has nothing else to wait for here."""
    tier = HostTier()
    place = tier.allocate(4 << 10).view(torch.float32).fill_(1)
    with Mover(tier) as mover:
        used = mover.fetch([place], [device]).result()
        total = torch.zeros(1 << 10, device=device)
        for _ in range(50):
            total += used[0]
        mover.store([], [], used=used)
        mover.wait()
        assert used == []
        mover.fetch([place.clone().fill_(2)], [device]).result()
    assert bool((total == 50).all())


@pytest.mark.accelerator
@on_an_accelerator
def test_what_was_fetched_is_there_for_every_stream(device: torch.device) -> None:
    """Its copy ran beside what computes, and the thread has waited for it."""
    tier, side = HostTier(), torch.Stream(device)
    place = tier.allocate(4 << 10).view(torch.float32).fill_(1)
    with Mover(tier) as mover:
        (near,) = mover.fetch([place], [device]).result()
        with side:
            total = near + 1
        side.synchronize()
    assert bool((total == 2).all())

"""Values of an accelerator are copied out and back while the device does other work."""

from __future__ import annotations

import gc
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

import sac_policies as sp
from sac_policies.eager import _moved
from sac_policies.eager._moved import MovedTensor, is_movable

KIND = torch.accelerator.current_accelerator() or torch.device("cpu")
SIM = getattr(torch, "simdev", None)
POLICY = sp.offload("aten.addmm", "aten.gelu")
AHEAD = {"kernel_us": 100, "copy_us": 50, "virtual": True}
SLOW = {"kernel_us": 100, "copy_us": 5000, "virtual": True}
on_an_accelerator = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
simulated = [
    pytest.mark.accelerator,
    pytest.mark.skipif(SIM is None, reason="needs the simulated device"),
]


def simulate(**costs) -> None:
    """Set the durations of the simulated device; a no-op on a real one."""
    if SIM is not None:
        SIM.simulate(**costs)


class Block(nn.Module):
    """Two matmuls with activations between them; `offloads` makes it a region."""

    def __init__(self, offloads: bool) -> None:
        super().__init__()
        self.up, self.down, self.offloads = nn.Linear(64, 256), nn.Linear(256, 64), offloads

    def body(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x):
        if not self.offloads:
            return self.body(x)
        return sp.checkpoint(self.body, x, policy=POLICY)


def chain(count: int, *, offloads: bool) -> nn.Sequential:
    """Equal blocks with equal weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(offloads) for _ in range(count))).to(KIND)


def given(rows: int = 512) -> torch.Tensor:
    """An input that requires grad."""
    return torch.linspace(-1, 1, rows * 64).view(rows, 64).to(KIND).requires_grad_()


def ones(where=None) -> torch.Tensor:
    """A tensor of ones."""
    return torch.ones(128, 64, device=where or KIND)


def test_what_has_no_streams_is_not_taken():
    """CPU and meta tensors are not moved."""
    assert not is_movable(torch.ones(2))
    assert not is_movable(torch.ones(2, device="meta"))
    assert not is_movable(nn.Parameter(torch.ones(2)))


class TestValue:
    """A single value, without a region."""

    pytestmark: ClassVar = [*on_an_accelerator, pytest.mark.usefixtures("no_race")]

    @pytest.mark.skipif(SIM is None, reason="needs the simulated device, where a copy can be slow")
    def test_what_has_not_left_is_read_where_it_is(self):
        """Its copy-out was not needed, so there is no copy-in."""
        value = ones()
        before = sp.offload_stats()
        simulate(**SLOW)
        moved = MovedTensor(value)
        assert moved.read().data_ptr() == value.data_ptr()
        assert sp.offload_stats().copies_in == before.copies_in

    def test_each_reading_of_what_is_away_has_a_tensor_of_its_own(self):
        """Each read returns a new tensor; the second copy-in was not prefetched, so it is late."""
        moved = MovedTensor(ones() * 7)
        moved.let_go()
        before = sp.offload_stats()
        moved.start_back()
        first, second = moved.read(), moved.read()
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
        after = sp.offload_stats()
        assert (after.copies_in - before.copies_in, after.late - before.late) == (2, 1)

    def test_what_this_backward_has_read_is_not_asked_for_again(self, monkeypatch):
        """Another device's thread may request values that this backward has already read."""
        moved, running = MovedTensor(ones() * 7), [3]
        monkeypatch.setattr(_moved, "backward_id", lambda: running[0])
        moved.let_go()
        before = sp.offload_stats()
        for backward, copies in ((3, 1), (4, 2)):
            running[0] = backward
            moved.start_back()
            moved.read()
            moved.start_back()
            assert sp.offload_stats().copies_in - before.copies_in == copies
        assert sp.offload_stats().late == before.late

    @pytest.mark.parametrize("asked", [False, True])
    def test_a_value_that_is_dropped_waits_for_its_copies(self, asked):
        """Its memory is reused at once."""
        simulate(**SLOW)
        moved = MovedTensor(ones() * 7)
        if asked:
            moved.let_go()
            moved.start_back()
        away = sp.offload_stats().bytes_away
        del moved
        ones().zero_()
        assert sp.offload_stats().bytes_away == away - 128 * 64 * 4

    def test_what_is_asked_for_belongs_to_the_stream_it_is_read_on(self):
        """The current stream at the prefetch has no effect."""
        moved, side = MovedTensor(ones() * 7), torch.Stream(KIND)
        moved.let_go()
        simulate(**SLOW)
        with side:
            moved.start_back()
        back = moved.read()
        total = back + 1
        del back
        ones().zero_()
        assert bool((total == 8).all())

    def test_what_another_stream_reads_is_not_handed_out_before_it_did(self):
        """The owner's next tensor must not use the memory before the read."""
        moved, side = MovedTensor(ones() * 7), torch.Stream(KIND)
        moved.let_go()
        main = torch.accelerator.current_stream()
        simulate(**SLOW)
        moved.start_back()
        with side:
            back = moved.read()
            total = back * 2
        del back
        ones().zero_()
        main.wait_stream(side)
        total.record_stream(main)
        assert bool((total == 14).all())

    def test_what_is_about_to_be_overwritten_is_copied_first(self):
        """The region copies the value before its own write, so the write is no error."""
        value = ones() * 7
        simulate(**SLOW)
        moved = MovedTensor(value)
        moved.leave({moved._storage})
        value.zero_()
        assert not moved.is_changed()
        assert bool((moved.read() == 7).all())

    def test_what_another_stream_is_about_to_overwrite_is_copied_first(self):
        """The writing stream waits for the copy, not only the value's stream."""
        value, side = ones() * 7, torch.Stream(KIND)
        simulate(**SLOW)
        moved = MovedTensor(value)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            moved.leave({moved._storage})
            value.zero_()
        torch.accelerator.current_stream().wait_stream(side)
        value.record_stream(side)
        assert bool((moved.read() == 7).all())

    def test_a_copy_leaves_the_current_stream_alone(self):
        """The caller's work continues on that stream."""
        main = torch.accelerator.current_stream()
        moved = MovedTensor(ones())
        moved.let_go()
        moved.start_back()
        assert torch.accelerator.current_stream() == main

    def test_what_was_seen_done_is_not_waited_for(self):
        """The value's stream then has nothing to wait for."""
        simulate(**SLOW)
        moved = MovedTensor(ones())
        torch.accelerator.synchronize()

        class NeverWaits(torch.Stream):
            def wait_event(self, event):
                raise AssertionError(event)

        moved._stream = NeverWaits(moved.home)
        moved.let_go()
        assert not moved._here

    def test_two_threads_that_ask_start_one_copy(self, monkeypatch):
        """Backward threads of two devices may reach one region."""
        import time

        from sac_policies.eager import _moved

        moved = MovedTensor(ones())
        moved.let_go()
        real = _moved._streams_of
        monkeypatch.setattr(
            _moved, "_streams_of", lambda device: (time.sleep(0.05), real(device))[1]
        )
        before = sp.offload_stats().copies_in
        threads = [threading.Thread(target=moved.start_back) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sp.offload_stats().copies_in == before + 1


class TestModel:
    """A chain of regions."""

    pytestmark: ClassVar = [*on_an_accelerator, pytest.mark.usefixtures("no_race")]

    @pytest.mark.parametrize("costs", [{}, AHEAD, SLOW], ids=["quick", "ahead", "slow"])
    @pytest.mark.parametrize("retains", [False, True])
    def test_gradients_are_the_plain_ones(self, costs, retains):
        """Gradients of two steps, and of a second backward."""
        found = []
        for offloads in (False, True):
            model, x = chain(4, offloads=offloads), given()
            simulate(**costs)
            for _ in range(2):
                loss = model(x).square().sum()
                loss.backward(retain_graph=retains)
                if retains:
                    loss.backward()
            torch.accelerator.synchronize()
            found.append([t.grad.cpu() for t in (x, *model.parameters())])
        assert all(map(torch.equal, *found))

    @pytest.mark.parametrize("costs", [{}, SLOW], ids=["quick", "slow"])
    def test_region_on_another_stream_has_plain_gradients(self, costs):
        """Copies are complete when they are read; backward runs on the stream of forward."""
        found = []
        for offloads in (False, True):
            model, x = chain(2, offloads=offloads), given()
            simulate(**costs)
            main, side = torch.accelerator.current_stream(), torch.Stream(KIND)
            side.wait_stream(main)
            with side:
                out = model(x)
            main.wait_stream(side)
            out.record_stream(main)
            out.square().sum().backward()
            torch.accelerator.synchronize()
            found.append([t.grad.cpu() for t in (x, *model.parameters())])
        assert all(map(torch.equal, *found))

    def test_what_is_offloaded_is_pinned(self, monkeypatch):
        """Copies to unpinned memory would block the host."""
        pinned, real = [], torch.empty_like

        def empty_like(tensor, **options):
            if options.get("device") == "cpu":
                pinned.append(options.get("pin_memory"))
            return real(tensor, **options)

        monkeypatch.setattr(torch, "empty_like", empty_like)
        chain(1, offloads=True)(given()).sum().backward()
        assert pinned
        assert all(pinned)

    @pytest.mark.parametrize("costs", [{}, SLOW], ids=["quick", "slow"])
    def test_a_change_of_an_output_is_an_error_however_far_its_copy_is(self, costs):
        """The same error as for a value that stays on the device."""
        x = given()
        simulate(**costs)
        held = []
        y = sp.checkpoint(
            lambda t: held.append(t.mm(t.T)) or held[0].sin(),
            x,
            policy=sp.offload("aten.mm"),
        )
        with torch.no_grad():
            held[0].zero_()
        with pytest.raises(sp.MutationError, match="was changed in place after the region"):
            y.sum().backward()
        held.clear()  # the closure holds the function, and its graph holds the function
        if SIM is not None:
            SIM.races()  # the write races with the copy, which is why it is an error

    def test_after_the_first_region_nothing_is_late(self):
        """In a steady step of a chain, each region prefetches the values of the one before."""
        model = chain(6, offloads=True)
        for step in range(3):
            before = sp.offload_stats()
            model(given()).sum().backward()
            if step:
                assert sp.offload_stats().late == before.late
        assert sp.offload_stats().bytes_away == before.bytes_away


class TestSchedule:
    """Time and memory of a step, which only the simulated device can measure."""

    pytestmark: ClassVar = [*simulated, pytest.mark.usefixtures("no_race")]

    @staticmethod
    def step(model, **costs) -> tuple[float, int]:
        """Microseconds and peak reserved bytes of the second of two steps."""
        for _ in range(2):
            x = given()
            gc.collect()
            SIM.synchronize_all()
            SIM.empty_cache()
            SIM.reset_peak_memory_stats()
            SIM.simulate(**costs)
            begin = SIM.host_us()
            model(x).square().sum().backward()
            SIM.synchronize_all()
            took, peak = SIM.host_us() - begin, SIM.memory()["reserved_peak"]
            SIM.simulate()
            model.zero_grad()
        return took, peak

    def test_copies_are_hidden(self):
        """Copies of half a kernel's duration add no time to a step."""
        model = chain(8, offloads=True)
        with_copies, _ = self.step(model, **AHEAD)
        without, _ = self.step(model, **AHEAD | {"copy_us": 0})
        assert with_copies <= 1.03 * without

    @pytest.mark.parametrize("copy_us", [50, 1000])
    def test_no_more_is_held_than_by_the_plain_model(self, copy_us):
        """With the host far ahead and slow copies; weights count in both models."""
        plain, offloading = chain(8, offloads=False), chain(8, offloads=True)
        costs = AHEAD | {"copy_us": copy_us}
        assert self.step(offloading, **costs)[1] <= 0.65 * self.step(plain, **costs)[1]


@pytest.mark.accelerator
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_a_copy_leaves_the_current_device_alone():
    """The current device of the calling thread is unchanged."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(1)
    try:
        MovedTensor(torch.ones(64, device=torch.device(KIND.type, 0)))
        assert torch.accelerator.current_device_index() == 1
    finally:
        torch.accelerator.set_device_index(before)


def test_each_thread_has_its_own_values_that_leave():
    """Regions of another thread neither release these values nor end with them."""
    mine, there = _moved.Leaving(), []
    mine._region_moves = True
    thread = threading.Thread(target=lambda: there.append(mine.region_ended()))
    thread.start()
    thread.join()
    assert there == [False]
    assert mine.region_ended()

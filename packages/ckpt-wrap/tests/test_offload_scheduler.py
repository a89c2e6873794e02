"""The schedule of copies, over a link whose events finish when the test says so."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch
from torch import nn

from ckpt_wrap import OffloadError, OffloadOptions
from ckpt_wrap._host_tier import HostTier
from ckpt_wrap._offload import Offload
from ckpt_wrap._offload_scheduler import CallOrder, OffloadScheduler


class ManualCopy:
    """A copy that has been made, and says so when told."""

    def __init__(self, log, label, tensor, host) -> None:
        self.log, self.label, self.tensor, self.host = log, label, tensor, host
        self.finished = self.waited = False

    def done(self) -> bool:
        return self.finished

    def wait(self) -> None:
        self.waited = True
        self.log.append(f"wait {self.label}")

    def release(self) -> None:
        tensor, self.tensor = self.tensor, None
        if tensor is not None and not (self.finished or self.waited):
            self.log.append(f"hold {self.label}")


class ManualLink:
    """Copies at once, but says it has only when told; notes every call."""

    idle = False
    place = HostTier.place

    def __init__(self) -> None:
        self.log: list[str] = []
        self.out: list[ManualCopy] = []

    def takes(self, device) -> bool:
        return device.type == "cpu"

    def copy_out(self, source):
        label = f"out {len(self.out)}"
        self.log.append(label)
        self.out.append(ManualCopy(self.log, label, source, source.clone()))
        return self.out[-1]

    def copy_in(self, out):
        label = f"in of {out.label}"
        self.log.append(label)
        return ManualCopy(self.log, label, out.host.clone(), out.host)


@pytest.fixture
def link():
    """A link whose copies finish when the test says so."""
    return ManualLink()


def _offload(link, **options):
    chosen = OffloadOptions(**{"min_bytes": 0, **options})
    return Offload(chosen, OffloadScheduler(link, chosen))


def _leaving_bytes(offload):
    return sum(order.leaving_bytes for order in offload._scheduler.orders.values())


class Square(nn.Module):
    def forward(self, x):
        return (x + 0) * (x * 1)


def _finish(link):
    for event in link.out:
        event.finished = True


def test_backward_fetches_what_is_away_and_waits_for_it(link):
    """Copies go out in forward; in backward each comes in once and is waited for."""
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    loss = offload(Square(), x).sum()
    assert link.log == ["out 0", "out 1"]
    _finish(link)
    link.log.clear()
    loss.backward()
    assert torch.equal(x.grad, 2 * x.detach())
    assert sorted(link.log) == [
        "in of out 0",
        "in of out 1",
        "wait in of out 0",
        "wait in of out 1",
    ]
    assert offload.stats.copies_in == 2


def test_what_is_still_leaving_is_read_where_it_is(link):
    """A backward that comes before the copy is made uses the source: nothing comes in."""
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    offload(Square(), x).sum().backward()
    assert not any(event.startswith("in") for event in link.log)
    assert torch.equal(x.grad, 2 * x.detach())


def test_bytes_in_flight_are_bounded_by_a_wait_of_the_device(link):
    """Above the bound the oldest copy is waited for and its source let go."""
    offload = _offload(link, max_inflight_bytes=32)
    x = torch.randn(8, requires_grad=True)
    loss = offload(Square(), x).sum()
    assert link.log == ["out 0", "out 1", "hold out 0"]
    assert _leaving_bytes(offload) == 32
    del loss


def test_the_device_waits_for_the_copies_of_one_call_when_the_next_one_ends(link):
    """However far the host is ahead, no more than two calls' sources are held."""
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    y = offload(Square(), x)
    assert _leaving_bytes(offload) == 64
    loss = offload(Square(), y).sum()
    assert link.log == ["out 0", "out 1", "out 2", "out 3", "hold out 0", "hold out 1"]
    assert _leaving_bytes(offload) == 64
    loss.backward()
    assert torch.equal(x.grad, 4 * x.detach() ** 3)


def test_a_number_of_bytes_is_all_that_bounds_what_is_leaving(link):
    """For a link that is slower than the device: no wait while there is room."""
    offload = _offload(link, max_inflight_bytes=128)
    y = offload(Square(), torch.randn(8, requires_grad=True))
    loss = offload(Square(), y).sum()
    assert _leaving_bytes(offload) == 128
    del loss


@pytest.mark.parametrize(
    ("most", "away"), [(None, 128), (128, 128), (127, 96), (64, 64), (31, 0), (0, 0)]
)
def test_what_there_is_no_room_for_stays(link, most, away):
    """Until backward has read it; gradients are the plain ones."""
    offload = _offload(link, max_bytes_away=most)
    x = torch.randn(8, requires_grad=True)
    loss = offload(Square(), offload(Square(), x)).sum()
    stats = offload.stats
    assert (stats.bytes_away, stats.copies_out, stats.kept) == (away, away // 32, 4 - away // 32)
    _finish(link)
    loss.backward()
    assert torch.equal(x.grad, 4 * x.detach() ** 3)
    del loss
    assert offload.stats.bytes_away == 0


def test_there_is_room_again_when_something_is_given_up(link):
    """For what is saved from then on."""
    offload = _offload(link, max_bytes_away=64)
    for _ in range(3):
        loss = offload(Square(), torch.randn(8, requires_grad=True)).sum()
        assert offload.stats.bytes_away == 64
        loss = None
    assert loss is None
    assert (offload.stats.copies_out, offload.stats.kept) == (6, 0)


def test_modules_with_the_same_options_share_the_room(link):
    """It is memory of one machine that is limited."""
    first = _offload(link, max_bytes_away=96)
    second = Offload(first.options, first._scheduler)
    losses = [each(Square(), torch.randn(8, requires_grad=True)).sum() for each in (first, second)]
    assert [each.stats.bytes_away for each in (first, second)] == [64, 32]
    del losses


def test_threads_do_not_pass_the_limit_together(link):
    """Looking for room and taking it are one step: the second thread comes between."""
    offload = _offload(link, max_bytes_away=64)
    second, both, once, losses = None, threading.Event(), link.copy_out, []

    def run():
        losses.append(offload(Square(), torch.randn(8, requires_grad=True)).sum())
        both.set()

    def copy_out(source):
        nonlocal second
        if second is None:
            second = threading.Thread(target=run)
            second.start()
            both.wait(0.5)  # in vain where it has to wait for this one
        return once(source)

    link.copy_out = copy_out
    run()
    second.join()
    stats = offload.stats
    assert (stats.bytes_away, stats.peak_bytes_away, stats.kept) == (64, 64, 2)


def test_copies_that_backward_waits_for_are_counted(link):
    """Those of the last call; the ones before are asked for when it is read."""
    offload = _offload(link)
    y = offload(Square(), torch.randn(8, requires_grad=True))
    _finish(link)
    loss = offload(Square(), y).sum()
    _finish(link)
    offload(nn.Identity(), torch.randn(8))
    loss.backward()
    assert (offload.stats.copies_in, offload.stats.late) == (4, 2)


def test_what_the_graph_gives_up_is_held_by_nobody(link):
    """Sources whose copies are under way go with it, after a wait of the device."""
    offload = _offload(link)
    loss = offload(Square(), torch.randn(8, requires_grad=True)).sum()
    sources = [weakref.ref(copy.tensor) for copy in link.out]
    del loss
    assert [ref() for ref in sources] == [None, None]
    assert link.log[2:] in (["hold out 0", "hold out 1"], ["hold out 1", "hold out 0"])
    assert offload.stats.bytes_away == _leaving_bytes(offload) == 0


def test_what_was_fetched_and_not_read_is_held_until_it_has_arrived(link):
    """Its memory may be handed out again, and the copy would be written over that."""
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    y = offload(Square(), x)
    _finish(link)
    loss = offload(Square(), y).sum()
    _finish(link)
    link.log.clear()
    torch.autograd.grad(loss, y)
    del loss, y
    assert {"hold in of out 0", "hold in of out 1"} <= set(link.log)


def test_the_end_of_any_call_lets_go_of_what_is_copied(link):
    """Sources do not wait for another tensor to leave."""
    offload = _offload(link)
    loss = offload(Square(), torch.randn(8, requires_grad=True)).sum()
    assert _leaving_bytes(offload) == 64
    _finish(link)
    offload(nn.Identity(), torch.randn(8))
    assert _leaving_bytes(offload) == 0
    del loss


def test_the_call_before_is_fetched_when_backward_enters_the_one_after(link):
    """Reading call 2 starts fetching call 1, before anything of call 1 is asked for."""
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    y = offload(Square(), x)
    _finish(link)
    loss = offload(Square(), y).sum()
    _finish(link)
    link.log.clear()
    loss.backward()
    own, *early = link.log[:3]
    assert own in ("in of out 2", "in of out 3")
    assert sorted(early) == ["in of out 0", "in of out 1"]


@pytest.mark.parametrize("when", ["before the copy ends", "after"])
def test_a_source_changed_after_it_was_saved_is_an_error(link, when):
    """The copy may hold anything then, so backward says so instead; also when it is away."""

    class Keep(nn.Module):
        def forward(self, x):
            self.saved = x * 1
            return self.saved * self.saved

    module = Keep()
    offload = _offload(link)
    loss = offload(module, torch.randn(8, requires_grad=True)).sum()
    if when == "after":
        _finish(link)
        offload(nn.Identity(), torch.randn(8))
        assert _leaving_bytes(offload) == 0
    with torch.no_grad():
        module.saved.add_(1)
    _finish(link)
    with pytest.raises(OffloadError, match="saved by module Keep was changed in place"):
        loss.backward()


def test_a_second_read_after_leaving_the_call_fetches_again(link):
    """With `retain_graph`, what was fetched is let go once backward is in another call."""
    offload = _offload(link)
    x = torch.randn(8, requires_grad=True)
    y = offload(Square(), x)
    loss = offload(Square(), y).sum()
    _finish(link)
    loss.backward(retain_graph=True)
    before = offload.stats.copies_in
    loss.backward()
    assert offload.stats.copies_in > before


def test_what_is_packed_unpacks_like_torchs_own(link):
    """Each packed object iterates as device and host tensor."""
    offload = _offload(link, min_bytes=9)
    packed = []
    real = torch.autograd.graph.saved_tensors_hooks

    class Noting(real):
        def __init__(self, pack, unpack):
            super().__init__(lambda t: packed.append(pack(t)) or packed[-1], unpack)

    import ckpt_wrap._offload as module

    module.saved_tensors_hooks = Noting
    try:
        x = torch.randn(8, requires_grad=True)
        loss = offload(nn.Sequential(Square(), nn.Linear(8, 1)), x).sum()
    finally:
        module.saved_tensors_hooks = real
    for _, tensor in packed:
        assert tensor.device.type == "cpu"
    assert len(packed) == 4
    loss.backward()


def _in_threads(count, work):
    """Run `work` in that many threads at a time; gives what it raised."""
    raised = []

    def run():
        try:
            work()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_threads_that_settle_one_order_let_go_of_each_source_once():
    """Backward threads of several devices may: none passes over what another looks at."""

    class Leaving:
        nbytes = 1

        def copied(self):
            time.sleep(0.001)
            return True

        def drop_source(self):
            dropped.append(self)

    dropped, order = [], CallOrder()
    storages = [Leaving() for _ in range(20)]
    for storage in storages:
        order.leaves(storage)
    assert _in_threads(4, lambda: order.settle(1000)) == []
    assert sorted(map(id, dropped)) == sorted(map(id, storages))
    assert order.leaving_bytes == 0


def test_each_thread_has_orders_of_its_own():
    """Rule 3: what another thread runs forward neither delays storages nor holds them."""
    scheduler, where = (
        OffloadScheduler(ManualLink(), OffloadOptions()),
        torch.device("cpu"),
    )
    calls = [scheduler.begin(where)]
    assert _in_threads(1, lambda: calls.append(scheduler.begin(where))) == []
    assert calls[0].order is not calls[1].order
    assert calls[1].previous is None
    assert scheduler.begin(where).order is calls[0].order

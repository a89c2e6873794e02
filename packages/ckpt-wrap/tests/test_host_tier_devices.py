"""Copies of the host tier one by one, on an accelerator."""

from __future__ import annotations

import pytest
import torch

from ckpt_wrap._host_tier import HostTier

from ._devices import (
    ON_AN_ACCELERATOR,
    SIMULATED,
    SLOW_COPIES,
    TWO,
    device,
    simulate,
    synchronize,
)

pytestmark = [*ON_AN_ACCELERATOR, pytest.mark.usefixtures("no_race")]
NBYTES = 1 << 16


def stored(link, where):
    """A copy out that has ended, of bytes that are all 7."""
    out = link.copy_out(torch.full((NBYTES,), 7, dtype=torch.uint8, device=where))
    out.release()
    synchronize()
    return out


def test_what_another_stream_read_is_not_handed_out_before_it_did():
    """Memory of the storage's stream, read on another: the owner's next tensor may not have it."""
    link, side = HostTier(), torch.Stream(device())
    out = stored(link, device())
    main = torch.accelerator.current_stream(device())
    simulate(**SLOW_COPIES)
    copy = link.copy_in(out)
    with side:
        copy.wait()
        read = copy.tensor.clone()
    copy.release()
    del copy
    torch.zeros(NBYTES, dtype=torch.uint8, device=device())  # of the owner, which waits for nobody
    main.wait_stream(side)
    read.record_stream(main)
    assert bool((read == 7).all())


@TWO
def test_a_copy_leaves_the_current_device_and_streams_alone():
    """Those of the thread that happens to start it are for its own work."""
    link, own = HostTier(), torch.Stream(device(0))
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(1)
    try:
        stored_there = stored(link, device(0))
        link.copy_in(stored_there).release()
        assert torch.accelerator.current_device_index() == 1
        with own:
            link.copy_in(stored_there).release()
            assert torch.accelerator.current_stream(device(0)) == own
    finally:
        torch.accelerator.set_device_index(before)


def test_the_host_goes_on_while_a_copy_is_under_way():
    """Its memory is pinned: a copy to any other is one that a device has the host wait for."""
    copy = HostTier().copy_out(torch.ones(NBYTES, dtype=torch.uint8, device=device()))
    assert copy.host.is_pinned()
    copy.release()


@SIMULATED
@pytest.mark.parametrize("way", ["out", "in"])
def test_the_device_goes_on_while_a_copy_is_under_way(way):
    """What its stream computes next is done first: a copy is on a stream of its own."""
    link, source = HostTier(), torch.ones(NBYTES, dtype=torch.uint8, device=device())
    out = stored(link, device())
    simulate(**SLOW_COPIES)
    copy = link.copy_out(source) if way == "out" else link.copy_in(out)
    source.add(1)
    torch.accelerator.current_stream(device()).record_event().synchronize()
    assert not copy.done()
    copy.release()

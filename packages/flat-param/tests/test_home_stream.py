"""The stream that memory belongs to: work is done there, in order with what is around it."""

from __future__ import annotations

import pytest
import torch

from flat_param.comm._home_stream import at_home, home_stream

KIND = torch.accelerator.current_accelerator() or torch.device("cpu")
on_an_accelerator = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def test_the_cpu_has_none():
    """And nothing is changed for it."""
    assert home_stream(torch.device("cpu")) is None
    with at_home(None):
        assert torch.ones(1).item() == 1


@pytest.mark.parametrize(
    "raises", [pytest.param(raises, marks=on_an_accelerator) for raises in (False, True)]
)
def test_work_is_done_at_home_between_what_is_around_it(raises):
    """Without a race on the simulated device; an error restores the current stream."""
    sim = getattr(torch, "simdev", None)
    if sim is not None:
        sim.reset()
        sim.simulate(virtual=True, kernel_us=100)
    device = torch.device(KIND.type, 0)
    home, side = home_stream(device), torch.Stream(device)
    assert home is not None
    owned = torch.zeros(64, device=device)
    side.wait_stream(home)
    with side:
        mine = torch.ones(64, device=device)
        try:
            with at_home(home):
                assert torch.accelerator.current_stream(device) == home
                owned.add_(mine)
                if raises:
                    raise ValueError
        except ValueError:
            assert raises
        assert torch.accelerator.current_stream(device) == side
        total = owned + mine
    home.wait_stream(side)
    total.record_stream(home)
    assert total.tolist() == [2.0] * 64
    del mine
    if sim is not None:
        assert sim.races() == []
        sim.reset()


def test_the_current_stream_is_left_alone_where_it_is_home(monkeypatch):
    """Nothing waits then: this is every step of most programs."""
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    stream = home_stream(torch.device(KIND.type, 0))
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda _: pytest.fail("a stream is set"))
    with at_home(stream):
        pass


@pytest.mark.accelerator
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_the_current_device_is_what_it_was():
    """Work at home on another one is done there, and the caller goes on with its own."""
    device, before = torch.device(KIND.type, 0), torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(1)
    try:
        with at_home(torch.Stream(device)):
            pass
        assert torch.accelerator.current_device_index() == 1
    finally:
        torch.accelerator.set_device_index(before)

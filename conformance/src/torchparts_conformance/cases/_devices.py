"""Devices that run far behind the host, for cases about synchronization.

A missing wait then shows as wrong values. To delay a device, its stream first gets other work. The
simulated device also has a simulated duration per operation and reports races (`simulate`,
`races`). The CPU is not delayed.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch


def devices(kind):
    """Return the first two devices of a kind; the only one twice."""
    if kind == "cpu":
        return torch.device(kind), torch.device(kind)
    return torch.device(kind, 0), torch.device(kind, min(1, torch.accelerator.device_count() - 1))


def module_of(kind):
    """Return torch's module for this kind of device; None for the CPU."""
    return None if kind == "cpu" else torch.get_device_module(kind)


def synchronize(kind):
    """Wait for every device."""
    for index in range(0 if kind == "cpu" else torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def lag(kind, **costs):
    """Give each stream work, so that devices run behind the host."""
    module = module_of(kind)
    if hasattr(module, "simulate"):
        module.simulate(**({"kernel_us": 100, "copy_us": 5000, "virtual": True} | costs))
    elif module is not None:
        for where in set(devices(kind)):
            large = torch.ones(2048, 2048, device=where)
            for _ in range(50):
                large = large @ large * 1e-4


@contextmanager
def no_races(kind):
    """Fail if the device has reported a race."""
    module = module_of(kind)
    if hasattr(module, "reset"):
        module.reset()
    yield
    gc.collect()
    found = module.races() if hasattr(module, "races") else []
    if hasattr(module, "reset"):
        module.reset()
    assert found == []


@pytest.fixture(autouse=True)
def races_are_read(request):
    """For files that import it: fail each case that leaves a reported race unread."""
    with no_races(request.getfixturevalue("device")):
        yield

"""Devices that lie far behind the host, for cases about who waits for whom.

There a wait that is missing shows as wrong values. So a stream is given work first; and where the
device's module can say how long things take, or reports races itself (`simulate`, `races`), it is
asked to. On the CPU nothing lies behind.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch


def devices(kind):
    """The first two of a kind, the only one twice."""
    if kind == "cpu":
        return torch.device(kind), torch.device(kind)
    return torch.device(kind, 0), torch.device(kind, min(1, torch.accelerator.device_count() - 1))


def module_of(kind):
    """What torch has for this kind of device; None for the CPU."""
    return None if kind == "cpu" else torch.get_device_module(kind)


def synchronize(kind):
    """Wait for every device."""
    for index in range(0 if kind == "cpu" else torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def lag(kind, **costs):
    """Let the devices lie behind the host."""
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
    """Have nothing that the device reports be left unread."""
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
    """In a file that imports it, nothing that the device reports itself is left unread."""
    with no_races(request.getfixturevalue("device")):
        yield

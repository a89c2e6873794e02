"""The simulated device, quiet and as new for each test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # simdev, and what tests share
try:
    import simdev
except RuntimeError as error:
    pytest.skip(f"simdev: not run: {error}", allow_module_level=True)

assert simdev.is_built()


@pytest.fixture(autouse=True)
def sim():
    """`torch.simdev`, with nothing left of the test before; no race may be left unread."""
    torch.set_num_threads(1)
    torch.simdev.reset()
    torch.manual_seed(0)
    yield torch.simdev
    left = torch.simdev.races()
    torch.simdev.reset()
    assert left == []


@pytest.fixture
def device():
    """The first of the two devices."""
    return torch.device("simdev", 0)


@pytest.fixture
def side(device):
    """A stream beside the current one."""
    return torch.simdev.Stream(device)


@pytest.fixture
def captured(request, sim, side):
    """Capture a function; gives the graph and what the function returned.

    The simulation's own graph on a stream that it makes, or by the parameter "accelerator" torch's.
    """

    def capture(function, **options):
        graph = sim.Graph()
        with sim.graph(graph, **options):
            out = function()
        return graph, out

    def capture_by_torch(function, **options):
        graph = torch.accelerator.Graph(**options)
        with side, graph:
            out = function()
        return graph, out

    if getattr(request, "param", "simdev") == "simdev":
        return capture
    if not hasattr(torch.accelerator, "Graph"):
        pytest.skip("torch.accelerator.Graph is of torch 2.13")
    return capture_by_torch

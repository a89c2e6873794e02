"""The simulated device, reset for each test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # simdev and shared test modules
try:
    import simdev
except RuntimeError as error:
    pytest.skip(f"simdev: not run: {error}", allow_module_level=True)

assert simdev.is_built()


@pytest.fixture(autouse=True)
def sim():
    """`torch.simdev` after a reset; a race that is left unread fails the test."""
    torch.set_num_threads(1)
    torch.simdev.reset()
    torch.manual_seed(0)
    yield torch.simdev
    left = torch.simdev.races()
    torch.simdev.reset()
    assert left == []


@pytest.fixture
def device():
    return torch.device("simdev", 0)


@pytest.fixture
def side(device):
    """A second stream."""
    return torch.simdev.Stream(device)


@pytest.fixture
def captured(request, sim, side):
    """`captured(function)` captures a function; returns the graph and the function's result.

    With the simulation's own graph on a new stream, or, by the parameter "accelerator", torch's.
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

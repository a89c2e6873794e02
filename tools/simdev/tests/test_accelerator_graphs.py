"""Graphs of `torch.accelerator`, which uses the simulation's by generic names."""

from __future__ import annotations

import pytest
import torch

if not hasattr(torch.accelerator, "Graph"):
    pytest.skip("torch.accelerator.Graph is of torch 2.13", allow_module_level=True)


by_torch = pytest.mark.parametrize("captured", ["accelerator"], indirect=True)


@by_torch
def test_a_replay_that_nobody_waited_for_is_a_race(sim, device, side, captured):
    """Like any other work on a stream."""
    x = torch.ones(3, device=device)
    graph, y = captured(lambda: x * 2)
    with side:
        graph.replay()
    (y + 1).tolist()
    assert sim.races()


@by_torch
def test_what_the_host_waits_for_breaks_the_capture(sim, device, captured):
    """In every mode that forbids it; the default does."""
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="the host waits for stream"):
        captured(lambda: x.sum().item())


def test_a_capture_on_the_devices_default_stream_is_refused(sim, device):
    """As on CUDA."""
    with pytest.raises(RuntimeError, match="not a device's default one"):
        torch.accelerator.Graph().capture_begin()


@by_torch
def test_other_streams_may_be_waited_for_in_a_relaxed_capture(sim, device, side, captured):
    """The mode is passed on."""
    other = torch.Stream(device)
    with pytest.raises(RuntimeError, match="the host waits for a stream"):
        captured(other.synchronize)
    graph, _ = captured(other.synchronize, capture_error_mode="relaxed")
    graph.replay()


@by_torch
def test_graphs_share_a_pool(sim, device, captured):
    """A given pool is used; without one, a new pool is made."""
    first, _ = captured(lambda: torch.ones(3, device=device))
    second, _ = captured(lambda: torch.ones(3, device=device), pool=first.pool())
    alone, _ = captured(lambda: torch.ones(3, device=device))
    assert first.pool() == second.pool() != alone.pool()


@by_torch
def test_what_is_kept_is_instantiated_by_hand_or_by_its_first_replay(sim, device, captured):
    """With keep_graph; without it, it is instantiated at the end of the capture."""
    x = torch.ones(1, device=device)
    graph, y = captured(lambda: x + 1, keep_graph=True)
    graph.instantiate()
    graph.replay()
    assert y.item() == 2
    graph, y = captured(lambda: x + 2, keep_graph=True)
    graph.replay()
    assert y.item() == 3
    graph, _ = captured(lambda: x + 3)
    with pytest.raises(RuntimeError, match="was instantiated when its capture ended"):
        graph.instantiate()


@pytest.mark.parametrize("call", ["replay", "instantiate", "pool"])
def test_a_graph_of_which_nothing_was_captured_is_refused(sim, device, call):
    """Also after a reset."""
    graph = torch.accelerator.Graph()
    with pytest.raises(RuntimeError, match="was not captured to its end"):
        getattr(graph, call)()


def test_a_graph_may_be_captured_again_once_it_is_reset(sim, device, side):
    """Without a reset it is refused."""
    x, graph = torch.ones(1, device=device), torch.accelerator.Graph()
    with side, graph:
        x + 1
    with side, pytest.raises(RuntimeError, match="Reset it first"):
        graph.capture_begin()
    graph.reset()
    with pytest.raises(RuntimeError, match="was not captured to its end"):
        graph.replay()
    with side, graph:
        y = x + 2
    graph.replay()
    assert y.item() == 3


@by_torch
def test_a_dump_is_not_simulated(sim, device, captured, tmp_path):
    """It raises an error that says so."""
    graph, _ = captured(lambda: torch.ones(1, device=device))
    graph.enable_debug_mode()
    with pytest.raises(RuntimeError, match="cannot be dumped"):
        graph.debug_dump(str(tmp_path / "graph"))

"""Steps that are captured for a graph: checkpoints are replayed, and offload is refused.

Every test runs on an accelerator that has graphs. On the simulated one races are reported as well.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ckpt_wrap import OffloadError, _host_tier, checkpoint_

from ._devices import (
    ON_AN_ACCELERATOR,
    SLOW_COPIES,
    blocks,
    device,
    given,
    offloaded,
    same,
    simulate,
    synchronize,
)

API = torch.get_device_module(torch.accelerator.current_accelerator() or "cpu")
GRAPH = next((getattr(API, n) for n in ("CUDAGraph", "XPUGraph", "Graph") if hasattr(API, n)), None)
pytestmark = [
    *ON_AN_ACCELERATOR,
    pytest.mark.skipif(GRAPH is None, reason="needs an accelerator with graphs"),
    pytest.mark.usefixtures("no_race"),
]
SCALES = (0.5, -1.0, 0.25)


def let_go() -> None:
    """Have the device's thread let go of the backward before: it may hold that until its next one.

    Parameters would keep their nodes meanwhile, of the stream that it ran on.
    """
    none = torch.empty(0, device=device(), requires_grad=True)
    (none * 1).backward(torch.empty(0, device=device()))


def warmed_up(step) -> None:
    """Run what happens once, on another stream than the graph's, as torch's notes ask."""
    let_go()
    side = torch.Stream(device())
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        step()
    torch.accelerator.current_stream().wait_stream(side)


def captured(step, **options):
    """A graph of a step, and what the step returned."""
    let_go()
    graph = GRAPH()
    with API.graph(graph, **options):
        out = step()
    return graph, out


def gradients(model, x) -> list[torch.Tensor]:
    """Those of a step, which each replay writes."""
    return [each.grad for each in (x, *model.parameters())]


def replayed(graphs, x, grads) -> list[list[torch.Tensor]]:
    """The same of graphs that are replayed one after the other."""
    start, found = x.detach().clone(), []
    for scale in SCALES:
        with torch.no_grad():
            x.copy_(start * scale)
        for graph in graphs:
            graph.replay()
        found.append([each.clone() for each in grads])
    return found


def assert_same(a, b) -> None:
    """Of each step, bit for bit."""
    synchronize()
    assert all(same(one, other) for one, other in zip(a, b, strict=True))


def forget(model, x) -> None:
    """Let a captured backward make the gradients."""
    model.zero_grad()
    x.grad = None


def test_what_was_saved_before_may_go_while_a_graph_is_captured():
    """Nobody asks for its copies then, and nobody waits."""
    moved = offloaded(blocks(4, device()))
    x = given(device())
    simulate(**SLOW_COPIES)
    left = [moved(x)]
    graph, y = captured(lambda: (left.clear(), gc.collect(), x * 2)[-1])
    graph.replay()
    assert torch.equal(y, x * 2)


def test_memory_of_an_earlier_copy_is_not_used_while_the_copy_runs():
    """A capture cannot wait for it, so the allocator is told."""
    simulate(**SLOW_COPIES)
    graph, stream = GRAPH(), torch.Stream(device())
    with stream:
        x = given(device())
        source = torch.zeros(4096, dtype=torch.uint8, device=device())
        left = _host_tier.HostTier().copy_out(source)
        del source
        graph.capture_begin()  # `graph` would wait for the device first
        y = x * 2
        left.release()
        graph.capture_end()
        torch.ones(4096, dtype=torch.uint8, device=device())
        graph.replay()
        assert torch.equal(y, x * 2)


def test_a_stream_is_asked_whether_it_is_captured_and_not_the_current_one():
    """A copy may be asked for where another stream is current."""
    x, other, told = given(device()), torch.Stream(device()), []

    def step():
        current = torch.accelerator.current_stream()
        told.extend(map(_host_tier.is_capturing, (current, other)))
        return x * 2

    captured(step)
    assert told == [True, False]


@pytest.mark.parametrize("folder", [False, True])
def test_captured_offload_is_refused(folder, tmp_path):
    """One clear error, and the device is as before."""
    moved = offloaded(blocks(2, device()), **({"to": tmp_path} if folder else {}))
    x = given(device())
    with pytest.raises(OffloadError, match="a graph is being captured around module Block"):
        captured(lambda: (x * 2, moved(x)))
    moved(x).sum().backward()
    graph, y = captured(lambda: x * 2)
    graph.replay()
    assert torch.equal(y, x * 2)


def test_dropout_of_a_captured_checkpoint_is_that_of_its_forward():
    """In each replay anew."""

    def model():
        torch.manual_seed(0)
        made = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(3)]
        return nn.Sequential(*made).to(device())

    results = []
    for change in (lambda block: block, checkpoint_):
        made = model()
        for block in made:
            change(block)
        x = torch.ones(16, 32, device=device(), requires_grad=True)

        def step(made=made, x=x):
            forget(made, x)
            made(x).square().sum().backward()

        warmed_up(step)
        graph, _ = captured(step)
        API.manual_seed(0)
        results.append(replayed([graph], x, gradients(made, x)))
    assert_same(*results)
    assert not same(results[0][0], results[0][1])

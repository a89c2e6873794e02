"""Steps captured in a device graph: checkpoints can be replayed, and offload is refused.

Every test runs on an accelerator that supports graphs. The simulated one also reports races.
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
    """Make the device's backward thread release its last graph.

    The thread may keep a graph until its next backward. Parameters would meanwhile keep their
    nodes, with the stream of that backward.
    """
    none = torch.empty(0, device=device(), requires_grad=True)
    (none * 1).backward(torch.empty(0, device=device()))


def warmed_up(step) -> None:
    """Warm up on a side stream, as torch's notes on graphs require."""
    let_go()
    side = torch.Stream(device())
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        step()
    torch.accelerator.current_stream().wait_stream(side)


def captured(step, **options):
    """Return a captured graph of a step, and the step's result."""
    let_go()
    graph = GRAPH()
    with API.graph(graph, **options):
        out = step()
    return graph, out


def gradients(model, x) -> list[torch.Tensor]:
    """Return the gradients of a step; each replay overwrites them."""
    return [each.grad for each in (x, *model.parameters())]


def replayed(graphs, x, grads) -> list[list[torch.Tensor]]:
    """Return the gradients of graphs that are replayed one after the other."""
    start, found = x.detach().clone(), []
    for scale in SCALES:
        with torch.no_grad():
            x.copy_(start * scale)
        for graph in graphs:
            graph.replay()
        found.append([each.clone() for each in grads])
    return found


def assert_same(a, b) -> None:
    """Assert that the gradients of every step are bit-identical."""
    synchronize()
    assert all(same(one, other) for one, other in zip(a, b, strict=True))


def forget(model, x) -> None:
    """Reset the gradients, so that the captured backward allocates them."""
    model.zero_grad()
    x.grad = None


def test_what_was_saved_before_may_go_while_a_graph_is_captured():
    """No copy-in is started during the capture, and nothing waits for one."""
    moved = offloaded(blocks(4, device()))
    x = given(device())
    simulate(**SLOW_COPIES)
    left = [moved(x)]
    graph, y = captured(lambda: (left.clear(), gc.collect(), x * 2)[-1])
    graph.replay()
    assert torch.equal(y, x * 2)


def test_memory_of_an_earlier_copy_is_not_used_while_the_copy_runs():
    """A capture cannot wait for the copy, so `record_stream` is called."""
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
    """The copy may be requested while another stream is current."""
    x, other, told = given(device()), torch.Stream(device()), []

    def step():
        current = torch.accelerator.current_stream()
        told.extend(map(_host_tier.is_capturing, (current, other)))
        return x * 2

    captured(step)
    assert told == [True, False]


@pytest.mark.parametrize("folder", [False, True])
def test_captured_offload_is_refused(folder, tmp_path):
    """It raises one clear error, and the device remains usable."""
    moved = offloaded(blocks(2, device()), **({"to": tmp_path} if folder else {}))
    x = given(device())
    with pytest.raises(OffloadError, match="a graph is being captured around module Block"):
        captured(lambda: (x * 2, moved(x)))
    moved(x).sum().backward()
    graph, y = captured(lambda: x * 2)
    graph.replay()
    assert torch.equal(y, x * 2)


def test_dropout_of_a_captured_checkpoint_is_that_of_its_forward():
    """Every replay draws a new dropout mask."""

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

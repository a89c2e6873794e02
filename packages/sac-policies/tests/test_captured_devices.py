"""Regions that are captured in a device graph: offloaded and replayed.

Every test runs on an accelerator that supports graphs. The simulated one also reports races.
"""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn

import sac_policies as sp
from sac_policies.eager import _moved

KIND = torch.accelerator.current_accelerator() or torch.device("cpu")
API = torch.get_device_module(KIND)
GRAPH = next((getattr(API, n) for n in ("CUDAGraph", "XPUGraph", "Graph") if hasattr(API, n)), None)
SIM = getattr(torch, "simdev", None)
pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
    pytest.mark.usefixtures("no_race"),
    pytest.mark.skipif(GRAPH is None, reason="needs an accelerator with graphs"),
]
SCALES = (0.5, -1.0, 0.25)
OFFLOAD = {"policy": sp.offload("aten.addmm", "aten.gelu")}
KEEPS_PINNED = pytest.mark.skipif(
    not _moved._KEEPS_PINNED_MEMORY, reason="needs torch 2.13, whose graphs keep pinned memory"
)
REGIONS = {
    "offload": OFFLOAD,
    "replay": {"policy": sp.recompute_all()},
    "keeps": {"policy": sp.save_ops("aten.addmm")},
}
NAMES = [pytest.param("offload", marks=KEEPS_PINNED), *list(REGIONS)[1:]]


def blocks(p: float = 0.0) -> nn.ModuleList:
    """Three blocks, with dropout on request."""
    torch.manual_seed(0)
    made = [
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(p), nn.Linear(256, 64))
        for _ in range(3)
    ]
    return nn.ModuleList(made).to(KIND)


def run(model, x, options=None):
    """Each block in a region, or plain."""
    for block in model:
        x = block(x) if options is None else sp.checkpoint(block, x, **options)
    return x.square().sum()


def given() -> torch.Tensor:
    """An input that requires grad."""
    return torch.linspace(-1, 1, 128 * 64).view(128, 64).to(KIND).requires_grad_()


def let_go() -> None:
    """Make the device's backward thread release its last graph.

    The thread may keep a graph until its next backward. Parameters would meanwhile keep their
    nodes, with the stream of that backward.
    """
    none = torch.empty(0, device=KIND, requires_grad=True)
    (none * 1).backward(torch.empty(0, device=KIND))


def warmed_up(step) -> None:
    """Warm up on a side stream."""
    let_go()
    side = torch.Stream(KIND)
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


def replayed(graphs, x, grads):
    """Gradients for each scale of the input."""
    start, found = given(), []
    for scale in SCALES:
        with torch.no_grad():
            x.copy_(start * scale)
        for graph in graphs:
            graph.replay()
        found.append([each.clone() for each in grads])
    return found


def eager(model):
    """Gradients of the plain model, without capture."""
    found = []
    for scale in SCALES:
        x = (given().detach() * scale).requires_grad_()
        found.append(torch.autograd.grad(run(model, x), (x, *model.parameters())))
    return found


def same(a, b) -> bool:
    """Whether the gradients are bit-identical."""
    torch.accelerator.synchronize()
    return all(all(map(torch.equal, one, other)) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize("late", [False, True], ids=["quick", "late"])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_gives_the_plain_gradients_each_time(name, late):
    """Also after the captured objects are deleted."""
    model, x = blocks(), given()
    wanted = eager(model)
    if SIM is not None and late:
        SIM.simulate(kernel_us=100, copy_us=5000, virtual=True)
    inputs = (x, *model.parameters())

    def step():
        return torch.autograd.grad(run(model, x, REGIONS[name]), inputs)

    warmed_up(step)
    graph, grads = captured(step)
    gc.collect()
    others = [torch.full((128, 256), 7.0, pin_memory=True) for _ in range(8)]
    assert same(wanted, replayed([graph], x, grads))
    assert all(bool((each == 7).all()) for each in others)


@pytest.mark.parametrize("name", [NAMES[0], "replay"])
def test_forward_and_backward_may_be_captured_for_a_graph_each(name):
    """Neither graph waits for work of the other."""
    model, x = blocks(), given()
    wanted = eager(model)
    inputs = (x, *model.parameters())
    warmed_up(lambda: torch.autograd.grad(run(model, x, REGIONS[name]), inputs))
    forward, loss = captured(lambda: run(model, x, REGIONS[name]))
    step = partial(torch.autograd.grad, loss, inputs)
    backward, grads = captured(step, pool=forward.pool())
    del loss, step
    gc.collect()
    assert same(wanted, replayed([forward, backward], x, grads))


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_that_of_the_forward_in_each_replay(name):
    """The plain model is captured too, with one seed."""
    results = []
    for options in (None, REGIONS[name]):
        model, x = blocks(0.5), given()
        inputs = (x, *model.parameters())

        def step(model=model, x=x, inputs=inputs, options=options):
            return torch.autograd.grad(run(model, x, options), inputs)

        warmed_up(step)
        graph, grads = captured(step)
        API.manual_seed(0)
        results.append(replayed([graph], x, grads))
    assert same(*results)


def test_what_was_kept_before_may_go_while_a_graph_is_captured():
    """No copy-in is started during the capture."""
    model, x = blocks(), given()
    if SIM is not None:
        SIM.simulate(kernel_us=100, copy_us=5000, virtual=True)
    left = [run(model, x, OFFLOAD)]
    graph, y = captured(lambda: (left.clear(), gc.collect(), x * 2)[-1])
    graph.replay()
    assert torch.equal(y, x * 2)


def test_memory_of_an_earlier_copy_is_not_used_while_the_copy_runs():
    """A capture cannot wait for the copy, so `record_stream` is called."""
    if SIM is not None:
        SIM.simulate(kernel_us=100, copy_us=5000, virtual=True)
    graph, stream = GRAPH(), torch.Stream(KIND)
    with stream:
        x = given()
        left = _moved.MovedTensor(torch.zeros(4096, dtype=torch.uint8, device=KIND))
        graph.capture_begin()  # `graph` would wait for the device first
        y = x * 2
        left.let_go()
        graph.capture_end()
        torch.ones(4096, dtype=torch.uint8, device=KIND)
        graph.replay()
        assert torch.equal(y, x * 2)


def test_a_stream_is_asked_whether_it_is_captured_and_not_the_current_one():
    """The copy may be requested while another stream is current."""
    x, other, told = given(), torch.Stream(KIND), []

    def step():
        told.extend(map(_moved._is_capturing, (torch.accelerator.current_stream(), other)))
        return x * 2

    captured(step)
    assert told == [True, False]


def test_offloading_in_a_torch_that_keeps_no_pinned_memory_is_refused(monkeypatch):
    """It raises one clear error, and the device remains usable."""
    monkeypatch.setattr(_moved, "_KEEPS_PINNED_MEMORY", False)
    model, x = blocks(), given()
    with pytest.raises(sp.EngineError, match=r"only from torch 2\.13 on"):
        captured(lambda: (x * 2, run(model, x, OFFLOAD)))
    run(model, x, OFFLOAD).backward()

"""Graphs: captures, operations that a capture forbids, replays and their races."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("captured", ["simdev", "accelerator"], indirect=True)
def test_what_is_captured_runs_when_it_is_replayed_and_not_before(sim, device, captured):
    """Each replay uses the current values."""
    x = torch.ones(3, device=device)
    count = torch.zeros(1, device=device)
    graph, y = captured(lambda: (count.add_(1), x * 2)[1])
    assert count.item() == 0
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [10, 10, 10]
    assert count.item() == 2


def test_only_the_capturing_stream_says_that_it_captures(sim, device, side):
    """In every thread in which it is current."""
    inner = []
    assert not sim.is_current_stream_capturing()
    with sim.graph(sim.Graph()):
        torch.ones(1, device=device)
        inner.append(sim.is_current_stream_capturing())
        with sim.stream(side):
            inner.append(sim.is_current_stream_capturing())
    assert inner == [True, False]
    assert not sim.is_current_stream_capturing()


# Operations that a capture forbids, with a tensor of the device and an earlier event.
FORBIDDEN = {
    "item": (lambda sim, x, _: x.sum().item(), "the host waits for stream"),
    "synchronize": (lambda sim, x, _: sim.synchronize(), "the host waits for the device"),
    "stream": (lambda sim, x, _: sim.current_stream().synchronize(), "waits for stream"),
    "query": (lambda sim, x, _: sim.current_stream().query(), "the host asks for stream"),
    "another stream": (lambda sim, x, _: sim.Stream().synchronize(), "the host waits for a stream"),
    "another query": (lambda sim, x, _: sim.Stream().query(), "the host asks for a stream"),
    "captured event": (
        lambda sim, x, _: sim.current_stream().record_event().query(),
        "the host asks for an event that is captured",
    ),
    "older event": (lambda sim, x, event: event.query(), "the host asks for an event"),
    "older event waited": (lambda sim, x, event: event.synchronize(), "waits for an event"),
    "event from outside": (
        lambda sim, x, event: sim.current_stream().wait_event(event),
        "waits for an event from outside of the capture",
    ),
    "stream from outside": (
        lambda sim, x, _: sim.current_stream().wait_stream(sim.Stream()),
        "waits for an event from outside of the capture",
    ),
    "to host": (lambda sim, x, _: x.cpu(), "not pinned"),
    "from host": (lambda sim, x, _: x.copy_(torch.ones(3), non_blocking=True), "not pinned"),
    "pinned, waited": (lambda sim, x, _: torch.ones(3, pin_memory=True).copy_(x), "non_blocking"),
    "no shapes": (lambda sim, x, _: x.nonzero(), "no shapes ahead of its kernel"),
    "memory given up": (lambda sim, x, _: sim.empty_cache(), "memory is given up"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_may_not_be_captured_breaks_the_capture(sim, device, name):
    """The error names it, at once and at the end; the device is then as before."""
    act, told = FORBIDDEN[name]
    x = torch.ones(3, device=device)
    event = sim.current_stream().record_event()
    graph = sim.Graph()
    told = rf"previous error during capture: .*{told}"
    with pytest.raises(RuntimeError, match=told) as end, sim.graph(graph):
        act(sim, x, event)
    assert "not permitted when stream is capturing" in str(end.value.__context__)
    assert not sim.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="was not captured to its end"):
        graph.replay()
    assert x.add(1).tolist() == [2, 2, 2]
    graph.reset()
    with sim.graph(graph):
        y = x + 1
    graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_a_broken_capture_takes_nothing_more(sim, device):
    """Although the program continues after the error."""
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="previous error"), sim.graph(sim.Graph()):
        with pytest.raises(RuntimeError, match="not permitted"):
            x.sum().item()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            x.add_(1)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("mode", "breaks"), [("global", True), ("thread_local", False), ("relaxed", False)]
)
def test_what_another_thread_asks_breaks_a_global_capture(sim, device, mode, breaks):
    """Such as a thread that polls events while the main thread captures."""
    event = sim.current_stream().record_event()
    seen = []

    def ask():
        try:
            seen.append(event.query())
        except RuntimeError as error:
            seen.append(error)

    graph = sim.Graph()
    x = torch.ones(3, device=device)
    event.synchronize()

    def capture():
        with sim.graph(graph, capture_error_mode=mode):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            x.add_(1)

    if breaks:
        with pytest.raises(RuntimeError, match="the host asks for an event"):
            capture()
        assert isinstance(seen[0], RuntimeError)
    else:
        capture()
        assert seen == [True]


def test_memory_made_outside_of_the_pool_breaks_a_capture(sim, device, side):
    """On a stream outside of the capture; existing memory may be reused."""
    main = sim.Stream(device)
    with sim.stream(side):
        there = torch.empty(50_000, device=device)
        del there
    with sim.stream(main):
        graph = sim.Graph()
        graph.capture_begin()
        with sim.stream(side):
            torch.empty(50_000, device=device)
        torch.empty(1, device=device)
        graph.capture_end()
    told = "memory is made outside of the graph's pool"
    with pytest.raises(RuntimeError, match=told), sim.graph(sim.Graph()), sim.stream(side):
        torch.empty(60_000, device=device)


def test_the_default_stream_cannot_be_captured(sim):
    """With torch's message for CUDA."""
    with pytest.raises(RuntimeError, match="not a device's default one"):
        sim.Graph().capture_begin()


def test_a_capture_begins_once_and_ends_where_it_began(sim, device, side, captured):
    """On its stream, graph and pool; refused calls break nothing."""
    x, pool = torch.ones(3, device=device), sim.graph_pool_handle()
    graph, y = captured(lambda: x + 1, pool=pool)
    with pytest.raises(RuntimeError, match="captured already"), sim.stream(side):
        graph.capture_begin()
    other = sim.Graph()
    with sim.graph(other, pool=pool):
        with pytest.raises(RuntimeError, match="captures already"):
            sim.Graph().capture_begin()
        with sim.stream(side):
            with pytest.raises(RuntimeError, match="in use by another capture"):
                sim.Graph().capture_begin(pool)
            with pytest.raises(RuntimeError, match="must end on the stream it began on"):
                other.capture_end()
        z = x + 2
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    other.replay()
    assert z.tolist() == [3, 3, 3]


def test_a_capture_may_be_given_up(sim, device, side):
    """Its stream runs operations again, and the graph may capture something else."""
    x, graph = torch.ones(3, device=device), sim.Graph()
    sim.synchronize()
    with sim.stream(side):
        graph.capture_begin()
        x.add_(1)
        graph.reset()
        assert not sim.is_current_stream_capturing()
        x.add_(2)
    sim.synchronize()
    assert x.tolist() == [3, 3, 3]
    with sim.graph(graph):
        x.add_(4)
    graph.replay()
    assert x.tolist() == [7, 7, 7]


def test_branches_of_graphs_that_are_gone_are_used_again(sim, device, side):
    """A device has sixteen."""
    x = torch.ones(3, device=device)
    for _ in range(20):
        graph = sim.Graph()
        with sim.graph(graph):
            main = sim.current_stream()
            side.wait_stream(main)
            with sim.stream(side):
                x.add_(1)
            main.wait_stream(side)
        graph.replay()
        graph.reset()
    assert x.tolist() == [21, 21, 21]


def test_a_graph_is_not_replayed_in_a_capture(sim, device, captured):
    """This is not simulated."""
    x = torch.ones(3, device=device)
    graph, _ = captured(lambda: x + 1)
    with pytest.raises(RuntimeError, match="replayed in a capture"), sim.graph(sim.Graph()):
        graph.replay()


def test_a_device_without_a_capture_may_be_waited_for(sim, device):
    """In a relaxed capture, for the other device."""
    x = torch.ones(3, device=device)
    graph = sim.Graph()
    with sim.graph(graph, capture_error_mode="relaxed"):
        sim.synchronize(1)
        y = x + 1
    graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_an_event_of_a_capture_is_of_no_use_after_it(sim, device, captured):
    """Neither for the host nor for a stream."""
    x = torch.ones(3, device=device)
    events = []
    captured(lambda: (x.add_(1), events.append(sim.current_stream().record_event())))
    for use in (events[0].query, events[0].synchronize, lambda: events[0].wait()):
        with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
            use()


def test_a_stream_that_joined_has_to_be_waited_for(sim, device, side):
    """The error names the stream; with the join its branch is part of each replay."""
    x = torch.ones(3, device=device)

    def branch(join):
        main = sim.current_stream()
        side.wait_stream(main)
        with sim.stream(side):
            y = x * 2
        if join:
            main.wait_stream(side)
        return y

    told = rf"work on stream {side.stream_id} that .* not waited"
    with pytest.raises(RuntimeError, match=told), sim.graph(sim.Graph()):
        branch(join=False)
    graph = sim.Graph()
    with sim.graph(graph):
        y = branch(join=True)
    graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_streams_of_two_captures_do_not_meet(sim, device, side):
    """Each in its own thread; a wait between them breaks both."""
    first, second = sim.Graph(), sim.Graph()
    with sim.stream(side):
        first.capture_begin(capture_error_mode="relaxed")
        event = side.record_event()
    other = sim.Stream(device)
    with sim.stream(other):
        second.capture_begin(capture_error_mode="relaxed")
        with pytest.raises(RuntimeError, match="waits for an event of another capture"):
            other.wait_event(event)
        with pytest.raises(RuntimeError, match="previous error"):
            second.capture_end()
    with sim.stream(side):
        first.capture_end()


def test_branches_run_beside_each_other(sim, device, side):
    """Three kernels, two of them in parallel, in virtual time."""
    x = torch.ones(3, device=device)
    sim.simulate(kernel_us=10, virtual=True)
    graph = sim.Graph()
    with sim.graph(graph):
        main = sim.current_stream()
        a = x * 2
        side.wait_stream(main)
        with sim.stream(side):
            b = a + 1
        c = a + 2
        main.wait_stream(side)
        d = b + c
    sim.synchronize()
    begin, end = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(0.030)
    assert d.tolist() == [7, 7, 7]


def test_a_kernel_can_fail_in_a_replay(sim, device, captured):
    """At its position, in each counted replay."""
    x = torch.ones(3, device=device)
    graph, _ = captured(lambda: x.mul_(2).add_(1))
    sim.fail_later("add")
    graph.replay()
    with pytest.raises(RuntimeError, match=r"add.*: a fault was asked for"):
        sim.synchronize()
    assert x.tolist() == [2, 2, 2]


def test_random_numbers_are_new_in_each_replay_and_the_seed_s(sim, device, captured):
    """And the same again if their state is set back in the capture."""
    x = torch.ones(64, device=device)

    def twice():
        state = sim.get_rng_state()
        one = nn.functional.dropout(x)
        sim.set_rng_state(state)
        return one, nn.functional.dropout(x), nn.functional.dropout(x)

    graph, (one, same, other) = captured(twice)

    def values():
        graph.replay()
        return one.tolist(), same.tolist(), other.tolist()

    sim.manual_seed(0)
    first, second = values(), values()
    assert first[0] == first[1] != first[2]
    assert second != first
    sim.manual_seed(0)
    assert values() == first


def test_random_state_does_not_cross_the_border_of_a_capture(sim, device):
    """A state from before does not determine the numbers of a replay."""
    state = sim.get_rng_state()
    inner = []
    with sim.graph(sim.Graph()):
        inner.append(sim.get_rng_state())
        with pytest.raises(RuntimeError, match="cannot be set in one"):
            sim.set_rng_state(state)
        with pytest.raises(RuntimeError, match="seeded while its device captures"):
            sim.manual_seed(1)
        torch.ones(1, device=device)
    with pytest.raises(RuntimeError, match="cannot be set outside of one"):
        sim.set_rng_state(inner[0])


def test_a_step_of_training_is_captured(sim, device):
    """Forward, backward in its own thread and update, replayed with new inputs, equal eager."""

    def model():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device)
        return made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)

    def step(made, optimizer, x):
        optimizer.zero_grad(set_to_none=True)
        made(x).square().sum().backward()
        optimizer.step()

    batches = [torch.randn(4, 8, device=device) for _ in range(5)]
    plain, optimizer = model()
    for batch in batches:
        step(plain, optimizer, batch)
    made, optimizer = model()
    x = torch.empty(4, 8, device=device)
    warm, main = sim.Stream(device), sim.current_stream()
    warm.wait_stream(main)
    with sim.stream(warm):
        for batch in batches[:2]:
            step(made, optimizer, x.copy_(batch))
    main.wait_stream(warm)
    graph = sim.Graph()
    optimizer.zero_grad(set_to_none=True)
    with sim.graph(graph):
        step(made, optimizer, x)
    for batch in batches[2:]:
        x.copy_(batch)
        graph.replay()
    for a, b in zip(plain.parameters(), made.parameters(), strict=True):
        assert torch.equal(a, b)

"""flat-param's sharded modules after a capture that came to nothing, on two ranks.

What a capture has noted never ran. Ranks then have to be in the state before it, whatever each of
them was at, or they wait for each other for ever.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from simdev.ranks import on_ranks

import flat_param
from flat_param.sharded import _schedule

OPTIONS = {
    "prefetch": {},
    "kept": {"reshard_after_forward": False},
}
SCALES = (0.5, -1.0)


def host_reads(*_):
    """What a capture does not allow."""
    torch.ones(1, device="simdev:0").item()


def stops(*_):
    """What has nothing to do with the device."""
    raise RuntimeError("the capture is given up")


def in_forward(block, act):
    """At the end of a block's forward."""
    return block.register_forward_hook(act)


def in_backward(block, act):
    """When backward comes to a block."""
    return block.register_forward_hook(lambda _, args, output: output.register_hook(act) and None)


# Where it ends, and on which ranks; None: at its end, by a parameter without a gradient.
ENDS = {
    "no gradient": None,
    "host reads in forward": (in_forward, host_reads, (0, 1)),
    "host reads in backward": (in_backward, host_reads, (0, 1)),
    "stops in forward": (in_forward, stops, (0, 1)),
    "stops in backward": (in_backward, stops, (0, 1)),
    "one rank stops in forward": (in_forward, stops, (0,)),
    "one rank stops in backward": (in_backward, stops, (1,)),
}
CELLS = [(end, way) for end in ENDS for way in OPTIONS]


def sharded(unused=False, **options):
    """Equal blocks, a unit each and one around them; one more parameter that no output needs."""
    torch.manual_seed(1)
    built = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))).to("simdev:0")
    if unused:
        built[1].register_parameter("spare", torch.nn.Parameter(torch.ones(8, device="simdev:0")))
    for block in built:
        flat_param.fully_shard(block, **options)
    return flat_param.fully_shard(built, **options)


def batch(scale=1.0):
    """The same on both ranks, so that a mean is the plain gradient."""
    return torch.linspace(-1, 1, 64).view(4, 16).to("simdev:0") * scale


def step(built, x):
    """Gradients of this rank's parts, as numbers: tensors would go with the process."""
    built.zero_grad()
    built(x).square().sum().backward()
    return [each.grad.tolist() for each in built.parameters() if each.grad is not None]


def trained(rank, end, way, *, captures):
    """Gradients of steps, after a capture that was given up or without one."""
    where = ENDS[end]
    built, x = sharded(unused=where is None, **OPTIONS[way]), batch()
    step(built, x)
    if captures:
        told = give_up(built, x, where if where and rank in where[2] else None)
        assert bool(told) is (where is None or rank in where[2])
    return [step(built, batch(scale)) for scale in SCALES]


def give_up(built, x, where):
    """Capture a step that ends early; what was said of it."""
    place, act, _ = where or (in_forward, lambda *_: None, ())
    with place(built[1], act):
        try:
            with torch.simdev.graph(torch.simdev.Graph()):
                built(x).square().sum().backward()
        except (RuntimeError, flat_param.FlatParamError) as error:
            return str(error)
    return ""


@contextlib.contextmanager
def held():
    """Keep what the engine calls back, as a thread of a device may for as long as it likes."""
    kept, real = [], _schedule.at_end_of_backward

    def keep(callback):
        kept.append(callback)
        real(callback)

    _schedule.at_end_of_backward = keep
    try:
        yield
    finally:
        _schedule.at_end_of_backward = real


def alone(rank, way):
    """Gradients of steps after a forward alone was captured, and of a capture after one."""
    built, x = sharded(**OPTIONS[way]), batch()
    step(built, x)
    with torch.simdev.graph(torch.simdev.Graph()):
        built(x)
    eager = [step(built, batch(scale)) for scale in SCALES]
    built(x)
    graph = torch.simdev.Graph()
    with torch.simdev.graph(graph):
        built.zero_grad()
        built(x).square().sum().backward()
    with torch.no_grad():
        for each in built.parameters():
            each.mul_(0.5)  # what a replay has to gather anew
    graph.replay()
    replayed = [each.grad.tolist() for each in built.parameters()]
    return eager, replayed, step(built, x)


def both(rank):
    """All that is asked of a group: races, and what was found."""
    sim = torch.simdev
    sim.simulate(virtual=True, kernel_us=10, comm_us=20)
    told = {}
    with held() if rank else contextlib.nullcontext():
        for end, way in CELLS:
            found = [trained(rank, end, way, captures=captures) for captures in (True, False)]
            told[end, way] = sim.races(), *found
        for way in OPTIONS:
            told[way] = alone(rank, way)
    return told, sim.races()


@pytest.fixture(scope="module")
def two():
    """What each of two ranks told."""
    return on_ranks(both, limit_s=300)


@pytest.mark.parametrize("cell", CELLS, ids=", ".join)
def test_eager_steps_go_on_as_without_the_capture(two, cell):
    """Also where another rank's capture came to its end, and was not replayed."""
    for told, _ in two:
        races, found, wanted = told[cell]
        assert races == []
        assert found == wanted
        assert found[0] != found[1]


@pytest.mark.parametrize("way", OPTIONS)
def test_what_was_gathered_in_a_capture_is_there_in_its_replays_alone(two, way):
    """And what was gathered before is not in the graph."""
    for told, _ in two:
        eager, replayed, after = told[way]
        assert eager == told["stops in forward", way][2]
        assert replayed == after


def test_none_of_it_races(two):
    """Replays among it."""
    assert [races for _, races in two] == [[], []]

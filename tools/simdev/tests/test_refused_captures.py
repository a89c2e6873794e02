"""flat-param's sharded modules after an abandoned capture, on two ranks.

The captured operations never ran. Each rank must then be in the state before the capture, or ranks
wait for each other forever.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from simdev.ranks import on_ranks

import flat_param
from flat_param.sharded.schedule import _schedule

OPTIONS = {
    "prefetch": {},
    "kept": {"reshard_after_forward": False},
}
SCALES = (0.5, -1.0)


def host_reads(*_):
    """Read a value on the host, which a capture forbids."""
    torch.ones(1, device="simdev:0").item()


def stops(*_):
    """Raise an error unrelated to the device."""
    raise RuntimeError("the capture is given up")


def in_forward(block, act):
    """At the end of a block's forward."""
    return block.register_forward_hook(act)


def in_backward(block, act):
    """When backward reaches a block."""
    return block.register_forward_hook(lambda _, args, output: output.register_hook(act) and None)


# Where the capture ends, and on which ranks; None: at its end, by a parameter without gradient.
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
    """Equal blocks in one unit each and one unit around them; one unused parameter."""
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
    """Return gradients of this rank's parts as numbers: tensors would end with the process."""
    built.zero_grad()
    built(x).square().sum().backward()
    return [each.grad.to_local().tolist() for each in built.parameters() if each.grad is not None]


def trained(rank, end, way, *, captures):
    """Return gradients of steps, after an abandoned capture or without one."""
    where = ENDS[end]
    built, x = sharded(unused=where is None, **OPTIONS[way]), batch()
    step(built, x)
    if captures:
        told = give_up(built, x, where if where and rank in where[2] else None)
        assert bool(told) is (where is None or rank in where[2])
    return [step(built, batch(scale)) for scale in SCALES]


def give_up(built, x, where):
    """Capture a step that ends early; return its error."""
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
    """Keep references to the engine's callbacks, as a device's thread may do."""
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
    """Return gradients of steps after a captured forward, and of a capture after a step."""
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
            each.mul_(0.5)  # a replay has to gather the new values
    graph.replay()
    replayed = [each.grad.to_local().tolist() for each in built.parameters()]
    return eager, replayed, step(built, x)


def both(rank):
    """Run everything on one rank; return races and results."""
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
    """Results of two ranks."""
    return on_ranks(both, limit_s=300)


@pytest.mark.parametrize("cell", CELLS, ids=", ".join)
def test_eager_steps_go_on_as_without_the_capture(two, cell):
    """Also if another rank's capture was completed, and not replayed."""
    for told, _ in two:
        races, found, wanted = told[cell]
        assert races == []
        assert found == wanted
        assert found[0] != found[1]


@pytest.mark.parametrize("way", OPTIONS)
def test_what_was_gathered_in_a_capture_is_there_in_its_replays_alone(two, way):
    """Parameters gathered before it are not in the graph."""
    for told, _ in two:
        eager, replayed, after = told[way]
        assert eager == told["stops in forward", way][2]
        assert replayed == after


def test_none_of_it_races(two):
    """Including replays."""
    assert [races for _, races in two] == [[], []]

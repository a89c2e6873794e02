"""flat-param's sharded modules captured in a graph, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from simdev.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import flat_param

WAYS = {"prefetch": {}, "keeps": {"reshard_after_forward": False}}
SCALES = (0.5, -1.0)


def model(unused=False, where="simdev:0"):
    """Equal blocks, and optionally an unused one."""
    torch.manual_seed(1)
    built = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))).to(where)
    if unused:
        built[1].register_parameter("spare", torch.nn.Parameter(torch.ones(8, device="simdev:0")))
    return built


def sharded(unused=False, **options):
    built = model(unused, "cpu" if "offload_policy" in options else "simdev:0")
    options["mesh"] = init_device_mesh("simdev", (dist.get_world_size(),))
    for block in built:
        flat_param.fully_shard(block, **options)
    return built


def batch(scale=1.0):
    """The same on both ranks, so that a mean is the plain gradient."""
    return torch.linspace(-1, 1, 64).view(4, 16).to("simdev:0") * scale


def captured(built, x):
    """Return a graph of a step, after a step on another stream."""
    sim = torch.simdev
    side, main = sim.Stream(), sim.current_stream()
    side.wait_stream(main)
    with sim.stream(side):
        built(x).square().sum().backward()
    main.wait_stream(side)
    built.zero_grad()
    graph = sim.Graph()
    with sim.graph(graph):
        built(x).square().sum().backward()
    return graph


def gradients(built):
    """Return gradients of this rank's parts as numbers: tensors would end with the process."""
    return [each.grad.to_local().tolist() for each in built.parameters() if each.grad is not None]


def step(rank, options):
    """Return races of replays and of a following eager step, and the gradients of each."""
    sim = torch.simdev
    built, x = sharded(**options), batch()
    sim.simulate(virtual=True, kernel_us=10, comm_us=20)
    graph = captured(built, x)
    found = []
    for scale in SCALES:
        x.copy_(batch(scale))
        graph.replay()
        found.append(gradients(built))
    for scale in SCALES:
        built.zero_grad()
        built(batch(scale)).square().sum().backward()
        found.append(gradients(built))
    return sim.races(), found


def refused(rank, options):
    """Return the error of the capture."""
    built, x = sharded(**options), batch()
    with pytest.raises(RuntimeError) as told:
        captured(built, x)
    # A backward that ended early has left unjoined streams, which is an error, too.
    return f"{told.value.__context__} {told.value}"


def both(rank):
    """Run everything on one rank."""
    return (
        {way: step(rank, options) for way, options in WAYS.items()},
        refused(rank, {"offload_policy": CPUOffloadPolicy()}),
        refused(rank, {"unused": True}),
    )


@pytest.fixture(scope="module")
def two():
    """Results of two ranks."""
    return on_ranks(both, limit_s=300)


@pytest.mark.parametrize("way", WAYS)
def test_replays_give_the_gradients_of_eager_steps(two, way):
    """Gathers and reductions are in the graph, in the order of the capture."""
    for told, *_ in two:
        races, found = told[way]
        assert races == []
        count = len(SCALES)
        assert all(len(each) == len(found[0]) > 0 for each in found)
        for replay, eager in zip(found[:count], found[count:], strict=True):
            assert replay == eager
        assert found[0] != found[1]


def test_what_goes_to_the_host_is_not_captured(two):
    """One clear error on each rank."""
    for _, told, _ in two:
        assert "has an offload_policy and a graph is being captured" in told


def test_parameters_without_a_gradient_are_not_captured(two):
    """Whether another rank has a gradient is read on the host."""
    for _, _, told in two:
        assert "got no gradient while a graph is being captured" in told

"""flat-param's sharded modules on streams: races, values, memory and overlap, on real ranks.

The host is as far ahead as possible: in virtual time nothing is done before it waits. All cases
of one world size run in one group of processes; tests read the results.
"""

from __future__ import annotations

import gc

import pytest
import torch
from simdev.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import flat_param

WIDTH, UNITS, STEPS, KERNEL_US = 64, 24, 3, 100
UNIT_BYTES = 4 * WIDTH * (WIDTH + 1)
OUTER_BYTES = 2 * UNIT_BYTES

WAYS = {
    "prefetch": {},
    "keeps after forward": {"reshard_after_forward": False},
    "not sharded": {"shape": "replicated"},
    "hybrid": {"shape": "hybrid"},
    "accumulates": {"micro_batches": 2},
    "accumulates, no sync": {"micro_batches": 2, "no_sync": True},
    "offloads": {"offload_policy": CPUOffloadPolicy(), "shape": "sharded"},
    "jitter": {"jitter": True},
    "another stream": {"beside": True},
    "uneven": {"boundary": "tensor"},
    "units on two streams": {"branches": True},
    "keeps, on two streams": {"branches": True, "reshard_after_forward": False},
    "hybrid, on two streams": {"branches": True, "shape": "hybrid"},
    "uneven, on two streams": {"branches": True, "boundary": "tensor"},
    "offloads, on two streams": {
        "branches": True,
        "offload_policy": CPUOffloadPolicy(),
        "shape": "sharded",
    },
}
SLOW_US = 4 * KERNEL_US  # a unit computes for two kernels in forward
TIMED = ("prefetch", "not sharded", "offloads")
TWO_STREAMS = {name for name in WAYS if name.endswith("two streams")}


class Model(torch.nn.Module):
    """Equal blocks of one linear layer each, between two more layers, like a transformer.

    The outer two belong to the outermost unit, which stays gathered and reduces its gradients last.
    """

    def __init__(self):
        super().__init__()
        self.first, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
            for _ in range(UNITS)
        )
        self.blocks = torch.nn.Sequential(*blocks)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def model():
    """Return a model with fixed weights."""
    torch.manual_seed(1)
    return Model()


class Branches(torch.nn.Sequential):
    """Pairs of blocks side by side, the second one on a stream of its own."""

    def forward(self, x):
        main = torch.accelerator.current_stream(x.device) if x.device.type != "cpu" else None
        side = None if main is None else torch.Stream(x.device)
        for first, second in zip(self[::2], self[1::2], strict=True):
            if main is None:
                x = first(x) + second(x)
                continue
            side.wait_stream(main)
            with side:
                there = second(x)
            here = first(x)
            main.wait_stream(side)
            x.record_stream(side)
            there.record_stream(main)
            x = here + there
        return x


def batches(rank, count):
    """Return one rank's batches, for all micro-batches."""
    given = torch.Generator().manual_seed(rank)
    return torch.randn(count, 8, WIDTH, generator=given)


def train_plain(size, micro_batches=1, branches=False):
    """Return parameters after training on the batches of all ranks."""
    plain = model()
    if branches:
        plain.blocks.__class__ = Branches
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    data = [batches(rank, STEPS * micro_batches) for rank in range(size)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            for mine in data:
                batch = mine[step * micro_batches + micro]
                (plain(batch).square().mean() / size).backward()
        optimizer.step()
    return [param.detach() for param in plain.parameters()]


def sharded(size, shape=None, branches=False, **options):
    """Return the model on the first device, with one unit per block."""
    shapes = {"replicated": (size, 1), "hybrid": (max(size // 2, 1), 2), "sharded": (size,)}
    if shape is not None:
        options["mesh"] = init_device_mesh("simdev", shapes[shape])
    built = model() if "offload_policy" in options else model().to("simdev:0")
    if branches:
        built.blocks.__class__ = Branches
    for block in built.blocks:
        flat_param.fully_shard(block, **options)
    return flat_param.fully_shard(built, **options)


def train(rank, size, micro_batches=1, no_sync=False, jitter=False, beside=False, **options):
    """Return races, the largest difference from plain training, and blocks held back.

    `beside`: forward and backward run on a stream that was not current during sharding.
    """
    sim = torch.simdev
    trained = sharded(size, **options)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    data = batches(rank, STEPS * micro_batches).to("simdev:0")
    sim.simulate(virtual=not jitter, kernel_us=20 if jitter else 1, comm_us=20, jitter=jitter)
    sim.races()
    main, other = sim.current_stream(), sim.Stream("simdev:0") if beside else None
    for step in range(STEPS):
        held = sim.memory()["held"]
        optimizer.zero_grad()
        if beside:
            other.wait_stream(main)
        for micro in range(micro_batches):
            is_last = micro + 1 == micro_batches
            trained.set_requires_gradient_sync(is_last or not no_sync)
            with sim.stream(other):
                trained(data[step * micro_batches + micro]).square().mean().backward()
        if beside:
            main.wait_stream(other)
        optimizer.step()
    held = sim.memory()["held"] - held
    races = sim.races()
    with trained.whole_params():
        found = [param.detach().cpu().clone() for param in trained.parameters()]
    wanted = train_plain(size, micro_batches, options.get("branches", False))
    off = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    return {"races": races + sim.races(), "off": off, "held": held}


def step_in_virtual_time(rank, size, comm_us, copy_us=0, **options):
    """Return microseconds of a step and of the host, the number of collectives, and reserved bytes
    beyond the start.

    A unit computes for two kernels in forward and for more in backward.
    """
    sim = torch.simdev
    gc.collect()
    sim.empty_cache()
    before = sim.memory()["reserved"]
    trained = sharded(size, **options)
    data = batches(rank, 1).to("simdev:0")
    sim.simulate(virtual=True, kernel_us=KERNEL_US, comm_us=comm_us, copy_us=copy_us, log=True)
    for _ in range(3):
        trained.zero_grad()
        sim.synchronize_all()
        sim.empty_cache()
        sim.timeline()
        sim.reset_peak_memory_stats()
        start = sim.host_us()
        trained(data[0]).square().mean().backward()
        host_us = sim.host_us() - start
        sim.synchronize_all()
    names = [row.name for row in sim.timeline()]
    count = sum(name in ("all_gather", "reduce_scatter", "all_reduce") for name in names)
    # This rank's bytes, rounded up to blocks of the allocator.
    shards = 2 * sum(-(-each // size // 512) * 512 for each in (*[UNIT_BYTES] * UNITS, OUTER_BYTES))
    peak = sim.memory()["reserved_peak"] - before - shards
    told = {"us": sim.host_us() - start, "host_us": host_us}
    return told | {"collectives": count, "bytes": peak}


def host_us_in_forward(rank, size, **options):
    """Return how long the host is in forward, if shards are in host memory."""
    sim = torch.simdev
    sim.reset()
    trained = sharded(size, "sharded", offload_policy=CPUOffloadPolicy(), **options)
    data = batches(rank, 1).to("simdev:0")
    sim.simulate(virtual=True, kernel_us=100, copy_us=50, comm_us=20)
    for _ in range(2):
        trained.zero_grad()
        sim.synchronize_all()
        start = sim.host_us()
        loss = trained(data[0]).square().mean()
        spent = sim.host_us() - start
        loss.backward()
    return {"us": spent, "races": sim.races()}


def all_ways(rank, size, names):
    """Return the results of each case."""
    told = {}
    for name in names:
        torch.simdev.reset()
        told[name] = train(rank, size, **WAYS[name])
    for way in TIMED:
        torch.simdev.reset()
        alone = told[way, "alone"] = step_in_virtual_time(rank, size, 0, **WAYS[way])
        torch.simdev.reset()
        comm_us = alone["us"] / alone["collectives"] / 2  # computing takes twice as long
        copy_us = comm_us / 2 if way == "offloads" else 0
        beside = step_in_virtual_time(rank, size, comm_us, copy_us, **WAYS[way])
        told[way, "beside"] = beside | {"comm_us": comm_us}
    torch.simdev.reset()
    told["slow gathers"] = step_in_virtual_time(rank, size, SLOW_US)
    told["offloaded"] = host_us_in_forward(rank, size)
    lower = MixedPrecisionPolicy(torch.bfloat16)
    told["offloaded and cast"] = host_us_in_forward(rank, size, mp_policy=lower)
    return told


@pytest.fixture(scope="module")
def two():
    """Results of two ranks for all cases."""
    return on_ranks(all_ways, 2, list(WAYS))


@pytest.mark.parametrize("way", WAYS)
def test_no_race_and_plain_gradients(two, way):
    """However far the host is ahead; summing micro-batches rounds differently."""
    for told in two:
        assert told[way]["races"] == []
        assert told[way]["off"] < 1e-7


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"offloads", "another stream"} - TWO_STREAMS))
def test_nothing_is_held_back_in_a_steady_step(two, way):
    """No memory is recorded on a foreign stream.

    Autograd itself records gradients that move from another stream to that of the leaves.
    """
    assert [told[way]["held"] for told in two] == [0, 0]


@pytest.mark.parametrize(
    ("way", "collectives", "exposed"),
    [("prefetch", 3, 2), ("not sharded", 1, 1), ("offloads", 3, 3)],
)
def test_only_first_gather_and_last_reduction_are_exposed(two, way, collectives, exposed):
    """A unit computes longer than a collective takes; up to one kernel runs after the last one.

    Of offloaded units also the first and the last copy, which take half as long.
    """
    for told in two:
        alone, beside = told[way, "alone"], told[way, "beside"]
        assert beside["collectives"] >= collectives * UNITS
        assert beside["us"] - alone["us"] <= exposed * beside["comm_us"] + KERNEL_US


def test_forward_is_as_short_as_its_gathers_if_they_take_longer(two):
    """The units' gathers follow each other, and the last unit computes after the last one."""
    hidden = 1 + 2 * (UNITS - 1)  # kernels: the first layer, and all units but the last
    for told in two:
        gathers, last_reduction = (1 + UNITS) * SLOW_US, SLOW_US
        shortest = told["prefetch", "alone"]["us"] - hidden * KERNEL_US + gathers + last_reduction
        assert told["slow gathers"]["us"] <= shortest + KERNEL_US


def test_host_waits_for_nothing_in_a_step(two):
    """Neither to compare orders with other ranks nor to set gradients."""
    for told in two:
        assert told["prefetch", "beside"]["host_us"] <= 0.01 * told["prefetch", "beside"]["us"]


@pytest.mark.parametrize("way", ["offloaded", "offloaded and cast"])
def test_host_waits_for_no_copy_of_a_shard(two, way):
    """Copy, cast and gather run on a side stream."""
    assert [told[way] for told in two] == [{"us": 0, "races": []}] * 2


def test_memory_is_that_of_two_units(two):
    """Full parameters and gradients of two units and of the outermost one, and activations.

    If the outermost gradients were reduced first, those of all other units would wait.
    """
    activations = (UNITS + 2) * 2 * 4 * 8 * WIDTH
    for told in two:
        held = told["prefetch", "beside"]["bytes"] - activations - 2 * OUTER_BYTES
        assert held <= (2 + 2) * UNIT_BYTES


def test_four_ranks_are_right():
    """Four shards, and two replicas of two shards."""
    for told in on_ranks(all_ways, 4, ["prefetch", "hybrid"], size=4):
        for way in ("prefetch", "hybrid"):
            assert told[way]["races"] == []
            assert told[way]["off"] < 1e-7
            assert told[way]["held"] == 0

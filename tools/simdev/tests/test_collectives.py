"""A process group for the device: values on two ranks, timing, and races.

All scenes except the one with a missing rank run in one pair of processes; tests read the results.
"""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from simdev.ranks import on_ranks

NUMEL = 1000


def gather(out, part):
    """Start an all-gather and return its work."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, part, async_op=True)


def reduce_scatter(out, full):
    """Start a reduce-scatter."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, full, async_op=True)


def buffers(rank):
    """This rank's own values, and a buffer for those of both ranks."""
    part = torch.full((NUMEL,), float(rank + 1), device="simdev")
    return part, torch.empty(2 * NUMEL, device="simdev")


def values_of_all_ranks(rank):
    """Each collective once, with a wait."""
    part, out = buffers(rank)
    gather(out, part).wait()
    mine = torch.empty(NUMEL, device="simdev")
    reduce_scatter(mine, out).wait()
    dist.all_reduce(part)
    sent = part * (rank + 1)
    dist.broadcast(sent, 1)
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part + rank)
    crossed = torch.empty_like(out)
    dist.all_to_all_single(crossed, out * (rank + 1))
    mean = torch.full((2,), float(rank), device="simdev")
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.barrier()
    found = [out[0], out[-1], mine[0], part[0], sent[0], *(each[0] for each in parts)]
    return [float(each) for each in (*found, crossed[0], crossed[-1], mean[0])]


def reads_after_a_wait(rank):
    """The right program."""
    part, out = buffers(rank)
    gather(out, part).wait()
    out.add(1)


def reads_without_a_wait(rank):
    """The compute stream does not wait for the all-gather."""
    part, out = buffers(rank)
    work = gather(out, part)
    out.add(1)
    work.wait()


def writes_a_part_that_travels(rank):
    """An optimizer step changes the weights during the all-gather."""
    part, out = buffers(rank)
    work = gather(out, part)
    part.add_(1)
    work.wait()


def waits_on_another_stream(rank):
    """A wait applies only to the stream that is current at the wait."""
    part, out = buffers(rank)
    side = torch.simdev.Stream("simdev:0")
    with torch.simdev.stream(side):
        gather(out, part).wait()
    del side
    out.add(1)
    torch.simdev.synchronize()


def frees_before_a_wait(rank):
    """The storage is freed although the tensor is alive."""
    part, out = buffers(rank)
    work = gather(out, part)
    out.untyped_storage().resize_(0)
    work.wait()


def frees_after_a_wait(rank):
    """The right program, twice over the same memory."""
    part, out = buffers(rank)
    for _ in range(2):
        out.untyped_storage().resize_(out.nbytes)
        gather(out, part).wait()
        out.untyped_storage().resize_(0)


def drops_everything_at_once(rank):
    """A live work keeps its tensors; a dropped one records them on its stream."""
    part, out = buffers(rank)
    work = gather(out, part)
    del part, out
    torch.empty(2 * NUMEL, device="simdev")
    work.wait()
    gather(*buffers(rank)[::-1])


def host_goes_on(rank):
    """Whether the wait returns while the stream is stalled."""
    part, out = buffers(rank)
    torch.simdev.synchronize()
    with torch.simdev.stalled():
        work = gather(out, part)
        work.wait()
        return work.is_completed()


def collectives_in_order(rank):
    """Names and times of three collectives next to a kernel, in virtual time."""
    part, out = buffers(rank)
    torch.simdev.synchronize()
    torch.simdev.simulate(virtual=True, comm_us=100, kernel_us=300, log=True)
    works = [gather(out, part), reduce_scatter(part, out)]
    torch.ones(NUMEL, device="simdev").mul(2)
    for work in works:
        work.wait()
    torch.simdev.synchronize_all()
    rows = torch.simdev.timeline()
    return [(row.name, row.start - rows[0].start, row.stream > 1) for row in rows]


def refuses_the_hosts_tensors(rank):
    """Return the error for a tensor on the host."""
    with pytest.raises(RuntimeError) as told:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("simdev")).allreduce(
            [torch.ones(2)]
        )
    return str(told.value)


SCENES = (
    values_of_all_ranks,
    reads_after_a_wait,
    reads_without_a_wait,
    writes_a_part_that_travels,
    waits_on_another_stream,
    frees_before_a_wait,
    frees_after_a_wait,
    drops_everything_at_once,
    host_goes_on,
    collectives_in_order,
    refuses_the_hosts_tensors,
)


def all_scenes(rank):
    """Run all scenes; return results and races of each."""
    told = {}
    for scene in SCENES:
        torch.simdev.reset()
        value = scene(rank)
        told[scene.__name__] = value, torch.simdev.races()
    return told


@pytest.fixture(scope="module")
def scenes():
    """Results of both ranks."""
    return on_ranks(all_scenes)


def test_values_are_those_of_all_ranks(scenes):
    """All-gather, reduce-scatter, all-reduce, broadcast, gather lists, all-to-all and mean."""
    first, second = (told[values_of_all_ranks.__name__][0] for told in scenes)
    assert first == [1, 2, 2, 3, 6, 3, 4, 1, 2, 0.5]
    assert second == [1, 2, 4, 3, 6, 3, 4, 2, 4, 0.5]


@pytest.mark.parametrize(
    "scene",
    [values_of_all_ranks, reads_after_a_wait, frees_after_a_wait, drops_everything_at_once],
)
def test_right_programs_have_no_race(scenes, scene):
    assert [told[scene.__name__][1] for told in scenes] == [[], []]


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (reads_without_a_wait, "add.out on stream 0 reads .* without waiting for all_gather"),
        (writes_a_part_that_travels, "writes .* still read by all_gather"),
        (waits_on_another_stream, "add.out on stream 0 reads .* without waiting for all_gather"),
        (frees_before_a_wait, "freed .* is still written by all_gather"),
    ],
)
def test_races_on_buffers_are_reported(scenes, scene, words):
    """On both ranks, with the collective's name."""
    for told in scenes:
        assert any(re.search(words, race) for race in told[scene.__name__][1]), told[
            scene.__name__
        ][1]


def test_a_wait_is_not_the_hosts(scenes):
    """The wait returns before the device has begun."""
    assert [told[host_goes_on.__name__][0] for told in scenes] == [False, False]


def test_collectives_run_in_order_beside_kernels(scenes):
    """One after the other on the group's stream, while the current stream computes."""
    for told in scenes:
        rows = told[collectives_in_order.__name__][0]
        group = [(name, start) for name, start, is_group in rows if is_group]
        kernels = [start for _, start, is_group in rows if not is_group]
        assert group == [("all_gather", 0), ("reduce_scatter", 100)]
        assert min(kernels) < 100


def test_tensors_of_the_host_are_refused(scenes):
    """The error names the collective and gives advice."""
    text = scenes[0][refuses_the_hosts_tensors.__name__][0]
    assert "all_reduce of a group of the simulated device needs tensors of one of its" in text
    assert "cpu:gloo,simdev:simccl" in text


def leaves_one_rank_alone(rank):
    """Whether the host's wait returns before the device; the error and time at the timeout."""
    part, out = buffers(rank)
    if rank == 1:
        return None
    begin = time.monotonic()
    gather(out, part).wait()
    hangs = not torch.simdev.current_stream().query()
    with pytest.raises(RuntimeError) as told:
        torch.simdev.synchronize()
    return hangs, time.monotonic() - begin, str(told.value)


def test_a_missing_rank_hangs_the_device_until_the_timeout():
    """The host continues, and gets the error at its next wait."""
    hangs, ended, text = on_ranks(leaves_one_rank_alone, timeout_s=4)[0]
    assert hangs
    assert ended > 1
    assert "an operation on the device failed: all_gather: " in text

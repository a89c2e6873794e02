"""Sharded steps on devices whose host is far ahead: streams, threads, what runs beside a step.

On the CPU two ranks of a gloo group; on an accelerator as many of the backend of its kind as it
has devices, two at most. See `_devices` for how a wait that is missing is seen.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchparts_conformance import requirement
from torchparts_conformance.cases._devices import lag, no_races, synchronize
from torchparts_conformance.cases.flat_param._sharded import (
    most_ranks,
    place,
    whole_state,
)

WIDTH, UNITS, STEPS, ROWS = 64, 6, 3, 8
LEAST_SHARE = 20  # of a step's host time, the work that the device has still to do


def _plain(where):
    torch.manual_seed(1)
    units = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS))
    return nn.Sequential(*units).to(where)


def _sharded(part, where, **options):
    model = _plain(where)
    for unit in model:
        part.fully_shard(unit, **options)
    return part.fully_shard(model, **options)


def _batches(rank, count):
    given = torch.Generator().manual_seed(rank)
    return torch.randn(count, ROWS, WIDTH, generator=given)


def _expected(where, world_size, micro_batches):
    """State of the model after one process trained on the batches of all ranks."""
    model = _plain(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [_batches(rank, STEPS * micro_batches).to(where) for rank in range(world_size)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            for mine in data:
                batch = mine[step * micro_batches + micro]
                (model(batch).square().mean() / world_size).backward()
        optimizer.step()
    return whole_state(model)


def _distance(model, expected):
    found = whole_state(model)
    assert list(found) == list(expected)
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def _on(stream, where, run):
    """Run on a stream between what is before and after on the current one; None: on that."""
    if stream is None:
        run()
        return
    main = torch.accelerator.current_stream(where)
    stream.wait_stream(main)
    with stream:
        run()
    main.wait_stream(stream)


def _in_a_thread(where, run):
    """Run in a thread that ends, and raise here what it raises."""
    errors = []

    def work():
        try:
            if where.type != "cpu":
                torch.accelerator.set_device_index(where.index)
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _elsewhere(part, rank, world_size, kind, way):
    """How far training ends from one process's, its steps in another place than the sharding."""
    where, options = place(kind, rank)
    with no_races(kind):
        model, data = _sharded(part, where, **options), _batches(rank, STEPS).to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        beside = way.startswith("stream") and kind != "cpu"
        streams = [torch.Stream(where) for _ in range(2)] if beside else [None]
        lag(kind, kernel_us=20, comm_us=50)
        for step in range(STEPS):
            stream = streams[step % len(streams) if way == "streams" else 0]

            def run(batch=data[step]):
                model(batch).square().mean().backward()

            optimizer.zero_grad()
            if way == "thread":
                _in_a_thread(where, run)
            else:
                _on(stream, where, run)
            optimizer.step()
        return _distance(model, _expected(where, world_size, 1))


@requirement(
    "FP-234",
    level="MUST",
    text=(
        "Training MUST be that of one process where forward and backward run in another thread "
        "than the one that sharded the module, on another stream of the device, or on another "
        "one in each step."
    ),
    rationale=(
        "memory belongs to the stream it was made on: used on another, without a wait and with "
        "a host far ahead, gradients are silently wrong"
    ),
    since="0.1.0",
    profile="distributed",
)
@pytest.mark.parametrize("way", ["thread", "stream", "streams"])
def test_steps_elsewhere_than_the_module_was_sharded(part, device, ranks, way):
    """A thread for each step; a stream beside; one of two in turn."""
    for distance in ranks(most_ranks(device), _elsewhere, device, way):
        assert distance < 1e-6


def _far_ahead(part, rank, world_size, kind, way):
    """How far training ends from one process's, the device far behind."""
    where, options = place(kind, rank)
    micro_batches = 2 if way == "microbatches" else 1
    if way == "kept":
        options["reshard_after_forward"] = False
    with no_races(kind):
        model = _sharded(part, where, **options)
        data = _batches(rank, STEPS * micro_batches).to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lag(kind, kernel_us=20, comm_us=500)
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                is_last = micro + 1 == micro_batches
                with contextlib.nullcontext() if is_last else model.no_sync():
                    batch = data[step * micro_batches + micro]
                    model(batch).square().mean().backward()
            optimizer.step()
        return _distance(model, _expected(where, world_size, micro_batches))


@requirement(
    "FP-235",
    level="MUST",
    text=(
        "However far the host is ahead of the device, training MUST be that of one process with"
        " units that are gathered ahead of their use, in forward and in backward, with parts "
        "that stay whole after forward, and over microbatches of which the last one sums."
    ),
    rationale=(
        "gathers and sums run beside the step, and each of their waits that is missing is a "
        "race that shows on a slow day only"
    ),
    since="0.1.0",
    profile="distributed",
)
@pytest.mark.parametrize("way", ["freed", "kept", "microbatches"])
def test_steps_with_the_host_far_ahead(part, device, ranks, way):
    """Parts that are freed after forward or kept, and two microbatches."""
    for distance in ranks(most_ranks(device), _far_ahead, device, way):
        assert distance < 1e-6


def _busy(where, seconds):
    """Give the device that much to do, without waiting; an event at its end."""
    large = torch.full((1024, 1024), 1e-4, device=where)
    times = 1
    while True:
        torch.accelerator.synchronize(where)
        began = time.perf_counter()
        for _ in range(times):
            large = large @ large
        end = torch.Event(where)
        end.record(torch.accelerator.current_stream(where))
        if times >= 4096:
            return end
        torch.accelerator.synchronize(where)
        took = time.perf_counter() - began
        if took >= seconds or hasattr(torch.get_device_module(where.type), "simulate"):
            break
        times *= 2
    for _ in range(times):
        large = large @ large
    end = torch.Event(where)
    end.record(torch.accelerator.current_stream(where))
    return end


def _host_waits(part, rank, world_size, kind):
    """Whether the device has come to a step's beginning by the time the host is at its end."""
    where, options = place(kind, rank)
    model, data = _sharded(part, where, **options), _batches(rank, 1).to(where)
    for _ in range(3):
        synchronize(kind)
        model.zero_grad()
        began = time.perf_counter()
        model(data[0]).square().mean().backward()
        took = time.perf_counter() - began
    synchronize(kind)
    model.zero_grad()
    lag(kind, kernel_us=1000, comm_us=50)
    begins = _busy(where, LEAST_SHARE * took)
    model(data[0]).square().mean().backward()
    waited = begins.query()
    synchronize(kind)
    return waited


@requirement(
    "FP-236",
    level="SHOULD",
    text=(
        "Forward and backward of a steady step SHOULD NOT make the host wait for the device: "
        "neither to gather and sum, nor to hand out gradients, nor to compare ranks."
    ),
    rationale=(
        "a host that waits once a step cannot hide its own time behind the device, however "
        "short the wait"
    ),
    since="0.1.0",
    profile="distributed",
    devices=("accelerator",),
)
def test_host_does_not_wait_in_a_step(part, device, ranks):
    """Work that the device had before the step is still to be done after it."""
    assert not any(ranks(most_ranks(device), _host_waits, device))


class _Stop(Exception):
    """Raised in the middle of a backward."""


def _stop(grad):
    raise _Stop


def _held(work):
    """Torch's engine, and a thread that lets go of what a backward calls at its end later."""

    class Holds(type(torch.autograd.Variable._execution_engine)):
        def queue_callback(self, callback):
            work.append(callback)
            return super().queue_callback(callback)

    return patch.object(torch.autograd.Variable, "_execution_engine", Holds())


def _stops(loss):
    """Have the backward of a loss stopped, which can be run again then."""
    try:
        loss.backward(retain_graph=True)
    except _Stop:
        return
    raise AssertionError("the backward was not stopped")


def _inside(run):
    """Call something in a hook of another backward."""
    around = torch.ones(2, requires_grad=True) * 1
    around.register_hook(lambda grad: torch.enable_grad()(run)())
    around.sum().backward()


def _grads(model):
    grads = [p.grad for p in model.parameters()]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def _clear(model, optimizer, way):
    """Clear all gradients: of the module, of an optimizer, or one by one."""
    if way == "parameters":
        for param in model.parameters():
            param.grad = None
    else:
        (model if way == "module" else optimizer).zero_grad()


def _is_as_never_stopped(model, calm, data, way, clears, again, held):
    """Whether a step after a stop has the gradients of a module that was never stopped."""
    optimizer, hooked, work = torch.optim.SGD(model.parameters()), [], []
    model(data[0]).square().mean().backward()  # gradients of before
    handle = model[UNITS // 2].register_forward_hook(lambda *call: hooked.append(call[-1]))
    loss = model(data[1]).square().mean()
    stop = hooked[-1].register_hook(_stop)

    def goes_on():
        stop.remove()
        _clear(model, optimizer, clears)
        following = model(data[1]).square().mean() if again == "forward" else loss
        hooked[-1].register_hook(lambda grad: work.clear())
        following.backward()

    def both():
        _stops(loss)
        goes_on()

    with _held(work) if held else nullcontext():
        if way == "both inside another":
            _inside(both)
        elif way == "inside another":
            _inside(partial(_stops, loss))
            goes_on()
        else:
            both()
    handle.remove()
    calm(data[1]).square().mean().backward()
    found, expected = _grads(model), _grads(calm)
    if not expected or any(grad is None for grad in found):
        return False
    return all(map(torch.equal, found, expected))


def _after_a_stop(part, rank, world_size, kind):
    """The ways to stop, to clear and to go on of which a step has other gradients."""
    where, options = place(kind, rank)
    data, wrong = _batches(rank, 2).to(where), []
    for ways in itertools.product(
        ("alone", "inside another", "both inside another"),
        ("module", "optimizer", "parameters"),
        ("backward", "forward"),
        (False, True),
    ):
        way, clears, again, held = ways
        calls_module = clears == "module" or again == "forward"
        if held and (way == "both inside another" or not calls_module):
            continue
        model, calm = (_sharded(part, where, **options) for _ in "ab")
        if not _is_as_never_stopped(model, calm, data, *ways):
            wrong.append(list(ways))
    return wrong


@requirement(
    "FP-244",
    level="MUST",
    text=(
        "A backward that an exception has stopped MUST be over when `backward()` has raised, "
        "also inside another backward that goes on; and at the next call of the module outside "
        "of a backward, where torch's engine lets go of its work later. However gradients are "
        "cleared then, another backward of the same loss, or another step, MUST give the "
        "gradients of a module that was never stopped, bitwise."
    ),
    rationale=(
        "a thread of a device holds the work for a while: zero_grad() cleared gradients of "
        "memory that was about to go, and the next backward added to those of before"
    ),
    since="0.1.0",
    profile="distributed",
)
def test_step_after_a_backward_that_was_stopped_and_is_held(part, device, ranks):
    """The same loss again, or another forward; what was held is let go in the next backward."""
    assert ranks(most_ranks(device), _after_a_stop, device) == [[]] * most_ranks(device)

"""Reports beside other work: threads, other reports, and devices with clocks of their own."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases._devices import devices, lag, module_of, synchronize
from torchparts_conformance.cases.mod_tracker._models import MLP, leaf, step

REPORTS = 8
LIMIT_S = 60


class _Beside(threading.Thread):
    """Computes the same again and again, and notes what came out otherwise."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.x = MLP(device), leaf(device)
        self.expected = self.once()
        self.began, self.ends = threading.Semaphore(0), threading.Event()
        self.other, self.errors = 0, []

    def once(self):
        """Gradients, on the host."""
        self.x.grad = None
        self.model.zero_grad()
        step(self.model, self.x)
        return [t.grad.cpu() for t in (self.x, *self.model.parameters())]

    def run(self):
        while not self.ends.is_set():
            try:
                found = self.once()
                self.other += not all(map(torch.equal, found, self.expected))
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self.began.release()


def _beside_reports(part, rank, world_size, name, device):
    """What a thread noted while as many reports began and ended."""
    model, beside = MLP(device), _Beside(device)
    beside.start()
    try:
        for _ in range(REPORTS):
            assert beside.began.acquire(timeout=LIMIT_S)
            with getattr(part, name)(model):
                step(model, leaf(device))
    finally:
        beside.ends.set()
        beside.join()
    return beside.other, beside.errors[:1]


@requirement(
    "MT-430",
    level="MUST",
    text=(
        "A thread that computes while reports of memory begin and end MUST get what it gets "
        "without them: the same values and gradients, and no error."
    ),
    rationale="a loader or an evaluation beside training is nobody's to stop for a measurement",
    since="0.1.0",
    profile="reports",
    group="watching",
)
@pytest.mark.parametrize("name", ["profile_memory", "watch_memory"])
def test_thread_that_computes_beside_reports_of_memory(part, device, ranks, name):
    """In a process of its own, which may crash."""
    assert hasattr(part, name) or getattr(part, name)
    assert ranks(1, _beside_reports, name, device) == [[0, []]]


@requirement(
    "MT-432",
    level="MUST",
    text=(
        "A thread that computes while reports of FLOPs begin and end MUST get what it gets "
        "without them: the same values and gradients, and no error."
    ),
    rationale=(
        "reproduced: an operator that another thread was about to call lay in memory that the "
        "end of a report had freed"
    ),
    since="0.1.0",
    profile="reports",
    group="counting",
)
def test_thread_that_computes_beside_reports_of_flops(part, device, ranks):
    """In a process of its own, which may crash."""
    assert part.profile_flops
    assert ranks(1, _beside_reports, "profile_flops", device) == [[0, []]]


def _last_of(part, rank, world_size, names, device):
    """What the last of these reports tells that end in the order in which they began."""
    model, x = MLP(device), leaf(device)
    step(model, x)
    begun = [getattr(part, name)() for name in names]
    reports = [context.__enter__() for context in begun]
    step(model, x)
    for context in begun[:-1]:
        context.__exit__(None, None, None)
    step(model, x)
    begun[-1].__exit__(None, None, None)
    return reports[-1].total


@requirement(
    "MT-433",
    level="MUST",
    text=(
        "Reports may begin and end in any order: one that ends before another that began later "
        "MUST leave what that one tells as it is without it."
    ),
    rationale=(
        "reproduced: the first of two reports took the second's contexts with it, and the "
        "second told half of the operations"
    ),
    since="0.1.0",
    profile="reports",
    group="splitting",
)
@pytest.mark.parametrize("first", ["profile_flops", "profile_memory", "watch_memory"])
@pytest.mark.parametrize("second", ["profile_flops", "profile_memory"])
def test_report_goes_on_after_one_that_began_before(part, device, ranks, first, second):
    """A step while both are open and one more, as under it alone; in processes that may crash."""
    assert getattr(part, first)
    (alone,) = ranks(1, _last_of, (second,), device)
    assert ranks(1, _last_of, (first, second), device) == [alone]
    assert alone > 0


def _layers(where, width):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(10)]).to(where)


@requirement(
    "MT-431",
    level="MUST",
    text=(
        'With `clock="device"` the time of a module MUST be what its device takes for it, by '
        "the clock of that device whichever is current, however far the host is ahead; where "
        "there is no such device it MUST be an error."
    ),
    rationale=(
        "the host's clock tells how long it takes to ask for work; reproduced on two devices: "
        "the current one's time was told of both"
    ),
    since="0.1.0",
    profile="reports",
    group="time",
)
def test_time_of_a_module_is_its_devices(part, device):
    """Of the second device too, which is not the current one; events around the calls tell it."""
    with pytest.raises(ValueError, match="abacus"), part.profile_time(clock="abacus"):
        pass
    if device == "cpu":
        return
    width = 64 if hasattr(module_of(device), "simulate") else 2048
    places = devices(device)
    models = nn.ModuleList(_layers(where, width) for where in places)
    inputs = [torch.ones(width, width, device=where) for where in places]
    for model, x in zip(models, inputs, strict=True):
        model(x)
    synchronize(device)
    lag(device)
    events = []
    with part.profile_time(models, clock="device") as report:
        for where, model, x in zip(places, models, inputs, strict=True):
            stream = torch.accelerator.current_stream(where)
            begin, end = (torch.Event(where, enable_timing=True) for _ in "ab")
            begin.record(stream)
            model(x)
            end.record(stream)
            events.append((begin, end))
    for number, (begin, end) in enumerate(events):
        around_ns = begin.elapsed_time(end) * 1e6
        assert 0.5 * around_ns <= report[f"ModuleList.{number}"].forward <= 1.01 * around_ns

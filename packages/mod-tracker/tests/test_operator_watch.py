"""Operators that are watched where they run."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from mod_tracker import _torch_compat, profile_flops
from mod_tracker.reports import _operator_watch
from mod_tracker.reports._operator_watch import Watch, watch

MM = torch.ops.aten.mm.default


class Log:
    """Writes down what it is told."""

    def __init__(self):
        self.seen, self.stand_ins = [], 0

    def shortcut(self, operator, place):
        return place.told

    def begins(self, operator, args, kwargs):
        return operator

    def ends(self, begun, operator, args, kwargs, out):
        self.seen.append((operator, out.shape))

    def stood_in(self):
        self.stand_ins += 1


def has_kernel():
    """Whether somebody is registered."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect")


def test_several_watch_one_operator():
    """Each hears of it as long as it watches; with the last one nothing is left."""
    first, second, x = Log(), Log(), torch.ones(2, 2)
    end_first, end_second = watch([MM], first), watch([MM], second)
    x @ x
    end_first()
    x @ x
    end_first()
    assert has_kernel()
    end_second()
    x @ x
    assert (len(first.seen), len(second.seen)) == (1, 2)
    assert not has_kernel()


def test_what_an_operator_does_inside_is_not_seen_again():
    """An operator that is watched is one, whatever it has torch do."""

    @torch.library.custom_op("mod_tracker_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, x), x)

    operator = torch.ops.mod_tracker_tests.twice
    with profile_flops(formulas={operator: lambda shape, *, out_shape: 7}) as report:
        twice(torch.ones(2, 2))
    assert report.by_operator == {"mod_tracker_tests.twice.default": 7}


def test_stand_ins_are_told_of_and_not_counted():
    """Their results are remembered, so some of them would be missing."""
    log, end = Log(), None
    with FakeTensorMode():
        x = torch.ones(2, 2)
        end = watch([MM], log)
        x @ x
        end()
    assert (log.seen, log.stand_ins) == ([], 1)


def test_stand_ins_are_told_of_wherever_they_are_among_the_arguments():
    """Here after a number."""
    log, power = Log(), torch.ops.aten.pow.Scalar
    with FakeTensorMode():
        end = watch([power], log)
        power(2, torch.ones(2, 2))
        end()
    assert (log.seen, log.stand_ins) == ([], 1)


def test_products_of_stand_ins_in_late_steps_are_reported_missing(mlp):
    """And with `every_step` they are there."""
    x = torch.randn(2, 4)

    def run(**options):
        with profile_flops(**options) as report:
            for _ in range(6):
                mlp(x).sum().backward()
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                mlp(fake.from_tensor(x))
        return report

    assert "may be missing" in run().notes[-1]


def test_report_counts_with_a_mode_where_watching_is_not_possible(monkeypatch, mlp):
    """The same numbers, at its price."""
    totals = []
    for possible in (True, False):
        monkeypatch.setattr(_operator_watch, "can_intercept", lambda possible=possible: possible)
        with profile_flops() as report:
            for _ in range(6):
                mlp(torch.randn(2, 4)).sum().backward()
            assert has_kernel() is possible
        totals.append((report.total, report.by_operator))
        assert report.notes == () or possible
    assert totals[0] == totals[1]


def test_operator_that_cannot_be_intercepted_is_left_alone(monkeypatch):
    """All of them are then."""
    monkeypatch.setattr(_operator_watch, "intercept", lambda *_: None)
    assert watch([MM], Log()) is None
    assert not any(place.undo for place in _operator_watch._places.values())


def test_operator_with_a_kernel_there_cannot_be_intercepted():
    """Its place is taken."""
    factory = torch.ops.aten.empty.memory_format
    assert _torch_compat.intercept(factory, lambda run, below: run) is None


def test_watch_that_was_interrupted_as_it_was_made_ends_like_any_other(monkeypatch):
    """Its last reference ends it, with nothing to end; nor is there a place for all it took."""
    Watch.__new__(Watch)()
    monkeypatch.setattr(_operator_watch, "_take", interrupted)
    watching = Watch(Log())
    with pytest.raises(KeyboardInterrupt):
        watching.take(torch.ops.aten.vdot.default)
    watching()


def interrupted(operator, watcher):
    """Nothing was done yet."""
    raise KeyboardInterrupt


def test_overloads_for_numbers_are_left_out():
    """TorchScript has some for every packet; the others are watched."""
    formulas = {torch.ops.aten.tanh: lambda shape, *, out_shape: 10 * shape.numel()}
    with profile_flops(formulas=formulas) as report:
        for _ in range(7):
            nn.Tanh()(torch.ones(3))
    assert report.total == 7 * 30


def test_watching_changes_no_bit(mlp):
    """Of the gradients of convolutions, products and attention."""
    found = []
    for measure in (lambda: torch.enable_grad(), profile_flops):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.Linear(6, 6), nn.LayerNorm(6))
        attend = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)
        with measure():
            for _ in range(6):
                attend(model(torch.randn(2, 4, 6))).square().sum().backward()
        found.append([p.grad for p in (*model.parameters(), *attend.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("inside", [False, True])
def test_other_threads_are_not_counted(mlp, inside):
    """As with a mode: what another thread runs beside is not this thread's."""
    x = torch.ones(2, 4)
    with profile_flops() as report:
        if inside:
            mlp(x)
        thread = threading.Thread(target=lambda: x @ x.T)
        thread.start()
        thread.join()
    assert report.total == (128 if inside else 0)


class Beside(threading.Thread):
    """Multiplies again and again, as long as it is in its `with`."""

    def __init__(self):
        super().__init__()
        self.times, self.errors, self.ends = 0, [], False

    def run(self):
        x = torch.ones(2, 2)
        while not self.ends:
            try:
                torch.mm(x, x)
            except RuntimeError as error:
                self.errors.append(error)
            self.times += 1

    def __enter__(self):
        self.start()
        self.turns()
        return self

    def __exit__(self, *_):
        self.ends = True
        self.join()

    def turns(self):
        """Wait until it has been through, twice."""
        until = self.times + 2
        while self.times < until:
            time.sleep(0.001)


@pytest.fixture
def beside(monkeypatch):
    """It alone is waited for, however late the machine lets it run, and waits as long itself."""
    _operator_watch.thread_here()
    monkeypatch.setattr(_operator_watch, "_threads", weakref.WeakSet())
    for limit in ("PATIENCE_S", "LIMIT_S"):
        monkeypatch.setattr(_operator_watch, limit, 60)
    with Beside() as made:
        yield made


def test_other_threads_wait_while_operators_are_unregistered(beside):
    """Those that have run one stand in our kernel then, and have looked up what they call."""
    end = watch([MM], Log())
    beside.turns()
    place = _operator_watch._places[MM]
    undo, stood = place.undo, []

    def counted():
        stood.append(beside.times)
        time.sleep(0.05)
        stood.append(beside.times)
        undo()

    place.undo = counted
    end()
    assert stood[0] == stood[1]
    beside.turns()
    assert beside.errors == []
    assert not has_kernel()


def test_no_thread_meets_an_error_where_many_reports_end(beside):
    """Without the wait a few in a thousand ends are met by one."""
    for _ in range(200):
        end = watch([MM], Log())
        beside.turns()
        end()
    assert beside.errors == []


def test_a_thread_that_rests_is_waited_for_no_longer_than_it_takes(monkeypatch):
    """It has run an operator that was watched, and runs none any more."""
    monkeypatch.setattr(_operator_watch, "PATIENCE_S", 0.001)
    ran, rests = threading.Event(), threading.Event()

    def run():
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        ran.set()
        rests.wait()

    end, thread = watch([MM], Log()), threading.Thread(target=run)
    thread.start()
    try:
        assert ran.wait(60)
        end()
        assert not has_kernel()
    finally:
        rests.set()
        thread.join()


def test_a_thread_that_nobody_lets_go_on_goes_on_itself(monkeypatch):
    """As where a process was forked by one thread while another ended a report."""
    gate = _operator_watch._Gate()
    gate._owner = 0  # nobody's
    monkeypatch.setattr(_operator_watch, "LIMIT_S", 0.01)
    gate.wait()
    assert gate._owner is None


def test_whoever_ends_a_report_may_compute_meanwhile():
    """As a finalizer does that comes then."""
    with _operator_watch._gate.closed():
        _operator_watch._gate.wait()


def test_two_threads_watch_one_operator(monkeypatch, meanwhile):
    """It is registered once, and not any more when both have ended."""
    ends = []
    register = meanwhile.at(_operator_watch.intercept, lambda: ends.append(watch([MM], Log())))
    monkeypatch.setattr(_operator_watch, "intercept", register)
    ends.append(watch([MM], Log()))
    meanwhile.ends()
    for end in ends:
        end()
    assert not has_kernel()

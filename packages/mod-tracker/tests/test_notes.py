"""Operators of known amounts, noted where they run and added up later."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mod_tracker import ModTracker, profile_flops
from mod_tracker.reports import _flops, _notes, _operator_watch
from mod_tracker.reports._flop_counter import FlopCounter


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_what_is_noted_is_added_to_where_it_ran(monkeypatch, checkpointed, x, most):
    """However many are added up at once: each step adds what the first has, which notes nothing."""
    model, steps = checkpointed(use_reentrant=False), 6
    weight = torch.ones(4, 4, requires_grad=True)

    def step():
        (model(x @ weight) @ weight).sum().backward(retain_graph=True)
        with torch.no_grad():
            model(x)

    def amounts(report):
        by_stack = report._stacks["total"]
        return {(at, phase): n for at, found in by_stack.items() for phase, n in found.items()}

    monkeypatch.setattr(_notes, "MOST_NOTED", most)
    with profile_flops() as report:
        step()
    one = amounts(report)
    with profile_flops() as report:
        for _ in range(steps):
            step()
    assert amounts(report) == {place: steps * amount for place, amount in one.items()}
    assert report.total == sum(amounts(report).values())
    phases = [*("forward", "recompute", "backward", "outside")]
    assert sorted({phase for _, phase in one}) == sorted(phases)


def test_what_is_noted_of_a_backward_is_added_before_its_calls_are_forgotten(monkeypatch, x):
    """The record of calls is full before anything else adds it up."""

    @contextmanager
    def tracking():
        with ModTracker(history=8) as tracker:
            yield tracker

    monkeypatch.setattr(_flops, "tracking", tracking)
    layer, other = nn.Linear(4, 4, bias=False), nn.Tanh()
    with profile_flops() as report:
        for _ in range(40):  # so many that the steps below are not looked at
            other(x)
        for _ in range(7):
            layer(x).sum().backward()
        for _ in range(20):
            other(x)
    assert report["Linear"].backward == 7 * 2 * 64
    assert report.outside.backward == 0


def test_operators_in_a_hook_of_a_module_are_of_that_module(x):
    """Also where their shapes are known: a hook runs in backward, and no node of the module."""
    layer = nn.Linear(4, 4, bias=False)
    layer.register_full_backward_pre_hook(lambda module, grads: (grads[0] @ torch.eye(4),))
    with profile_flops() as report:
        for _ in range(3):
            layer(x).sum().backward()
    with FlopCounterMode(display=False) as torchs:
        for _ in range(3):
            layer(x).sum().backward()
    assert report.total == torchs.get_total_flops()


def test_thread_that_is_counted_alone_notes(x):
    """Another one that runs the same modules is not counted, though their shapes are known."""
    layer = nn.Linear(4, 4, bias=False)
    with profile_flops() as report:
        for _ in range(2):
            layer(x)
        thread = threading.Thread(target=lambda: [layer(x) for _ in range(3)])
        thread.start()
        thread.join()
    assert report.total == 2 * 64


@pytest.fixture
def told(monkeypatch):
    """Operators that a counter was told of, in place of noting them."""
    found, begins = [], FlopCounter.begins

    def seen(self, operator, args, kwargs):
        found.append(operator)
        return begins(self, operator, args, kwargs)

    monkeypatch.setattr(FlopCounter, "begins", seen)
    return found


def test_known_operators_are_noted_and_nobody_is_told(told, mlp, x):
    """In forward and in backward; before that, each is told of once."""
    with profile_flops() as report:
        for _ in range(3):
            mlp(x).sum().backward()
            told_of = len(told)
        for _ in range(5):
            mlp(x).sum().backward()
    assert len(told) == told_of
    with FlopCounterMode(display=False) as torchs:
        for _ in range(8):
            mlp(x).sum().backward()
    assert report.total == torchs.get_total_flops()


def test_reports_that_share_an_operator_are_told_of_it(told, mlp, x):
    """The shortcut is the first one's: while another watches, both count, and afterwards too."""
    with profile_flops() as first:
        for _ in range(5):  # after which no mode is on, so that the second watches as well
            mlp(x).sum().backward()
        with profile_flops() as second:
            for _ in range(3):
                mlp(x).sum().backward()
        mlp(x).sum().backward()
    with FlopCounterMode(display=False) as torchs:
        mlp(x).sum().backward()
    one = torchs.get_total_flops()
    assert (first.total, second.total) == (9 * one, 3 * one)


def test_tensors_without_data_are_never_noted(x):
    """Though another of the same shape was; see Rule 2."""
    weight, fake = torch.ones(4, 4), FakeTensorMode(allow_non_fake_inputs=True)
    mm, meta = torch.ops.aten.mm.default, torch.ones(4, 4, device="meta")
    with profile_flops() as report:
        nn.Linear(4, 4, bias=False)(x)
        for _ in range(2):
            x @ weight
            meta @ meta
        with fake:
            fake.from_tensor(x) @ weight
        noted = {str(keys) for keys in _operator_watch._places[mm].dense.values()}
    assert noted == {"DispatchKeySet(CPU)"}
    assert report.outside.forward == 2 * 16 * (2 * len(x) + 2 * 4 + len(x))

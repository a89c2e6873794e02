"""A KeyboardInterrupt in the middle of a step leaves nothing behind."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mod_tracker import (
    ModTracker,
    ReportSchedule,
    _tracker,
    profile_flops,
    profile_memory,
    profile_time,
    trace,
    watch_memory,
)
from mod_tracker.reports import _mode


def step(model, x):
    """Run one step and return every gradient."""
    model.zero_grad()
    model(x).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def scheduled():
    """Run one measured step of a schedule."""
    return ReportSchedule(profile_time, every_n_steps=1, on_report=lambda *_: None).step()


SITUATIONS = {
    "tracker": ModTracker,
    **{
        kind.__name__: kind
        for kind in (profile_flops, profile_time, profile_memory, trace, watch_memory)
    },
    "scheduled": scheduled,
    "ranges": functools.partial(trace, ranges="record_function"),
}


class Interrupted(nn.Module):
    """Raises in forward, in recompute, or in backward."""

    def __init__(self, model, where):
        super().__init__()
        self.model, self.where, self.runs = model, where, 0
        model.m.register_forward_hook(self._ran)

    def _ran(self, module, args, output):
        self.runs += 1
        if self.runs == {"forward": 1, "recompute": 2}.get(self.where):
            raise KeyboardInterrupt
        if self.where == "backward" and output.requires_grad:
            output.register_hook(self._goes_back)

    def _goes_back(self, grad):
        raise KeyboardInterrupt

    def forward(self, x):
        return self.model(x)


@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_is_left_after_an_interrupt(name, where, checkpointed):
    """Class, hooks and modes are restored, and the next step equals the plain one."""
    x = torch.randn(2, 4, requires_grad=True)
    torch.manual_seed(0)
    expected = step(checkpointed(use_reentrant=True), x)
    torch.manual_seed(0)
    model = checkpointed(use_reentrant=True)
    stopped, original = Interrupted(model, where), nn.Module.__call__
    with pytest.raises(KeyboardInterrupt), SITUATIONS[name]():
        step(stopped, x)
    assert nn.Module.__call__ is original
    assert _get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model.m._forward_hooks.clear()
    for old, new in zip(expected, step(model, x), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_tracker_continues_after_an_interrupt(where, checkpointed):
    """The tracker stays entered, is outside all modules, and sees all of the next step."""
    model, x = checkpointed(use_reentrant=True), torch.randn(2, 4, requires_grad=True)
    tracker, log = ModTracker(model), []
    tracker.register_user_hooks(
        pre_fw_hook=lambda *_: log.append(tracker.stack),
        post_bw_hook=lambda *_: log.append((tracker.current, tracker.phase)),
    )
    with tracker:
        step(model, x)
        expected = list(log)
        with pytest.raises(KeyboardInterrupt):
            step(Interrupted(model, where), x)
        assert (tracker.stack, tracker.phase) == ((), "outside")
        model.m._forward_hooks.clear()
        log.clear()
        step(model, x)
    assert log == expected


@pytest.mark.parametrize("name", ["add_recompute_callback", "remove_recompute_callback"])
@pytest.mark.parametrize("is_after", [False, True])
def test_tracker_is_left_after_an_interrupt_in_its_own_code(name, is_after, monkeypatch):
    """Ctrl-C may come while a tracker is entered or left, before or after a statement."""
    original, interrupts = getattr(_tracker, name), [KeyboardInterrupt]

    def interrupted(callback):
        if is_after or not interrupts:
            original(callback)
        for error in [interrupts.pop()] if interrupts else []:
            raise error

    call = nn.Module.__call__
    monkeypatch.setattr(_tracker, name, interrupted)
    tracker = ModTracker()
    with pytest.raises(KeyboardInterrupt), tracker:
        pass
    assert nn.Module.__call__ is call
    assert not hasattr(torch.autograd.graph, "recompute_callbacks")
    with tracker:
        assert nn.Module.__call__ is not call
    assert nn.Module.__call__ is call


def test_deleted_tracker_stops_tracking():
    """An interrupt before `__exit__` leaves a tracker entered."""
    call, tracker = nn.Module.__call__, ModTracker()
    tracker.__enter__()
    assert nn.Module.__call__ is not call
    del tracker
    assert nn.Module.__call__ is call


def test_mode_of_a_report_is_off_after_an_interrupt_in_its_exit(monkeypatch):
    """Ctrl-C may come while modes are left."""
    original, interrupts = _mode.leave_mode, [KeyboardInterrupt]

    def interrupted(mode):
        for error in [interrupts.pop()] if interrupts else []:
            raise error
        original(mode)

    monkeypatch.setattr(_mode, "leave_mode", interrupted)
    with pytest.raises(KeyboardInterrupt), profile_flops():
        pass
    assert _get_current_dispatch_mode() is None

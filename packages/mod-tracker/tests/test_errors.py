"""Every error this package raises, by its text; nothing changes when it is raised."""

from __future__ import annotations

import builtins
import inspect

import pytest
import torch
from torch import nn

import mod_tracker
from mod_tracker import (
    HookSlotError,
    MissingExtraError,
    ModTracker,
    ModTrackerError,
    OptionError,
    StateError,
    profile_flops,
    profile_time,
    trace,
)


def test_every_error_has_the_base_class_and_a_builtin_one():
    """Leaves are also ValueError or RuntimeError."""
    found = [
        e for e in vars(mod_tracker).values() if inspect.isclass(e) and issubclass(e, Exception)
    ]
    for error in found:
        assert issubclass(error, ModTrackerError)
        assert error is ModTrackerError or issubclass(error, (ValueError, RuntimeError))


def test_taken_hook_slot():
    """The sentence is torch's; no hook of the call is registered."""
    tracker, calls = ModTracker(), []
    tracker.register_user_hooks(post_fw_hook=lambda *_: calls.append("old"))
    with pytest.raises(HookSlotError, match="Only one post_fw_hook can be registered at a time"):
        tracker.register_user_hooks(
            pre_fw_hook=lambda *_: calls.append("new"), post_fw_hook=lambda *_: None
        )
    with tracker:
        nn.ReLU()(torch.ones(1))
    assert calls == ["old"]


def test_unknown_clock():
    """A clock is the host's or a device's."""
    with pytest.raises(OptionError, match=r"clock 'sun' cannot be read"), profile_time(clock="sun"):
        pass


@pytest.mark.parametrize("ranges", ["nvtx", "xyz"])
def test_ranges_that_cannot_be_emitted(ranges, monkeypatch):
    """NVTX needs a device; anything else does not exist."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"mod_tracker.trace: ranges"), trace(ranges=ranges):
        pass


def test_report_read_too_early():
    """A report is complete when its block ends."""
    with (
        profile_flops() as report,
        pytest.raises(StateError, match=r"the report is empty, but it is read"),
    ):
        report.table()


def test_unknown_column():
    """The columns there are, are named."""
    with profile_flops() as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(OptionError, match=r"column 'colour' is unknown"):
        report.top(1, by="colour")


def test_difference_of_unlike_reports():
    """FLOPs less nanoseconds is nothing."""
    with profile_flops() as flops, profile_time() as times:
        nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(OptionError, match=r"the other report is a TimeReport"):
        flops.diff(times)


def test_rich_output_without_rich(monkeypatch):
    """The extra is named."""
    with profile_flops() as report:
        nn.Linear(2, 2)(torch.ones(1, 2))
    real = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    with pytest.raises(MissingExtraError, match=r"Install mod-tracker\[rich\]"):
        report.__rich__()

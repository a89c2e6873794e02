"""Several trackers, and hooks of their users, where the source is wrong."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import (
    events_of,
    leaf,
    linear,
)


def _global_hooks():
    module = nn.modules.module
    return len(module._global_forward_hooks), len(module._global_forward_pre_hooks)


def _restore(call):
    nn.Module.__call__ = call
    nn.modules.module._global_forward_hooks.clear()
    nn.modules.module._global_forward_pre_hooks.clear()


@requirement(
    "MT-116",
    level="MUST",
    text="A tracker entered twice MUST call each hook once, and leave no global hook behind.",
    rationale="reproduced on torch 2.13: hooks fire twice and one pair leaks",
    since="0.1.0",
    profile="robust",
    group="telling",
)
def test_tracker_entered_twice(part, device):
    """Each hook once, and nothing is left."""
    call, formatter = nn.Module.__call__, warnings.formatwarning
    tracker = part.ModTracker()
    events = events_of(tracker)
    try:
        with tracker:
            with tracker:
                linear(device)(leaf(device))
            nn.Identity()(leaf(device))
        left = (nn.Module.__call__ is call, _global_hooks())
    finally:
        warnings.formatwarning = formatter
        _restore(call)
    assert events == ["+fw Linear", "-fw Linear", "+fw Identity", "-fw Identity"]
    assert left == (True, (0, 0))


@requirement(
    "MT-137",
    level="MUST",
    text="Trackers that overlap MUST be independent, and MUST leave in any order without a trace.",
    rationale="tools are combined",
    since="0.1.0",
    profile="robust",
    group="telling",
)
def test_overlapping_trackers(part, device):
    """The first may leave first."""
    call = nn.Module.__call__
    first, second = part.ModTracker(), part.ModTracker()
    counts = Counter()
    first.register_user_hooks(pre_fw_hook=lambda *_: counts.update("1"))
    second.register_user_hooks(pre_fw_hook=lambda *_: counts.update("2"))
    try:
        model, x = linear(device), leaf(device)
        first.__enter__()
        second.__enter__()
        model(x)
        first.__exit__(None, None, None)
        model(x)
        second.__exit__(None, None, None)
        model(x)
        left = (nn.Module.__call__ is call, _global_hooks())
    finally:
        _restore(call)
    assert counts == {"1": 1, "2": 2}
    assert left == (True, (0, 0))


@requirement(
    "MT-123",
    level="MUST",
    text="Hooks of different kinds registered one after the other MUST all be called.",
    rationale="reproduced on torch 2.13: the second registration drops the first hook",
    since="0.1.0",
    profile="robust",
    group="telling",
)
def test_hooks_registered_one_by_one(part, device):
    """Both are called."""
    tracker, kinds = part.ModTracker(), []
    tracker.register_user_hooks(pre_fw_hook=lambda *_: kinds.append("pre"))
    tracker.register_user_hooks(post_fw_hook=lambda *_: kinds.append("post"))
    with tracker:
        linear(device)(leaf(device))
    assert kinds == ["pre", "post"]


@requirement(
    "MT-126",
    level="MUST",
    text="A registration that is refused MUST register nothing.",
    rationale="reproduced on torch 2.13: kinds before the refused one are kept",
    since="0.1.0",
    profile="robust",
    group="telling",
)
def test_refused_registration_registers_nothing(part, device):
    """All or nothing."""
    tracker, kinds = part.ModTracker(), []
    tracker.register_user_hooks(post_fw_hook=lambda *_: kinds.append("old"))
    with pytest.raises(AssertionError):
        tracker.register_user_hooks(
            pre_fw_hook=lambda *_: kinds.append("new"), post_fw_hook=lambda *_: None
        )
    with tracker:
        linear(device)(leaf(device))
    assert kinds == ["old"]


@requirement(
    "MT-135",
    level="MUST",
    text="`clear_user_hooks` MUST end all calls, and allow a new registration.",
    rationale="SACEstimator forgets to clear, and fails when used twice",
    since="0.1.0",
    profile="robust",
    group="telling",
)
def test_cleared_hooks(part, device):
    """Cleared hooks are silent, and their places are free."""
    tracker, kinds = part.ModTracker(), []
    tracker.register_user_hooks(pre_fw_hook=lambda *_: kinds.append("old"))
    tracker.clear_user_hooks()
    tracker.register_user_hooks(post_fw_hook=lambda *_: kinds.append("new"))
    with tracker:
        linear(device)(leaf(device))
    assert kinds == ["new"]


@requirement(
    "MT-140",
    level="MUST",
    text=(
        "Several trackers MUST each see every call once while they are entered, in whatever "
        "order they are entered, left and entered again, and the class MUST be as before in the"
        " end."
    ),
    rationale="reproduced: a tracker entered again below another one went round in a ring",
    since="0.1.0",
    profile="robust",
    group="telling",
)
def test_trackers_in_any_order(part, device):
    """The first is entered again while the second is around its old place."""
    original, module, x = nn.Module.__call__, nn.ReLU(), torch.ones(1, device=device)
    trackers, seen = [part.ModTracker() for _ in range(2)], []
    for number, tracker in enumerate(trackers):
        tracker.register_user_hooks(pre_fw_hook=lambda *_, number=number: seen.append(number))
    try:
        for number, enter, active in (
            *((0, True, [0]), (1, True, [0, 1]), (0, False, [1])),
            *((0, True, [0, 1]), (1, False, [0]), (0, False, [])),
        ):
            if enter:
                trackers[number].__enter__()
            else:
                trackers[number].__exit__(None, None, None)
            seen.clear()
            module(x)
            assert sorted(seen) == active
        assert nn.Module.__call__ is original
    finally:
        nn.Module.__call__ = original

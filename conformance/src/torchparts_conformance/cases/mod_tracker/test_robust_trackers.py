"""Several trackers and user hooks: cases that torch 2.13 fails."""

from __future__ import annotations

import warnings
from collections import Counter

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
    "A tracker entered twice MUST call each hook once, and MUST leave no global hook behind.",
    rationale="reproduced on torch 2.13: hooks fire twice and one pair leaks",
)
def test_tracker_entered_twice(part, device):
    """Each hook is called once, and no global hook is left."""
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
    "Overlapping trackers MUST be independent, and MUST be removed completely in any order.",
    rationale="users combine tools",
)
def test_overlapping_trackers(part, device):
    """The first tracker may be left first."""
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

"""Calls with events: errors propagate, and the next call is unaffected."""

from __future__ import annotations

import pytest
from torch import nn

from mod_tracker import ModTracker


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.error = error

    def forward(self, x):
        y = self.a(x)
        if self.error is not None:
            raise self.error
        return y


def test_foreign_hook_that_raises_is_the_only_error(mlp, x):
    """The exception of another global hook propagates unchanged and without a warning."""

    def bad(module, args):
        raise ZeroDivisionError

    handle = nn.modules.module.register_module_forward_pre_hook(bad)
    try:
        with ModTracker() as tracker:
            with pytest.raises(ZeroDivisionError):
                mlp(x)
            assert tracker.parents == {"Global"}
    finally:
        handle.remove()


def listening(tracker, heard, **filters):
    """Subscribe to entries, and to exits with their outputs."""
    return tracker.subscribe(
        pre_forward=lambda call, args, kwargs: heard.append(("+", call.name)),
        post_forward=lambda call, args, kwargs, output: heard.append(("-", call.name, output)),
        **filters,
    )


def fail(*_):
    """A hook that raises."""
    raise ZeroDivisionError


def test_listener_gets_the_exit_if_a_hook_stops_the_call(x):
    """A drop-in hook raises after the listener's entry: the call failed, so its output is None."""
    tracker, heard, called = ModTracker(), [], []
    listening(tracker, heard)
    tracker.register_user_hooks(pre_fw_hook=fail, post_fw_hook=lambda *_: called.append(1))
    with tracker, pytest.raises(ZeroDivisionError):
        nn.ReLU()(x)
    assert heard == [("+", "ReLU"), ("-", "ReLU", None)]
    assert called == []


def test_listeners_entered_before_an_interrupt_get_their_exit(x):
    tracker, heard = ModTracker(), []

    def told(name, fails=False):
        def entry(call, args, kwargs):
            heard.append(f"+{name}")
            if fails:
                raise KeyboardInterrupt

        def left(call, args, kwargs, output):
            heard.append(f"-{name}")

        return {"pre_forward": entry, "post_forward": left}

    with tracker.subscribe(post_forward=lambda *_: heard.append("-exits alone")):
        for name in ("first", "second"):
            tracker.subscribe(**told(name))
        tracker.subscribe(pre_forward=lambda *_: heard.append("+entries alone"))
        tracker.subscribe(**told("stops", fails=True))
        tracker.subscribe(**told("late"))
        with tracker, pytest.raises(KeyboardInterrupt):
            nn.ReLU()(x)
    entries = ["+first", "+second", "+entries alone", "+stops"]
    assert heard == [*entries, "-exits alone", "-first", "-second"]


def test_failed_call_has_an_exit_without_output(x):
    tracker, heard, outputs = ModTracker(), [], []
    listening(tracker, heard, exclude="*.a")
    tracker.register_user_hooks(post_fw_hook=lambda module, args, output: outputs.append(output))
    with tracker, pytest.raises(ValueError, match="once"):
        nn.Sequential(Failing(ValueError("once")))(x)
    exits = [entry for entry in heard if entry[0] == "-"]
    assert exits == [("-", "Sequential.0", None), ("-", "Sequential", None)]
    assert [output is None for output in outputs] == [False, True, True]


def test_events_of_a_call_come_in_one_order(x):
    tracker, order = ModTracker(), []
    tracker.register_user_hooks(
        pre_fw_hook=lambda *_: order.append("pre hook"),
        post_fw_hook=lambda *_: order.append("post hook"),
    )
    for name in "ab":
        tracker.subscribe(
            pre_forward=lambda *_, name=name: order.append(f"pre {name}"),
            post_forward=lambda *_, name=name: order.append(f"post {name}"),
        )
    with tracker:
        nn.ReLU()(x)
    assert order == ["pre hook", "pre a", "pre b", "post hook", "post a", "post b"]


def test_listener_removed_inside_a_call_gets_its_exit(x):
    tracker, first, later = ModTracker(), [], []
    subscription = listening(tracker, first, exclude="*.1")

    class Changes(nn.Module):
        def forward(self, x):
            subscription.remove()
            listening(tracker, later)
            return x

    with tracker:
        nn.Sequential(Changes(), nn.ReLU())(x)
    assert [entry[:2] for entry in first] == [
        ("+", "Sequential"),
        ("+", "Sequential.0"),
        ("-", "Sequential.0"),
        ("-", "Sequential"),
    ]
    assert [entry[:2] for entry in later] == [("+", "Sequential.1"), ("-", "Sequential.1")]


def test_switches_of_a_failed_call_end_where_they_began(x):
    tracker, seen = ModTracker(), []
    tracker.subscribe(switched=lambda call, phase: seen.append((call and call.name, phase)))
    with tracker, pytest.raises(KeyboardInterrupt):
        nn.Sequential(Failing(KeyboardInterrupt()))(x)
    names = ["Sequential", "Sequential.0", "Sequential.0.a", "Sequential.0", "Sequential", None]
    assert seen == [(name, "outside" if name is None else "forward") for name in names]

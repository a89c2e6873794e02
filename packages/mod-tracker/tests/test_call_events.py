"""A call with events: what the module or a listener raises goes on, and the next call is clean."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
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


def test_failed_forward_leaves_nothing_behind(x, log_events):
    """After an exception and a retry each module has exactly one backward."""
    model = nn.Sequential(Failing(ValueError("once")))
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        with pytest.raises(ValueError, match="once"):
            model(x)
        assert tracker.parents == {"Global"}
        assert events[-2:] == ["-fw Sequential.0", "-fw Sequential"]
        model[0].error = None
        model(x).sum().backward()
    assert Counter(e for e in events if "bw" in e) == {
        f"{sign}bw {name}": 1
        for sign in "+-"
        for name in ("Sequential", "Sequential.0", "Sequential.0.a")
    }


def test_keyboard_interrupt_leaves_nothing_behind(x):
    """An exception that is not an `Exception` leaves the next call clean."""
    model, after = nn.Sequential(Failing(KeyboardInterrupt())), nn.Linear(4, 4)
    tracker, stacks = ModTracker(), []
    tracker.subscribe(pre_forward=lambda *_: stacks.append(tracker.stack), include="Linear")
    with tracker:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        after(x)
    assert stacks == [("Linear",)]
    assert tracker.parents == {"Global"}


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")


class Fails(nn.Module):
    def forward(self, x):
        return FailingBackward.apply(x)


def test_failed_backward_leaves_nothing_behind(x, log_ops, log_events):
    """After an error in backward the next forward and backward are clean."""
    model = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 4))
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        with pytest.raises(ValueError, match="in backward"):
            model(x).sum().backward()
        assert tracker.parents == {"Global"}
        assert tracker.phase == "outside"
    after = nn.Linear(4, 4, bias=False)
    events.clear()
    assert [e[2] for e in log_ops(tracker, lambda: after(x).sum().backward())] == [("Linear",)] * 3
    assert events == ["+fw Linear", "-fw Linear", "+bw Linear", "-bw Linear"]


def test_failing_hook_in_backward_leaves_nothing_behind(x):
    """A hook's own exception reaches the caller of backward, and nothing else changes."""
    tracker, model = ModTracker(), nn.Linear(4, 4)

    def bad(module, grads):
        raise ZeroDivisionError

    tracker.register_user_hooks(pre_bw_hook=bad)
    with tracker:
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        tracker.clear_user_hooks()
        assert tracker.parents == {"Global"}
        model(x).sum().backward()
        assert tracker.parents == {"Global"}


def test_foreign_hook_that_raises_is_the_only_error(mlp, x):
    """Another global hook's exception arrives unchanged and without a warning."""

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
    """A subscription that writes down entries, and exits with their outputs."""
    return tracker.subscribe(
        pre_forward=lambda call, args, kwargs: heard.append(("+", call.name)),
        post_forward=lambda call, args, kwargs, output: heard.append(("-", call.name, output)),
        **filters,
    )


def fail(*_):
    """A hook that raises."""
    raise ZeroDivisionError


def test_listener_told_of_the_entry_is_told_of_the_exit_where_a_hook_stops_the_call(x):
    """The drop-in's hook raises after it: the call has failed, so its output is None."""
    tracker, heard, called = ModTracker(), [], []
    listening(tracker, heard)
    tracker.register_user_hooks(pre_fw_hook=fail, post_fw_hook=lambda *_: called.append(1))
    with tracker, pytest.raises(ZeroDivisionError):
        nn.ReLU()(x)
    assert heard == [("+", "ReLU"), ("-", "ReLU", None)]
    assert called == []


def test_interrupt_between_entries_leaves_no_listener_without_its_exit(x):
    """Who was told before it is told of the exit, and who comes after it of neither."""
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


def test_failed_call_tells_its_exit_with_no_output(x):
    """At every level, from the inside out, and what the hooks get is None, too."""
    tracker, heard, outputs = ModTracker(), [], []
    listening(tracker, heard, exclude="*.a")
    tracker.register_user_hooks(post_fw_hook=lambda module, args, output: outputs.append(output))
    with tracker, pytest.raises(ValueError, match="once"):
        nn.Sequential(Failing(ValueError("once")))(x)
    exits = [entry for entry in heard if entry[0] == "-"]
    assert exits == [("-", "Sequential.0", None), ("-", "Sequential", None)]
    assert [output is None for output in outputs] == [False, True, True]


def test_events_of_a_call_come_in_one_order(x):
    """That of their registration, at the entry and at the exit."""
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


def test_listener_removed_inside_a_call_is_told_of_the_exit_it_waits_for(x):
    """And of no other call; one that is added there hears of the calls inside alone."""
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


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("threaded", [False, True])
def test_leaf_inputs_are_let_go_when_the_outermost_call_ends(error, threaded, x):
    """However it ends: a tensor that was given to a module is not kept alive."""
    model, tracker = nn.Sequential(Failing(None)), ModTracker()
    tracker.subscribe(pre_backward=lambda *_: None)
    with tracker:
        if threaded:
            thread = threading.Thread(target=nn.ReLU(), args=(torch.ones(1),))
            thread.start()
            thread.join()
        model(x)
        state = tracker._attribution.state()
        assert state.leaves == {}
        model[0].error = error
        with pytest.raises(type(error)):
            model(x)
    assert tracker._attribution.threaded is threaded
    assert state.leaves == {}
    assert (state.call, state.shown) == (state.base, None)


def test_leaf_inputs_are_known_until_the_outermost_call_has_ended(x):
    """A call inside that is given the same leaf, or fails, does not let go of them."""
    tracker, known = ModTracker(), []
    tracker.subscribe(post_backward=lambda *_: None)

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Failing(ValueError("no"))

        def forward(self, x):
            with pytest.raises(ValueError, match="no"):
                self.inner(x)
            known.append(set(tracker._attribution.state().leaves))
            return x * 2

    with tracker:
        Tries()(x)
    assert known == [{id(x)}]


def test_nothing_is_put_on_the_graph_without_gradients(x):
    """Under no_grad and in inference mode there is no backward to hear of."""
    tracker, heard = ModTracker(), []
    tracker.subscribe(pre_backward=lambda call, grads: heard.append(call.name))
    y = x * 2
    with tracker:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                nn.ReLU()(y)
        assert not any("mod_tracker" in key for key in y.grad_fn.metadata)
        nn.ReLU()(y).sum().backward()
    assert heard == ["ReLU#3"]


def test_backward_that_runs_is_not_forgotten_by_a_call_inside_it(x):
    """A recompute is a forward within the backward, which goes on after it."""
    tracker, left = ModTracker(), []
    tracker.subscribe(post_backward=lambda call, grads: left.append(call.name), exclude="*.a")
    inner = nn.ReLU()
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    with tracker:
        inner(x)
        y = model(x)
        y.register_hook(lambda grad: inner(grad) * 0 + grad)
        y.sum().backward()
    assert sorted(left) == ["Sequential", "Sequential.0", "Sequential.1"]


def test_switches_of_a_failed_call_end_where_they_began(x):
    """Each entry has its way back, although nothing was returned."""
    tracker, seen = ModTracker(), []
    tracker.on_switch(lambda call, phase: seen.append((call and call.name, phase)))
    with tracker, pytest.raises(KeyboardInterrupt):
        nn.Sequential(Failing(KeyboardInterrupt()))(x)
    names = ["Sequential", "Sequential.0", "Sequential.0.a", "Sequential.0", "Sequential", None]
    assert seen == [(name, "outside" if name is None else "forward") for name in names]


@pytest.mark.parametrize("value", [None, (), {}, [None, 3], "text", torch.empty(0)])
def test_output_without_gradients_passes_through_itself(value, x):
    """Nothing, empty containers and tensors without elements are given back as they are."""

    class Gives(nn.Module):
        def forward(self, *args, **kwargs):
            return value

    tracker, heard = ModTracker(), []
    listening(tracker, heard)
    tracker.subscribe(pre_backward=lambda *_: None)
    with tracker:
        assert Gives()(x, extra=value) is value
        assert Gives()() is value
    assert heard[1][2] is value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 1, 2)])
def test_backward_is_told_for_every_dtype_and_shape(dtype, shape, log_events):
    """Scalars and tensors without elements have gradients, too."""
    tracker = ModTracker()
    events = log_events(tracker)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    model = nn.Sequential(nn.Tanh())
    with tracker:
        model(x * 1).sum().abs().backward()
    assert sorted(events[-4:]) == sorted(
        f"{sign}bw {name}" for sign in "+-" for name in ("Sequential", "Sequential.0")
    )


def test_listener_gets_the_very_arguments_of_the_call(x):
    """By position and by name, and the output that the caller gets, with none of them copied."""
    given = []

    class Joins(nn.Module):
        def forward(self, *args, **kwargs):
            return [*args, *kwargs.values()]

    tracker, items = ModTracker(), [x]
    tracker.subscribe(post_forward=lambda call, args, kwargs, output: given.extend((args, kwargs)))
    hooked = []
    tracker.register_user_hooks(post_fw_hook=lambda module, args, output: hooked.append(output))
    with tracker:
        output = Joins()(items, more=items)
    assert given[0][0] is items
    assert given[1]["more"] is items
    assert hooked[0] is output

"""Which module runs, forward and backward: every operation belongs to the call that made it."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from mod_tracker import ModTracker, profile_flops

FW, BW = "forward", "backward"


def test_every_operation_is_attributed_and_event_order_is_torchs(mlp, x, log_ops, log_events):
    """A plain MLP: exact stacks; modules that share a boundary tensor keep torch's event order."""
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: mlp(x).sum().backward())
    assert entries == [
        (FW, "mm", ("MLP", "MLP.a")),
        (FW, "relu", ("MLP",)),
        (FW, "mm", ("MLP", "MLP.b")),
        (BW, "mm", ("MLP", "MLP.b")),
        (BW, "mm", ("MLP", "MLP.b")),
        (BW, "threshold_backward", ("MLP",)),
        (BW, "mm", ("MLP", "MLP.a")),
        (BW, "mm", ("MLP", "MLP.a")),
    ]
    assert events[-6:] == [
        "+bw MLP.b",
        "+bw MLP",
        "-bw MLP.b",
        "+bw MLP.a",
        "-bw MLP",
        "-bw MLP.a",
    ]


def test_modules_without_a_grad_input_are_left_at_the_end(mlp, log_ops, log_events):
    """Input without gradient: the root and the first layer are left when the backward ends."""
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: mlp(torch.randn(2, 4)).sum().backward())
    assert [e for e in entries if e[0] == BW][-1] == (BW, "mm", ("MLP", "MLP.a"))
    assert events[-5:] == ["+bw MLP", "-bw MLP.b", "+bw MLP.a", "-bw MLP.a", "-bw MLP"]


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.a(self.a(self.a(x)))


def test_reused_module_is_attributed_in_every_backward(x, log_ops, log_events):
    """Three calls, three backwards of the same module, each with its call index."""
    tracker, indexes = ModTracker(), []
    events = log_events(tracker)
    tracker.subscribe(pre_backward=lambda call, _: indexes.append(call.call_index), types=nn.Linear)
    model = Reused()
    entries = log_ops(tracker, lambda: model(x).sum().backward())
    assert [e for e in entries if e[0] == BW] == [(BW, "mm", ("Reused", "Reused.a"))] * 6
    assert indexes == [2, 1, 0]
    assert Counter(events)["+bw Reused.a"] == Counter(events)["-bw Reused.a"] == 3


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x, n=2):
        return self.inner(x) if n == 0 else self(x, n - 1)


def test_recursive_module_is_on_the_stack_as_often_as_it_runs(x, log_ops):
    """No warning, no global change, and the depth of the recursion is visible."""
    formatter = warnings.formatwarning
    model = Recursive()
    entries = log_ops(ModTracker(), lambda: model(x).sum().backward())
    stack = ("Recursive", "Recursive", "Recursive", "Recursive.inner")
    assert entries == [(FW, "mm", stack), (BW, "mm", stack), (BW, "mm", stack)]
    assert warnings.formatwarning is formatter


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, *, x):
        return self.inner(x)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.ModuleList(ByKeyword() for _ in range(4))

    def forward(self, x):
        for k in self.k:
            x = k(x=x)
        return x


def test_keyword_inputs_are_attributed(x, log_events):
    """Four chained blocks with keyword inputs have 192 FLOPs each, and paired events."""
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker, profile_flops() as report:
        model = Chain()
        model(x).sum().backward()
    assert [report[f"Chain.k.{i}"].total for i in range(4)] == [192] * 4
    assert events[events.index("+bw Chain.k.3") :].count("-bw Chain.k.0") == 1
    assert events.index("-bw Chain.k.3") < events.index("+bw Chain.k.1")


@dataclass
class Output:
    y: torch.Tensor


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return Output(self.d(x))


class Unwrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = Wrapping()
        self.o = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.o(self.d(x).y)


def test_dataclass_output_is_attributed(x, log_ops, log_events):
    """An output inside a dataclass hides nothing: stacks and events are complete."""
    tracker = ModTracker()
    events = log_events(tracker)
    model = Unwrapping()
    entries = log_ops(tracker, lambda: model(x).sum().backward())
    assert entries[-1] == (BW, "mm", ("Unwrapping", "Unwrapping.d", "Unwrapping.d.d"))
    assert events.count("+bw Unwrapping.d") == events.count("-bw Unwrapping.d") == 1


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x), self.b(x)


def test_unused_output_has_no_backward_event(x, log_events):
    """A branch whose output is not used is neither entered nor left."""
    tracker, model = ModTracker(), TwoOutputs()
    events = log_events(tracker)
    with tracker:
        model(x)[0].sum().backward()
    assert [e for e in events if "bw" in e] == [
        "+bw TwoOutputs.a",
        "+bw TwoOutputs",
        "-bw TwoOutputs",
        "-bw TwoOutputs.a",
    ]


def test_identity_is_entered_before_it_is_left(x, log_ops, log_events):
    """Modules that return their input are entered and left at once, and hold nothing."""
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Identity(), nn.Dropout(0.5), nn.Linear(4, 4, bias=False)
    ).eval()
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: model(x).sum().backward())
    assert entries[-1] == (BW, "mm", ("Sequential", "Sequential.0"))
    for name in ("Sequential.1", "Sequential.2"):
        assert events.index(f"+bw {name}") < events.index(f"-bw {name}")
        assert events.index(f"-bw {name}") < events.index("-bw Sequential.0")


def test_frozen_first_layer_has_no_backward_event(log_events):
    """Nothing flows back through a frozen layer, so nothing is told of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    tracker = ModTracker()
    events = log_events(tracker)
    with tracker:
        model(torch.randn(2, 4)).sum().backward()
    assert [e for e in events if "bw" in e] == [
        "+bw Sequential.1",
        "+bw Sequential",
        "-bw Sequential.1",
        "-bw Sequential",
    ]


class Double(nn.Module):
    def forward(self, x):
        return x.mul_(2)


def test_in_place_modules_are_attributed(x, log_ops, log_events):
    """In-place modules, alone and chained, behave like others."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Double(), nn.ReLU(inplace=True))
    tracker = ModTracker()
    events = log_events(tracker)
    entries = log_ops(tracker, lambda: model(x).sum().backward())
    backward = [(op, stack[-1]) for phase, op, stack in entries if phase == BW]
    assert backward == [
        ("threshold_backward", "Sequential.2"),
        ("mul", "Sequential.1"),
        ("mm", "Sequential.0"),
        ("mm", "Sequential.0"),
    ]
    opened = [e[4:] for e in events if e.startswith("+bw")]
    assert opened == ["Sequential.2", "Sequential", "Sequential.1", "Sequential.0"]


def test_hooks_of_a_module_run_inside_it(x, log_ops):
    """What a module's own hooks compute is charged to the module."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].register_forward_hook(lambda module, args, output: output.neg())
    entries = log_ops(ModTracker(), lambda: model(x))
    assert entries[-1] == (FW, "neg", ("Sequential", "Sequential.0"))


def test_direct_call_of_forward_belongs_to_the_caller(x, log_ops):
    """`module.forward(x)` is not a module call; its work is the calling module's."""

    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.a.forward(x)

    model = Direct()
    entries = log_ops(ModTracker(), lambda: model(x).sum().backward())
    assert {stack for _, _, stack in entries} == {("Direct",)}


class AllEqual(nn.Linear):
    def __eq__(self, other):
        return True

    __hash__ = None


def test_modules_are_told_apart_by_identity(x, log_events):
    """`__eq__` that is always true, and no hash: two modules, two names, no error."""
    model = nn.Sequential(AllEqual(4, 4), AllEqual(4, 4))
    tracker, names = ModTracker(), []
    log_events(tracker)
    tracker.subscribe(pre_forward=lambda call, *_: names.append(call.name))
    with tracker:
        model(x).sum().backward()
    assert names == ["Sequential", "Sequential.0", "Sequential.1"]

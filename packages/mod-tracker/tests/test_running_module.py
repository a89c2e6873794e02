"""The running module in forward and backward: each operation belongs to the call that made it."""

from __future__ import annotations

import torch
from torch import nn

from mod_tracker import ModTracker

FW, BW = "forward", "backward"


def test_every_operation_is_attributed_and_event_order_is_torchs(mlp, x, log_ops, log_events):
    """An MLP: exact stacks, and torch's event order for modules that share a boundary tensor."""
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
    """Without a gradient for the input, root and first layer are left when backward ends."""
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


def test_reused_module_is_attributed_in_every_backward(x, log_ops):
    tracker, entered, left = ModTracker(), [], []
    tracker.register_user_hooks(
        pre_bw_hook=lambda *_: entered.append((tracker.current, tracker.call_index)),
        post_bw_hook=lambda *_: left.append(tracker.current),
    )
    model = Reused()
    entries = log_ops(tracker, lambda: model(x).sum().backward())
    assert [e for e in entries if e[0] == BW] == [(BW, "mm", ("Reused", "Reused.a"))] * 6
    inner = [index for name, index in entered if name == "Reused.a"]
    assert (inner, left.count("Reused.a")) == ([2, 1, 0], 3)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x), self.b(x)


def test_unused_output_has_no_backward_event(x, log_events):
    """A branch whose output is unused is neither entered nor left."""
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


def test_direct_call_of_forward_belongs_to_the_caller(x, log_ops):
    """`module.forward(x)` is not a module call; its operations belong to the calling module."""

    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.a.forward(x)

    model = Direct()
    entries = log_ops(ModTracker(), lambda: model(x).sum().backward())
    assert {stack for _, _, stack in entries} == {("Direct",)}

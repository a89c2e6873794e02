"""A recomputed module has the stack and the FLOPs of its forward."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.utils.checkpoint import checkpoint

from mod_tracker import ModTracker, profile_flops

RE, BW = "recompute", "backward"


def test_recompute_has_the_stack_of_the_forward(checkpointed, x, log_ops):
    """What is recomputed runs inside the modules of the first forward, and no others."""
    model = checkpointed(use_reentrant=False)
    entries = log_ops(ModTracker(), lambda: model(x).sum().backward())
    inner = ("Checkpointed", "Checkpointed.m")
    assert [stack for phase, op, stack in entries if phase == RE and op == "mm"] == [
        (*inner, "Checkpointed.m.a")
    ]
    assert (RE, "relu", inner) in entries
    assert Counter(stack[-1] for phase, op, stack in entries if (phase, op) == (BW, "mm")) == {
        "Checkpointed.out": 2,
        "Checkpointed.m.b": 2,
        "Checkpointed.m.a": 2,
    }


def test_non_reentrant_flops_are_exact(checkpointed, x):
    """b: 64 forward and 128 backward; it needs no recompute, because a's result is enough."""
    with profile_flops() as report:
        model = checkpointed(use_reentrant=False)
        model(x).sum().backward()
    b, a = report["Checkpointed.m.b"], report["Checkpointed.m.a"]
    assert (b.forward, b.recompute, b.backward) == (64, 0, 128)
    assert (a.forward, a.recompute, a.backward) == (64, 64, 128)


def test_reentrant_recompute_and_its_backward_are_attributed(checkpointed, x, log_ops, log_events):
    """The inner graph is built in backward; its modules are entered and left in backward, too."""
    tracker = ModTracker()
    events = log_events(tracker)
    model = checkpointed(use_reentrant=True)
    entries = log_ops(tracker, lambda: model(x).sum().backward())
    inner = ("Checkpointed", "Checkpointed.m")
    assert [e for e in entries if e[0] == RE] == [
        (RE, "mm", (*inner, "Checkpointed.m.a")),
        (RE, "relu", inner),
        (RE, "mm", (*inner, "Checkpointed.m.b")),
    ]
    assert Counter(stack for phase, op, stack in entries if (phase, op) == (BW, "mm")) == {
        ("Checkpointed", "Checkpointed.out"): 2,
        (*inner, "Checkpointed.m.b"): 2,
        (*inner, "Checkpointed.m.a"): 2,
    }
    backward = [event for event in events if "bw" in event]
    assert sorted(e[1:] for e in backward if e[0] == "+") == sorted(
        e[1:] for e in backward if e[0] == "-"
    )
    assert "+bw Checkpointed.m.a" in backward


def test_reentrant_flops_are_exact(checkpointed, x):
    """b: 64 forward, 64 recomputed, 128 backward."""
    with profile_flops() as report:
        model = checkpointed(use_reentrant=True)
        model(x).sum().backward()
    b, m = report["Checkpointed.m.b"], report["Checkpointed.m"]
    assert (b.forward, b.recompute, b.backward) == (64, 64, 128)
    assert m.total == 512


def test_recomputed_lambda_between_modules_belongs_to_the_caller(x, log_ops):
    """A checkpointed function that is no module."""

    class Lambda(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return checkpoint(lambda x: self.b(self.a(x).tanh()), x, use_reentrant=False)

    model = Lambda()
    entries = log_ops(ModTracker(), lambda: model(x).sum().backward())
    assert (RE, "mm", ("Lambda", "Lambda.a")) in entries
    assert {stack for phase, _, stack in entries if phase == BW} == {
        ("Lambda",),
        ("Lambda", "Lambda.a"),
        ("Lambda", "Lambda.b"),
    }

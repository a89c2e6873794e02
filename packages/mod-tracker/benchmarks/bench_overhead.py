"""Cost of a tracker per module call, compared with torch's, with and without hooks."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import nn, no_grad
from torch.distributed._tools.mod_tracker import ModTracker as TorchTracker

from mod_tracker import ModTracker


def forward_without_gradients(model, x):
    """Run a forward without gradients."""
    with no_grad():
        model(x)


def forward(model, x):
    """Run a forward that builds a graph."""
    model(x)


def forward_and_backward(model, x):
    """Run forward and backward. A fresh input, because torch's tracker leaves hooks on a leaf."""
    model(x.clone().requires_grad_()).sum().backward()


def bare(kind):
    """Make one tracker for all rounds, as a training loop does; each round enters it again."""
    tracker = kind()
    return lambda: tracker


def hooked(kind):
    """Make a tracker with four hooks that do nothing."""
    tracker = kind()
    tracker.register_user_hooks(*[lambda *args: None] * 4)
    return lambda: tracker


STEPS = (forward_without_gradients, forward, forward_and_backward)
MUST_US = 1.5
MUST_HOOKED_US = 8.0


def test_cost_per_call(model_and_input, count_calls, seconds, capsys):
    """At most 1.5 us per call, and 8 us with four hooks."""
    model, x = model_and_input
    plain = bare(ModTracker), bare(TorchTracker)
    rows = [(step.__name__, step, *plain, MUST_US) for step in STEPS]
    hooks = hooked(ModTracker), hooked(TorchTracker)
    rows.append(("four hooks", forward_and_backward, *hooks, MUST_HOOKED_US))
    with capsys.disabled():
        print(f"\n{type(model).__name__}, us per module call over no tracker")
        print(f"{'':28}ours   torch  must")
        for name, step, mine, theirs, must in rows:
            contexts = {"plain": nullcontext, "ours": mine, "torch": theirs}
            took = seconds(contexts, lambda step=step: step(model, x))
            calls = count_calls(step, model, x)
            cost = {key: (value - took["plain"]) / calls * 1e6 for key, value in took.items()}
            note = f"({calls} calls{', missed' if cost['ours'] > must else ''})"
            print(f"{name:26}{cost['ours']:6.2f}{cost['torch']:8.2f}{must:6.1f}  {note}")


def first_step_s(kind, model, x):
    """Thread-CPU seconds of the first forward under a new tracker."""
    with kind():
        start = time.thread_time_ns()
        model(x)
        return (time.thread_time_ns() - start) / 1e9


def test_cost_of_the_first_step(capsys):
    """Cost per call of a new tracker, as in a report of one step; target 8 us, at any width."""
    kinds = {"plain": nullcontext, "ours": ModTracker, "torch": TorchTracker}
    with capsys.disabled():
        print("\nfirst step of a new tracker, us per module call\n  siblings    ours   torch")
        for count in (100, 400, 1_600, 10_000):
            model, x = nn.Sequential(*[nn.Identity() for _ in range(count)]), torch.ones(1)
            turns = [
                {name: first_step_s(kind, model, x) for name, kind in kinds.items()}
                for _ in range(10)
            ]
            best = {name: min(turn[name] for turn in turns) for name in kinds}
            ours, torchs = ((best[key] - best["plain"]) / count * 1e6 for key in ("ours", "torch"))
            print(f"{count:10}{ours:8.1f}{torchs:8.1f}")

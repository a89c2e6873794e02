"""Models and event logs for the cases of this area."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


def linear(device):
    """A 4 x 4 layer without bias: each product costs 2 * rows * 16 operations."""
    return nn.Linear(4, 4, bias=False, device=device)


def leaf(device):
    """An input that requires a gradient."""
    return torch.randn(2, 4, device=device, requires_grad=True)


def step(model, *args, **kwargs):
    """One forward and backward."""
    model(*args, **kwargs).sum().backward()


class MLP(nn.Module):
    """Two layers with a relu between them."""

    def __init__(self, device):
        super().__init__()
        self.a, self.b = linear(device), linear(device)

    def forward(self, x):
        """Run both layers."""
        return self.b(self.a(x).relu())


class Checkpointed(nn.Module):
    """A checkpointed MLP and a layer."""

    def __init__(self, device, *, use_reentrant):
        super().__init__()
        self.m, self.out = MLP(device), linear(device)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        """Run both parts."""
        return self.out(checkpoint(self.m, x, use_reentrant=self.use_reentrant))


class Note(nn.Module):
    """Two products; records the tracker's state in forward and at the first product's gradient."""

    def __init__(self):
        super().__init__()
        self.tracker = None
        self.forwards, self.backwards = [], []

    def forward(self, x):
        """Record and compute."""
        y = x * 2
        self.forwards.append((frozenset(self.tracker.parents), self.tracker.is_bw))
        if y.requires_grad:
            y.register_hook(self._note)
        return y * 3

    def _note(self, grad):
        self.backwards.append((frozenset(self.tracker.parents), self.tracker.is_bw))


def events_of(tracker):
    """A list to which the four user hooks append "+fw name", "-fw name", "+bw name", "-bw name"."""
    events = []

    def write(sign):
        def hook(module, *_):
            name = None if module is None else tracker.get_known_fqn(module)
            events.append(f"{sign} {name}")

        return hook

    tracker.register_user_hooks(write("+fw"), write("-fw"), write("+bw"), write("-bw"))
    return events


def backward_of(events):
    """Select the backward events."""
    return [event for event in events if "bw" in event]


def names_of(*names):
    """Build a set of parents."""
    return frozenset(("Global", *names))


class Products(TorchDispatchMode):
    """Records direction and parents of every matrix product."""

    def __init__(self, tracker):
        super().__init__()
        self.tracker, self.seen = tracker, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.seen.append((self.tracker.is_bw, frozenset(self.tracker.parents)))
        return func(*args, **(kwargs or {}))


def products_of(part, run):
    """Direction and parents of every matrix product of a run."""
    tracker = part.ModTracker()
    log = Products(tracker)
    with tracker, log:
        run()
    return log.seen


def events_in(part, run):
    """Events of a tracker during a run."""
    tracker = part.ModTracker()
    events = events_of(tracker)
    with tracker:
        run()
    return events

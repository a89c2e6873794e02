"""Requirements from the source's tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchparts_conformance import requirement
from torchparts_conformance.cases.mod_tracker._models import Note, events_of, leaf, names_of, step


class Nested(nn.Module):
    """Modules as an attribute, in a dict and in a list."""

    def __init__(self, tracker):
        super().__init__()
        self.a = Note()
        self.b = nn.ModuleDict({"nest": Note()})
        self.c = nn.ModuleList([Note()])
        for part in (self.a, self.b["nest"], self.c[0]):
            part.tracker = tracker

    def forward(self, x):
        """Run all of them."""
        return self.b["nest"](self.a(self.c[0](x)))


def _run(part, device, steps):
    tracker = part.ModTracker()
    model = Nested(tracker)
    with tracker:
        for _ in range(steps):
            step(model, leaf(device).clone())
    return model


def _seen(model, name):
    return [
        [names for names, _ in getattr(part, name)]
        for part in (model.c[0], model.a, model.b["nest"])
    ]


PLACES = [[names_of("Nested", place)] for place in ("Nested.c.0", "Nested.a", "Nested.b.nest")]


@requirement(
    "MT-001",
    'In forward, `parents` MUST hold "Global" and the names of the running modules, which for '
    "modules in containers are state_dict paths.",
    source="test_module_hierarchy",
)
def test_parents_in_forward(part, device):
    """Attribute, dict and list: each is named by its state_dict path."""
    assert _seen(_run(part, device, 1), "forwards") == PLACES


@requirement(
    "MT-002",
    "In a gradient hook during the backward of these modules, `parents` MUST hold the same names.",
    source="test_module_hierarchy",
)
def test_parents_in_backward(part, device):
    """The same names in gradient hooks."""
    assert _seen(_run(part, device, 1), "backwards") == PLACES


@requirement(
    "MT-003",
    "A second forward and backward MUST have the same events as the first.",
    source="test_module_hierarchy",
)
def test_second_iteration(part, device):
    """Two steps have the same events."""
    model = _run(part, device, 2)
    for kind in ("forwards", "backwards"):
        assert [entries[:1] == entries[1:] for entries in _seen(model, kind)] == [True] * 3


@requirement(
    "MT-004",
    "`is_bw` MUST be true in backward, and false in forward.",
    source="test_module_hierarchy",
)
def test_is_bw_in_both_directions(part, device):
    """False in forward, true in the gradient hook."""
    model = _run(part, device, 1)
    assert [flag for _, flag in model.a.forwards] == [False]
    assert [flag for _, flag in model.a.backwards] == [True]


@requirement(
    "MT-005",
    'After a backward `is_bw` MUST be false and `parents` only {"Global"}.',
    source="test_bw_detection",
)
def test_outside_after_backward(part, device):
    """No module is running after a backward."""
    with part.ModTracker() as tracker:
        step(nn.Linear(2, 2, device=device), torch.rand(2, requires_grad=True, device=device))
        assert tracker.is_bw is False
        assert tracker.parents == {"Global"}


class Bar(nn.Module):
    """A layer whose output is changed in place."""

    def __init__(self, device):
        super().__init__()
        self.foo = nn.Linear(10, 10, device=device)

    def forward(self, x):
        """Run the layer and change its output."""
        return self.foo(x).relu_()


ORDER = [
    *("+fw Bar", "+fw Bar.foo", "-fw Bar.foo", "-fw Bar"),
    *("+bw Bar", "+bw Bar.foo", "-bw Bar", "-bw Bar.foo"),
]


@requirement(
    "MT-006",
    "The four user hooks MUST be called in torch's order: in forward, modules are entered from "
    "outside to inside and left from inside to outside; in backward, a module is entered when its"
    " outputs' gradients arrive and left when its inputs' gradients arrive, the caller first if "
    "both have the same input.",
    source="test_user_hooks",
)
def test_order_of_user_hooks(part, device):
    """Eight events in torch's order."""
    tracker = part.ModTracker()
    events = events_of(tracker)
    with tracker:
        step(Bar(device), torch.rand(10, 10, requires_grad=True, device=device))
    assert events == ORDER


@requirement(
    "MT-007",
    "While a user hook runs, its module's name MUST be in `parents`, and `is_bw` MUST be true "
    "exactly in backward hooks.",
    source="test_user_hooks",
)
def test_state_while_user_hooks_run(part, device):
    """Each hook finds its module among the parents, and the right direction."""
    tracker, seen = part.ModTracker(), []

    def note(module, *_):
        seen.append((tracker.get_known_fqn(module) in tracker.parents, tracker.is_bw))

    tracker.register_user_hooks(note, note, note, note)
    model = Bar(device)
    with tracker:
        step(model, torch.rand(10, 10, requires_grad=True, device=device))
    assert seen == [(True, False)] * 4 + [(True, True)] * 4


@requirement(
    "MT-008",
    "Registering a second hook of the same kind MUST raise an AssertionError.",
    source="test_user_hooks",
)
def test_second_hook_of_a_kind_is_refused(part, device):
    """One hook of each kind."""
    tracker = part.ModTracker()
    events_of(tracker)
    with pytest.raises(AssertionError):
        tracker.register_user_hooks(lambda module, args: None, None, None, None)


@requirement(
    "MT-009",
    "The backward hooks of a freed module MUST be called with None.",
    source="test_user_hooks",
)
def test_deleted_module(part, device):
    """Backward hooks get None for a freed module."""
    tracker, seen = part.ModTracker(), []

    def note(module, grads):
        seen.append((module, None in tracker.parents, tracker.is_bw))

    tracker.register_user_hooks(pre_bw_hook=note, post_bw_hook=note)
    model = Bar(device)
    with tracker:
        loss = model(torch.rand(10, 10, requires_grad=True, device=device)).sum()
        del model
        loss.backward()
    assert seen == [(None, False, True)] * 4


class Foo(nn.Module):
    """Two layers; the second is checkpointed."""

    def __init__(self, device):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8, device=device) for _ in range(2))

    def forward(self, x):
        """Run both layers."""
        x = torch.relu(self.linears[0](x))
        return torch.relu(checkpoint(self.linears[1], x, use_reentrant=False))


def _checkpointed_events(part, device):
    tracker = part.ModTracker()
    events, seen, model = [], [], Foo(device)

    def write(sign):
        def hook(module, *_):
            events.append(f"{sign} {tracker.get_known_fqn(module)}")
            seen.append(tracker.is_bw)

        return hook

    tracker.register_user_hooks(write("+fw"), write("-fw"), write("+bw"), write("-bw"))
    with tracker:
        step(model, torch.randn(2, 8, device=device))
    return events, seen


@requirement(
    "MT-010",
    "With non-reentrant checkpointing the forward hooks MUST be called again in backward, with "
    "`is_bw` true, between the backward hooks of the checkpointed module.",
    source="test_ac",
)
def test_hooks_in_recompute(part, device):
    """The checkpointed layer's forward hooks fire again between its backward hooks."""
    events, backward = _checkpointed_events(part, device)
    assert events[6:12] == [
        "+bw Foo",
        "+bw Foo.linears.1",
        "+fw Foo.linears.1",
        "-fw Foo.linears.1",
        "-bw Foo.linears.1",
        "+bw Foo.linears.0",
    ]
    assert backward[:12] == [False] * 6 + [True] * 6


@requirement(
    "MT-011",
    "Modules whose inputs require no gradient MUST be left at the end of the backward, in reverse"
    " order of their calls.",
    rationale="test_ac lists the events before these; torch 2.13 emits the two closing ones",
)
def test_closing_events(part, device):
    """Modules without gradients at their inputs are left at the end, from inside to outside."""
    events, _ = _checkpointed_events(part, device)
    assert events[12:] == ["-bw Foo.linears.0", "-bw Foo"]


@requirement(
    "MT-012",
    "`get_known_fqn` MUST give the name of a module that ran, and None for one that was not seen.",
    source="test_user_hooks",
)
def test_known_names(part, device):
    """A name for a module that ran, None for one that did not."""
    model, stranger = Bar(device), nn.Linear(1, 1)
    with part.ModTracker() as tracker:
        model(torch.rand(10, 10, device=device))
    assert [tracker.get_known_fqn(m) for m in (model, model.foo)] == ["Bar", "Bar.foo"]
    assert tracker.get_known_fqn(stranger) is None

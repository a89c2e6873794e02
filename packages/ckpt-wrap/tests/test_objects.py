"""Objects among the arguments: recomputation sees their state from before forward."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ckpt_wrap import RecomputeError


class Slotted:
    __slots__ = ("__dict__", "_hidden", "items")

    def __init__(self) -> None:
        self.items, self._hidden = [], 0


@dataclass
class Record:
    items: list = field(default_factory=list)
    count: int = 0


class OwnDict(OrderedDict):
    """A dict whose items are also attributes."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.latest = key


def _append(target, x):
    target.append(float(x.detach().sum()))
    return len(target)


def _count(target, x):
    target["n"] = target.get("n", 0) + 1
    return target["n"]


def _write(target, x):
    target.items.append(float(x.detach().sum()))
    target.count = getattr(target, "count", 0) + 1
    return target.count + len(target.items)


def _group(target, x):
    target["a"].append(1)
    return len(target["a"])


def _add(target, x):
    target.add(len(target))
    return len(target)


def _pair(target, x):
    target[0].append(float(x.detach().sum()))
    return len(target[1][0]) + 1


def _reordered():
    held = OrderedDict(a=2, b=3)
    held.move_to_end("a")
    return held


def _next_one(target, x):
    oldest = next(iter(target))
    target.move_to_end(oldest)
    target[f"{oldest}{len(target)}"] = 5
    return target[oldest]


def _shared():
    inner: list = []
    return (inner, [inner])


CHANGES = {
    "list": (list, _append),
    "dict": (dict, _count),
    "ordered": (OwnDict, _count),
    "reordered": (_reordered, _next_one),
    "default": (lambda: defaultdict(list), _group),
    "set": (set, _add),
    "deque": (lambda: deque([0.0], maxlen=2), _append),
    "dataclass": (Record, _write),
    "namespace": (lambda: SimpleNamespace(items=[]), _write),
    "slots": (Slotted, _write),
    "one list in two places": (_shared, _pair),
    "torch generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda g, x: torch.rand(x.shape, generator=g),
    ),
}


class Changes(nn.Module):
    """Multiplies by a value from an argument that it changes."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change
        self.linear = nn.Linear(4, 4)

    def forward(self, x, target):
        return torch.tanh(self.linear(x) * self.change(target, x)).exp()


@pytest.mark.parametrize("how", CHANGES)
def test_whatever_a_forward_changes_is_as_it_was(wrap, how):
    """Gradients of two calls with one object, and its final state, match the plain model."""
    make, change = CHANGES[how]
    plain = Changes(change)
    wrapped = wrap(copy.deepcopy(plain))
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    results, targets = [], []
    for module in (plain, wrapped):
        target = make()
        torch.stack([module(x, target).sum() for _ in range(2)]).sum().backward()
        results.append([p.grad for p in module.parameters()])
        targets.append(target)
    assert all(map(torch.equal, *results))
    assert _seen(targets[0]) == _seen(targets[1])


def _seen(target):
    if isinstance(target, torch.Generator):
        return target.get_state().tolist()
    content = getattr(target, "__dict__", {}), getattr(target, "items", ())
    return repr((target if isinstance(target, (list, tuple, dict, set, deque)) else 0, content[0]))


class Owns:
    """Has a finalizer, so a copy would release the resource it owns."""

    def __del__(self) -> None:
        pass


class NoCopies:
    """Refuses to be copied."""

    def __reduce_ex__(self, protocol):
        raise TypeError("no copies")


@pytest.mark.parametrize("make", [Owns, NoCopies, nn.Identity, iter], ids=lambda m: m.__name__)
def test_an_object_that_is_not_copied_is_the_same_object(wrap, make):
    """Forward and recomputation get the same object."""
    seen = []

    def note(target, x):
        seen.append(target)
        return 1

    target = make([]) if make is iter else make()
    wrap(Changes(note))(torch.ones(2, 4), target).sum().backward()
    assert len(seen) == 2
    assert seen[0] is seen[1] is target


class Mode:
    """An argument that forward compares by identity."""

    def __init__(self, name: str) -> None:
        self.name, self.keys, self.scale = name, {"a": [name]}, torch.ones(())


HALF, FULL = Mode("half"), Mode("full")


@pytest.mark.parametrize("nested", [lambda m: m, lambda m: (m,), lambda m: {"mode": [m]}])
def test_an_unchanged_object_keeps_its_identity(wrap, nested):
    """Forward may compare an argument by identity, and look it up by its hash."""

    def scale(target, x):
        while not isinstance(target, Mode):
            target = target["mode"] if isinstance(target, dict) else target[0]
        return {HALF: 0.5, FULL: 2.0}.get(target, 7.0) if target is HALF else 9.0

    plain = Changes(scale)
    wrapped = wrap(copy.deepcopy(plain))
    for module in (plain, wrapped):
        module(torch.ones(2, 4), nested(HALF)).sum().backward()
    assert torch.equal(wrapped.linear.weight.grad, plain.linear.weight.grad)


@pytest.mark.parametrize("make", [lambda: Mode("half"), dict, lambda: {"a": 1}])
def test_an_object_made_for_the_call_alone_is_rebuilt(wrap, make):
    """It is gone before backward."""
    seen = []
    wrap(Changes(lambda t, x: seen.append(repr(getattr(t, "keys", t))) or 1))(
        torch.ones(2, 4), make()
    ).sum().backward()
    assert len(seen) == 2


class Counted:
    """Has a counter that forward changes, and a list that forward only reads."""

    def __init__(self) -> None:
        self.count = 0
        self.tensor = torch.zeros(2, 4)
        self.lists = ([torch.zeros(2, 4)],)


def _count_and_read(target, x):
    target.count += 1
    return sum(t.exp() for t in (target.tensor, *target.lists[0])) * target.count


@pytest.mark.parametrize("name", ["tensor", "lists[0][0]"])
def test_a_tensor_beside_what_forward_changed_is_refused_when_changed_since(wrap, name):
    """Both if the object that holds the tensor is rebuilt and if it is not."""
    target = Counted()
    loss = wrap(Changes(_count_and_read))(torch.ones(2, 4), target).sum()
    (target.tensor if name == "tensor" else target.lists[0][0]).add_(1)
    with pytest.raises(RecomputeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_nothing_is_kept_where_nothing_requires_grad(wrap):
    """Neither objects nor tensors are kept; hooks around the call would see them."""
    target, x, packed = Record([1]), torch.ones(2, 4), []
    gone = weakref.ref(target), weakref.ref(x)
    module = wrap(Changes(lambda t, x: 2).requires_grad_(False))
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda t: t):
        result = module(x, target)
    del target, x
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert not packed
    assert not result.requires_grad

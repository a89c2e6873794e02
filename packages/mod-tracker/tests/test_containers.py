"""Hooks that survive torch.compile: containers of every class pass through as they are."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

from mod_tracker import _containers, compile_safe_hooks

# Where it breaks the graph, as 2.9 does at such containers, the compiler asks for a gradient. It
# keeps the warning of that from being shown, but not from being raised where warnings are errors.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Batch(dict):
    """A dict of a model's own."""


class Rows(list):
    """A list of a model's own."""


class Frozen(dict):
    """A dict that is not written to."""

    def __setitem__(self, key, value):
        raise RuntimeError("this is frozen")


Pair = namedtuple("Pair", "left right")


class Made(nn.Module):
    """Gives a container and, after it, a tensor."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x.sin()), x.cos()


class Outer(nn.Module):
    """What is hooked lies below."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: {"a": t},
        lambda t: OrderedDict(a=t),
        lambda t: Batch(a=t, n=1),
        lambda t: Rows([t, "text"]),
        lambda t: Pair(1, Batch(b=[t])),
    ],
    ids=["dict", "ordered", "batch", "rows", "pair"],
)
def test_what_follows_a_container_is_itself(make, compiled):
    """Each tensor comes out in its own place, with its gradient, and the class stays."""
    model, told = Outer(Made(make)), []
    x = torch.linspace(-1, 1, 5, requires_grad=True)

    def step(run):
        made, after = run(x)
        (inside,) = (t for t in torch.utils._pytree.tree_leaves(_plain(made)) if is_tensor(t))
        assert torch.equal(inside, x.sin())
        assert torch.equal(after, x.cos())
        return made, torch.autograd.grad(inside.sum() + 2 * after.sum(), x)[0]

    def is_tensor(value):
        return isinstance(value, torch.Tensor)

    made, expected = step(model)
    with compile_safe_hooks(model, pre_bw_hook=lambda name, grads: told.append(len(grads))):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        again, grad = step(run)
    assert type(again) is type(made)
    assert torch.equal(grad, expected)
    assert told == [2]


def _plain(value):
    """The value in containers of torch's."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def test_container_that_has_no_copy_is_passed_on_itself():
    """Its tensors have no boundary in backward, and all others have theirs."""
    model, told = Outer(Made(lambda t: Frozen(a=t))), []
    x = torch.ones(3, requires_grad=True)
    with compile_safe_hooks(model, pre_bw_hook=lambda name, grads: told.append(len(grads))):
        made, after = model(x)
        (made["a"].sum() + after.sum()).backward()
    assert type(made) is Frozen
    assert torch.equal(made["a"], x.sin())
    assert torch.equal(after, x.cos())
    assert torch.equal(x.grad, x.cos() - x.sin())
    assert len(told) == 1


class Appending(nn.Module):
    """Writes to what it is given."""

    def forward(self, x, names, shape, options):
        names.append(len(names))
        options["seen"] = shape
        return x.reshape(shape)


def test_container_without_tensors_is_passed_on_itself():
    """What a module writes to it, the caller has; a size is a size."""
    model, names, options = Outer(Appending()), [], Batch()
    x = torch.ones(2, 3)
    with compile_safe_hooks(model, pre_fw_hook=lambda *_: None):
        out = model(x, names, torch.Size([3, 2]), options)
    assert out.shape == (3, 2)
    assert names == [0]
    assert options == {"seen": torch.Size([3, 2])}


@pytest.mark.parametrize("compiled", [False, True])
def test_results_with_names_of_torch_pass_through(compiled):
    """Such as `max` gives: values that are told, indices that are not."""
    model = Outer(Made(lambda t: t.max(0)))
    x = torch.tensor([[1.0, 4.0], [3.0, 2.0]], requires_grad=True)
    with compile_safe_hooks(model, post_fw_hook=lambda *_: None):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        made, after = run(x)
    assert torch.equal(made.values, x.sin().max(0).values)
    assert torch.equal(made.indices, x.sin().max(0).indices)
    assert torch.equal(after, x.cos())


def test_tuples_are_the_same_by_what_is_in_them():
    """A tuple has no identity when it is traced; its items have, in tuples inside it too."""
    first, second = torch.ones(1), torch.ones(1)
    assert _containers._same((first, (second, 1)), (first, (second, 1)))
    assert not _containers._same((first, (second, 1)), (first, (first, 1)))
    assert not _containers._same((first,), (second,))
    assert not _containers._same((first,), (first, first))
    assert not _containers._same((first,), first)
    assert not _containers._same([first], [first])


def test_where_the_compiler_cannot_tell_lists_apart_none_are_taken_for_one(monkeypatch):
    """As in torch 2.9; outside compiled code a list is itself there too."""
    value: list[int] = []
    for traced, told in ((False, True), (True, False)):
        monkeypatch.setattr(_containers, "TRACES_IDENTITY", False)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda traced=traced: traced)
        assert _containers._is_one(value, value) is told
    monkeypatch.setattr(_containers, "TRACES_IDENTITY", True)
    assert _containers._is_one(value, value)
    assert not _containers._is_one(value, [])

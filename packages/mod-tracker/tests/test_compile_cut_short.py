"""Hooks that survive torch.compile: the caller's tensors stay, whatever comes between or fails."""

from __future__ import annotations

import pytest
import torch

from ._hooked import Does, Outer, append, hooked, pop

# torch.compile reads `grad` of each tensor that is given to what it compiles.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def x():
    """A leaf of three elements."""
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def fail(module, items):
    """Adds something, and raises."""
    items.append(items[0] * 2)
    raise ValueError("no")


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_that_raises_leaves_the_callers_tensors(compiled, x):
    """And what it had added until then."""
    model, items = Outer(Does(fail)), [x * 1]
    own = items[0]
    with hooked(model, []):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        with pytest.raises(ValueError, match="no"):
            run(items)
        assert items[0] is own
    assert [item.tolist() for item in items] == [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]


def test_forward_that_is_interrupted_leaves_the_callers_tensors(x):
    """At the latest when the block ends, whatever was called before and inside."""

    def begin(module, items):
        if len(items) == 1:
            return items[0]
        raise KeyboardInterrupt

    model, items = Outer(Outer(Does(begin))), [x * 1]
    own = [*items, x * 2]
    with hooked(model, []):
        model.inner.inner(items)
        items.append(own[1])
        with pytest.raises(KeyboardInterrupt):
            model(items)
    assert all(a is b for a, b in zip(items, own, strict=True))


def test_forward_that_breaks_the_graph_leaves_the_callers_tensors(x):
    """What is given and what is put back may be in two graphs."""

    def breaks(module, items):
        items.append(items[0] * module.weight)
        torch._dynamo.graph_break()
        return items[0].sin() + items[1]

    model, items, told = Outer(Does(breaks)), [x * 1], []
    own = items[0]
    with hooked(model, told):
        out = torch.compile(model, backend="aot_eager")(items)
        out.sum().backward()
    assert items[0] is own
    assert len(items) == 2
    assert torch.equal(x.grad, x.cos() + 2)
    assert [kind for kind, *_ in told] == ["pre_fw", "post_fw", "pre_bw", "post_bw"]


def test_backward_hooks_of_the_module_see_the_callers_list(x):
    """torch makes the arguments of such a module anew, between ours and its forward."""
    model, items, grads = Outer(Does(lambda module, x, items: pop(module, items) + x)), [x * 1], []
    items.append(items[0])
    own = items[0]
    model.inner.register_full_backward_hook(lambda module, given, made: grads.append(len(made)))
    with hooked(model, []):
        model(x, items).sum().backward()
    assert [len(items), grads] == [1, [1]]
    assert items[0] is own


def test_hook_that_replaces_arguments_leaves_the_callers_tensors(x):
    """One of another's, between ours and forward."""
    model, items = Outer(Does(append)), [x * 1]
    own = items[0]
    with hooked(model, []):
        model.inner.register_forward_pre_hook(
            lambda module, args, kwargs: (list(args), dict(kwargs)), with_kwargs=True
        )
        out = model(items)
    assert items[0] is own
    assert len(items) == 2
    assert torch.equal(out, x.sin())


class Strict(tuple):
    """A tuple that is not made of items alone."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_input_that_cannot_be_made_anew_leaves_the_callers_tensors(x):
    """What was given until then is taken back."""
    model, items = Outer(Does(append)), [x * 1, Strict(x, x)]
    own = list(items)
    with hooked(model, []), hooked(model, []):
        with pytest.raises(TypeError):
            model(items)
        assert all(a is b for a, b in zip(items, own, strict=True))

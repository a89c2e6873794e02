"""Hooks that survive torch.compile: containers that forward returns are the caller's own."""

from __future__ import annotations

import pytest
import torch

from ._hooked import WITH_IDENTITY, Does, Outer, hooked

# torch.compile reads `grad` of each tensor that is given to what it compiles.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def x():
    """A leaf of three elements."""
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


@pytest.mark.parametrize("compiled", WITH_IDENTITY)
def test_list_that_forward_returns_is_the_callers(compiled, x):
    """What was made has its boundary in backward; the caller's tensors and weights stay theirs."""

    def add(module, items):
        items.append(items[0] * module.weight)
        items.append(module.weight)
        return items, {"again": items}

    model, told, items = Outer(Does(add)), [], [x * 1]
    own = items[0]
    with hooked(model, told):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        found, other = run(items)
        grad = torch.autograd.grad(found[1].sum(), x)[0]
    assert found is items
    assert other["again"] is items
    assert items[0] is own
    assert items[2] is model.inner.weight
    assert [items[1].tolist(), grad.tolist()] == [[2.0, 4.0, 6.0], [2.0] * 3]
    assert [kind for kind, *_ in told] == ["pre_fw", "post_fw", "pre_bw", "post_bw"]


@pytest.mark.parametrize("compiled", WITH_IDENTITY)
def test_two_sessions_leave_what_is_the_callers(compiled, x):
    """In a list that is returned, too; what was made passes both."""

    def add(module, items):
        items.append(items[0] * module.weight)
        return items

    model, told, items = Outer(Does(add)), [], [x * 1]
    own = items[0]
    with hooked(model, told), hooked(model, told):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        found = run(items)
        grad = torch.autograd.grad(found[1].sum(), x)[0]
    assert found is items
    assert items[0] is own
    assert len(items) == 2
    assert grad.tolist() == [2.0] * 3
    assert [kind for kind, *_ in told].count("pre_bw") == 2


@pytest.mark.parametrize("compiled", WITH_IDENTITY)
def test_container_that_is_returned_twice_is_one(compiled, x):
    """Both places hold the same object, also where it is a copy."""

    def twice(module, x):
        made = [x * 2]
        return made, {"again": made}

    model = Outer(Does(twice))
    with hooked(model, []):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        made, other = run(x)
    assert made is other["again"]

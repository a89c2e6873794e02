"""Hooks that survive torch.compile: forward is given the caller's own containers."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn

from ._hooked import WITH_IDENTITY, Does, Outer, append, hooked, pop

# torch.compile reads `grad` of each tensor that is given to what it compiles.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Rows(list):
    """A list of a model's own."""


class Batch(dict):
    """A dict of a model's own."""


class Frozen(dict):
    """A dict that is not written to."""

    def __setitem__(self, key, value):
        raise RuntimeError("this is frozen")


Pair = namedtuple("Pair", "left right")


@pytest.fixture
def x():
    """A leaf of three elements."""
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def set_item(module, items):
    """Puts what it makes in the place of the first."""
    items[0] = items[1] * module.weight
    return items[0].sin()


def clear(module, items):
    """Takes all away."""
    made = items[0].sin() + items[1]
    items.clear()
    return made


def move(module, items):
    """Makes the others move on."""
    items.insert(0, items[0] * module.weight)
    items.append(items[1])
    return items[1].sin()


def reverse(module, items):
    """Changes only the order."""
    items.reverse()
    return items[0].sin()


def values_of(items):
    """What is in a list or dict, by place."""
    pairs = items.items() if isinstance(items, dict) else enumerate(items)
    return {place: item.tolist() for place, item in pairs}


def compared(function, make, x, compiled):
    """Run a module without hooks and with them; return both containers as the caller has them."""
    found = []
    for hooks in (False, True):
        torch._dynamo.reset()
        model, told = Outer(Does(function)), []
        given = make(x * 1, x * 3)
        own = dict(given.items() if isinstance(given, dict) else enumerate(given))
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        if hooks:
            with hooked(model, told):
                out = run(given)
                grad = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
            assert [kind for kind, *_ in told] == ["pre_fw", "post_fw", "pre_bw", "post_bw"]
            assert told[0] == ("pre_fw", 2)
            assert told[1] == ("post_fw", 2, 1)
        else:
            out = run(given)
            grad = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        after = given.values() if isinstance(given, dict) else given
        same = [next((p for p, t in own.items() if t is item), None) for item in after]
        found.append((type(given), values_of(given), same, out.tolist(), grad.tolist()))
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [list, Rows])
@pytest.mark.parametrize("function", [append, pop, set_item, clear, move, reverse])
def test_what_forward_does_to_a_list_the_caller_has(function, kind, compiled, x):
    """The same values in the same places, and where they were the caller's, the same tensors."""
    plain, under_hooks = compared(function, lambda *items: kind(items), x, compiled)
    assert under_hooks == plain


def put(module, items):
    """Adds what it makes."""
    items["new"] = items["a"] * module.weight
    return items["a"].sin()


def take(module, items):
    """Takes the first away."""
    return items.pop("a").sin()


def overwrite(module, items):
    """Puts what it makes in the place of the first."""
    items["a"] = items["b"] * module.weight
    return items["a"].sin()


def move_key(module, items):
    """Changes the place of one."""
    items["c"] = items.pop("a")
    return items["c"].sin()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [dict, OrderedDict, Batch])
@pytest.mark.parametrize("function", [put, take, overwrite, move_key])
def test_what_forward_does_to_a_dict_the_caller_has(function, kind, compiled, x):
    """As for a list."""
    plain, under_hooks = compared(function, lambda a, b: kind(a=a, b=b), x, compiled)
    assert under_hooks == plain


@pytest.mark.parametrize("compiled", [False, True])
def test_nested_containers_are_the_callers(compiled, x):
    """In a tuple, which is made anew, in a dict, by position and by name."""

    def write(module, pair, *, more):
        pair.right["list"].append(pair.left * 2)
        more[0][0].append(more[1])
        return pair.right["list"][0].sin() + more[1]

    inner, deep = [x * 1], [x * 2]
    own, late = inner[0], x * 3
    model, told = Outer(Does(write)), []
    more = ([deep], late)
    with hooked(model, told):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        out = run(Pair(x * 4, {"list": inner}), more=more)
        grad = torch.autograd.grad(out.sum(), x)[0]
    assert [inner[0] is own, len(inner), inner[1].tolist()] == [True, 2, (x * 8).tolist()]
    assert len(deep) == 2
    assert deep[1] is late
    assert torch.equal(out, x.sin() + 3 * x)
    assert torch.equal(grad, x.cos() + 3)
    assert told[0] == ("pre_fw", 4)


@pytest.mark.parametrize("compiled", [False, True])
def test_list_without_tensors_takes_what_was_given(compiled, x):
    """A cache that is empty at first holds the caller's own tensor afterwards."""

    def keep(module, x, cache):
        cache.append(x)
        return x * module.weight

    cache, model = [], Outer(Does(keep))
    with hooked(model, []):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x, cache)
    assert len(cache) == 1
    assert cache[0] is x


@pytest.mark.parametrize("compiled", WITH_IDENTITY)
def test_list_that_is_reached_twice_is_one(compiled, x):
    """Forward finds the same object in both places, and hooks are told of its tensors once."""

    def both(module, left, right):
        assert left is right
        left.append(right[0] * 2)
        return right[1] + left[0]

    items, told, model = [x * 1], [], Outer(Does(both))
    own = items[0]
    with hooked(model, told):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        out = run(items, items)
    assert torch.equal(out, 3 * x)
    assert len(items) == 2
    assert items[0] is own
    assert told[0] == ("pre_fw", 1)


def test_list_that_holds_itself_is_passed_on(x):
    """Its tensors are looked for once."""
    items, told = [x * 1], []
    items.append(items)
    model = Outer(Does(lambda module, items: items[1][1][0].sin()))
    with hooked(model, told):
        out = model(items)
    assert torch.equal(out, x.sin())
    assert items[1] is items
    assert told[0] == ("pre_fw", 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_list_of_a_module_is_its_own(compiled, x):
    """What a part writes to a list that the model keeps, the model has."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = [torch.ones(3)]
            self.inner = Does(append)

        def forward(self, x):
            return self.inner(self.kept) + x

    model = Keeps()
    first = model.kept[0]
    with hooked(model, []):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x)
    assert [item.tolist() for item in model.kept] == [[1.0] * 3, [2.0] * 3]
    assert model.kept[0] is first


@pytest.mark.parametrize("compiled", [False, True])
def test_calls_inside_calls_give_back_what_each_was_given(compiled, x):
    """A list that is handed down has the outermost caller's tensors in the end."""
    model = Outer(Outer(Does(append)))
    items = [x * 1]
    own = items[0]
    with hooked(model, []), hooked(model, []):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        out = run(items)
        grad = torch.autograd.grad(out.sum(), x)[0]
    assert items[0] is own
    assert items[1].tolist() == [2.0, 4.0, 6.0]
    assert torch.equal(grad, x.cos())


def test_module_that_calls_itself_has_its_own_inputs_in_each_call(x):
    """Also where the call inside has no list."""

    def again(module, items):
        if isinstance(items, torch.Tensor):
            return items * module.weight
        made = module(items[0]) + module([items[0]] if len(items) > 1 else items[0])
        items.append(made)
        return items[0] * made

    model, told, items = Outer(Does(again)), [], [x * 1, x * 2]
    own = list(items)
    plain = model(list(items))
    with hooked(model, told):
        out = model(items)
    assert torch.equal(out, plain)
    assert all(a is b for a, b in zip(items, own, strict=False))
    assert len(items) == 3


def test_container_that_is_not_written_to_is_passed_on_itself(x):
    """Read-only ones, and those of classes that are not looked into: the caller's objects."""
    seen = []

    def look(module, *args):
        seen.extend(args)
        return args[0]["a"].sin()

    given = (Frozen(a=x), MappingProxyType({"a": x}), {x})
    model = Outer(Does(look))
    with hooked(model, []):
        out = model(*given)
    assert all(a is b for a, b in zip(seen, given, strict=True))
    assert torch.equal(out, x.sin())
    assert given[0]["a"] is x


def test_two_threads_give_back_their_own(x):
    """Each its own list, at the same time in the same module."""
    together = threading.Barrier(2, timeout=30)

    def wait(module, items):
        together.wait()
        items.append(items[0] * module.weight)
        together.wait()
        return items[0].sin()

    model, lists = Outer(Does(wait)), [[x * 1], [x * 2]]
    own = [items[0] for items in lists]
    with hooked(model, []):
        threads = [threading.Thread(target=model, args=(items,)) for items in lists]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(items[0] is first for items, first in zip(lists, own, strict=True))
    assert [items[1].tolist() for items in lists] == [[2.0, 4.0, 6.0], [4.0, 8.0, 12.0]]

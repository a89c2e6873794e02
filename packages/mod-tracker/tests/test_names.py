"""Names: walking, cycles, identity, owners."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mod_tracker import ModTracker, _names
from mod_tracker._names import KeysBelow, Names, key_below, walk
from mod_tracker._torch_compat import unwrap


def test_walk_agrees_with_named_modules(mlp):
    """The same keys in the same order, each module once."""
    model = nn.Sequential(mlp, nn.ModuleDict({"x": mlp, "y": nn.ReLU()}))
    assert [key for key, _ in walk(model)] == [key for key, _ in model.named_modules()]


def test_walk_and_search_end_on_cycles(mlp):
    """A module that reaches its parent is no trap."""
    model = nn.Sequential(mlp)
    mlp.add_module("parent", model)
    assert [key for key, _ in walk(model)] == ["", "0", "0.a", "0.b"]
    assert key_below(model, nn.ReLU()) is None


def test_shortest_key_is_found(mlp):
    """A shared module is reached by its shortest path."""
    model = nn.Sequential(nn.Sequential(mlp.a), mlp.a)
    assert key_below(model, mlp.a) == "1"


class Stack(nn.Module):
    """Calls the modules of a list, which is not called itself."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        """One after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("container", [Stack, nn.Sequential])
def test_first_step_looks_at_each_module_a_few_times(container, monkeypatch):
    """However many siblings it has: searching them for each child would be quadratic."""
    looked = [0]

    def counted(module):
        looked[0] += 1
        return unwrap(module)

    monkeypatch.setattr(_names, "unwrap", counted)
    seen = []
    for depth in (20, 200):
        model, looked[0] = container(*[nn.ReLU() for _ in range(depth)]), 0
        with ModTracker():
            model(torch.ones(1))
        seen.append(looked[0])
    assert seen[1] <= 10 * seen[0]


@st.composite
def trees(draw, depth=3):
    """A module of modules, some of them shared, some without a forward of their own."""
    shared = nn.ReLU()

    def tree(depth):
        kinds = [nn.ReLU, lambda: shared]
        if depth:
            inner = draw(st.integers(1, 3))
            kinds += [
                lambda: nn.Sequential(*[tree(depth - 1) for _ in range(inner)]),
                lambda: nn.ModuleList([tree(depth - 1) for _ in range(inner)]),
            ]
        return draw(st.sampled_from(kinds))()

    return nn.Sequential(tree(depth), tree(depth - 1))


@given(trees())
def test_keys_that_are_kept_are_those_that_are_found(model):
    """Law: each leads to its module; of a module with several keys, any that needs no call."""
    keys = KeysBelow()
    inside = [module for _, module in walk(model) if module is not model]
    held = Counter(
        id(child) for module in model.modules() for child in module._modules.values() if child
    )
    for module in [*inside, *inside]:
        key = keys.of(model, module)
        assert model.get_submodule(key) is module
        if all(count == 1 for count in held.values()):
            assert key == key_below(model, module)
    assert keys.of(model, nn.ReLU()) is None


def test_places_that_hold_no_module_and_modules_in_two_places_are_no_trap():
    """`register_module` takes None; the first place of a shared module is its key."""
    model, keys = nn.Sequential(nn.ReLU()), KeysBelow()
    model.register_module("none", None)
    model.append(model[0])
    model.append(last := nn.Tanh())
    assert keys.of(model, model[0]) == "0"
    assert keys.of(model, last) == key_below(model, last)


def test_module_of_a_list_is_called_as_the_list_has_it(x):
    """Shared with a part that is not running, it is not reached through that part."""

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Sequential(nn.ReLU())
            self.layers = nn.ModuleList(self.part)

        def forward(self, x):
            return self.layers[0](x)

    seen, tracker = [], ModTracker()
    tracker.subscribe(pre_forward=lambda *_: seen.append(tracker.called_as))
    with tracker:
        Shares()(x)
    assert seen == ["Shares", "Shares.layers.0"]


def test_keys_that_are_kept_follow_the_model():
    """Registered later, moved, taken out, and another object at the address of one that is gone."""
    model, keys = nn.Sequential(nn.ReLU(), nn.Tanh()), KeysBelow()
    first, second = model
    assert (keys.of(model, first), keys.of(model, second)) == ("0", "1")
    model.append(late := nn.Sigmoid())
    assert keys.of(model, late) == "2"
    model[0], model[1] = second, first
    assert (keys.of(model, first), keys.of(model, second)) == ("1", "0")
    del model[1]
    assert keys.of(model, first) is None
    keys._keys[id(first)] = "1.gone.deeper"
    assert keys.of(model, first) is None


def test_labels_are_not_given_twice():
    """The name of a model that is gone is not used for another one."""
    names = Names()
    assert names.adopt(nn.ReLU()) == "ReLU"
    assert names.adopt(nn.ReLU()) == "ReLU#2"
    assert (names.module("ReLU"), names.roots()) == (None, {})


def test_a_module_at_the_address_of_another_has_its_own_name():
    """The name goes with the module, so nothing is left for whatever is made in its place."""
    names, given = Names(), []
    for _ in range(50):
        model = nn.Sequential(nn.ReLU())
        given += [names.adopt(model), names.of(model[0])]
        del model
    assert len(set(given)) == 100


def test_a_module_put_in_the_place_of_another_outlives_it():
    """It has the same name, which does not go with the other one."""
    names, model = Names(), nn.Sequential(nn.ReLU())
    names.adopt(model)
    old, model[0] = model[0], nn.Tanh()
    assert names.adopt(model[0], around=[model]) == names.of(old) == "Sequential.0"
    del old
    assert names.module("Sequential.0") is model[0]


def test_nothing_is_kept_of_modules_that_are_gone():
    """Or a run that makes new modules all the time would fill the memory."""
    names = Names()
    names.adopt(nn.Sequential(nn.ReLU()))
    assert (names._names, names._modules, names._roots) == ({}, {}, {})


def test_owner_is_the_first_that_registers_it(mlp):
    """A tied parameter has the first owner; a stranger has none."""
    mlp.b.weight = mlp.a.weight
    names = Names()
    names.adopt(mlp)
    assert names.owner(mlp.b.weight) is mlp.a
    assert names.owner(torch.ones(1)) is None


def test_nothing_is_kept_of_a_parameter_that_is_gone():
    """Or a run that makes new parameters all the time would fill the memory."""
    names, module = Names(), nn.Linear(2, 2, bias=False)
    names.adopt(module)
    assert names.owner(module.weight) is module
    module.weight = None
    assert not names._owners


def test_two_threads_name_two_roots(monkeypatch, meanwhile):
    """Of one class, and each when the other is about to."""
    names, first, second = Names(), nn.Sequential(), nn.Sequential()
    monkeypatch.setattr(_names, "walk", meanwhile.at(walk, lambda: names.adopt(second)))
    names.adopt(first)
    meanwhile.ends()
    assert (names.of(first), names.of(second)) == ("Sequential", "Sequential#2")

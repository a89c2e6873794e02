"""Names: walking, cycles, identity, owners."""

from __future__ import annotations

import torch
from torch import nn

from mod_tracker._names import Names, key_below, walk


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

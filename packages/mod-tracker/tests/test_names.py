"""Names of modules, and owners of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mod_tracker import ModTracker, _names
from mod_tracker._names import Names, keys_below, walk
from mod_tracker._torch_compat import unwrap


def test_walk_agrees_with_named_modules(mlp):
    """The same keys in the same order, each module once."""
    model = nn.Sequential(mlp, nn.ModuleDict({"x": mlp, "y": nn.ReLU()}))
    assert [key for key, _ in walk(model)] == [key for key, _ in model.named_modules()]


def test_walk_and_search_end_on_cycles(mlp):
    """A module that contains its parent does not loop forever."""
    model = nn.Sequential(mlp)
    mlp.add_module("parent", model)
    assert [key for key, _ in walk(model)] == ["", "0", "0.a", "0.b"]
    assert keys_below(model)[id(mlp.b)] == "0.b"


def test_shortest_key_is_found(mlp):
    """A shared module is reached by its shortest path."""
    model = nn.Sequential(nn.Sequential(mlp.a), mlp.a)
    assert keys_below(model)[id(mlp.a)] == "1"


class Stack(nn.Module):
    """Calls the modules of a list; the list itself is not called."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        """Run them in order."""
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("container", [Stack, nn.Sequential])
def test_naming_takes_linear_time(container, monkeypatch):
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


def test_called_as_follows_the_model(x):
    """Names stay correct after a module is added to a list or moved in it."""
    model, seen, tracker = Stack(nn.ReLU(), nn.Tanh()), [], ModTracker()
    tracker.register_user_hooks(lambda *_: seen.append(tracker.called_as))
    with tracker:
        model(x)
        model.layers.append(nn.Sigmoid())
        model(x)
    assert seen[-1] == "Stack.layers.2"
    assert seen[1:3] == ["Stack.layers.0", "Stack.layers.1"]


def test_label_of_a_dead_model_is_not_reused():
    names = Names()
    assert names.adopt(nn.ReLU()) == "ReLU"
    assert names.adopt(nn.ReLU()) == "ReLU#2"
    assert (names.module("ReLU"), names.roots()) == (None, {})


def test_module_at_a_reused_address_has_its_own_name():
    names, given = Names(), []
    for _ in range(50):
        model = nn.Sequential(nn.ReLU())
        given += [names.adopt(model), names.of(model[0])]
        del model
    assert len(set(given)) == 100


def test_replaced_module_keeps_the_name():
    names, model = Names(), nn.Sequential(nn.ReLU())
    names.adopt(model)
    old, model[0] = model[0], nn.Tanh()
    assert names.adopt(model[0], around=[model]) == names.of(old) == "Sequential.0"
    del old
    assert names.module("Sequential.0") is model[0]


def test_names_of_dead_modules_are_dropped():
    names = Names()
    names.adopt(nn.Sequential(nn.ReLU()))
    assert (names._names, names._modules) == ({}, {})


def test_owner_is_the_first_that_registers_it(mlp):
    """A tied parameter belongs to its first owner; an unknown parameter has none."""
    mlp.b.weight = mlp.a.weight
    names = Names()
    names.adopt(mlp)
    assert names.owner(mlp.b.weight) is mlp.a
    assert names.owner(torch.ones(1)) is None


def test_owners_are_found_by_one_walk(monkeypatch):
    """A walk for each parameter would take quadratic time."""
    names, walks = Names(), []
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(20)])
    names.adopt(model)
    monkeypatch.setattr(_names, "walk", lambda *args: walks.append(1) or walk(*args))
    assert [names.owner(layer.bias) for layer in model] == [*model]
    assert len(walks) == 1


def test_owners_of_dead_parameters_are_dropped():
    names, module = Names(), nn.Linear(2, 2, bias=False)
    names.adopt(module)
    assert names.owner(module.weight) is module
    module.weight = None
    assert not len(names._owners)


def test_two_threads_name_two_roots(monkeypatch, meanwhile):
    names, first, second = Names(), nn.Sequential(), nn.Sequential()
    monkeypatch.setattr(_names, "walk", meanwhile.at(walk, lambda: names.adopt(second)))
    names.adopt(first)
    meanwhile.ends()
    assert (names.of(first), names.of(second)) == ("Sequential", "Sequential#2")


def test_named_root_names_its_parts_before_they_are_called(mlp, x):
    tracker, names = ModTracker(mlp), []
    tracker.register_user_hooks(lambda *_: names.append(tracker.current))
    with tracker:
        mlp.a(x)
        mlp(x)
    assert names == ["MLP.a", "MLP", "MLP.a", "MLP.b"]


def test_name_is_root_label_and_state_dict_prefix(x):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    with ModTracker() as tracker:
        model(x)
    names = [tracker.get_known_fqn(m) for m in (model[0], model[1][0])]
    keys = {key.rpartition(".")[0] for key in model.state_dict()}
    assert {name.partition(".")[2] for name in names} == keys


class Square(nn.Module):
    def forward(self, x):
        return x * x


def test_deleted_module_keeps_its_name(x, log_ops):
    """The hook gets None for a freed module, but the stack still has its name."""
    tracker, seen = ModTracker(), []
    tracker.register_user_hooks(
        pre_bw_hook=lambda module, _: seen.append((module, tracker.current, tracker.call.module))
    )
    with tracker:
        model = Square()
        loss = model(x).sum()
        del model
    entries = log_ops(tracker, loss.backward)
    assert {stack for _, _, stack in entries} == {("Square",)}
    assert seen == [(None, "Square", None)]

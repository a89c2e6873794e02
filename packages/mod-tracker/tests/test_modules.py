"""What modules hold, which of them the compiler made, and how torch calls them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

import pytest
import torch
from torch import nn

import mod_tracker._torch_compat as compat
from mod_tracker import ModTracker


def test_children_in_a_table_of_another_kind_are_all_there():
    """As of models that an older torch has pickled: no method is asked, which leaves some out."""
    shared = nn.ReLU()
    model = nn.Sequential(shared, shared)
    model.register_module("none", None)
    model._modules = OrderedDict(model._modules)
    assert dict(compat.children_of(model)) == {"0": shared, "1": shared, "none": None}


def test_children_and_parameters_without_the_private_tables():
    """The public methods stand in."""
    model = nn.Sequential(nn.Linear(2, 2))
    tables = {name: model.__dict__[name] for name in ("_modules", "_parameters")}

    class Bare(nn.Module):
        def named_children(self):
            return iter([("0", model[0])])

        def named_parameters(self, *args, **kwargs):
            return iter([("w", model[0].weight)])

    bare = Bare()
    assert compat.children_of(model) == tables["_modules"]
    for name in tables:
        del bare.__dict__[name]
    assert compat.children_of(bare) == {"0": model[0]}
    assert list(compat.parameters_of(bare)) == ["w"]


def test_only_what_a_module_itself_registers_is_listed():
    """Its public methods would list what the modules below it register, too."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    for table in ("_parameters", "_buffers"):
        del model.__dict__[table]
    asked = []
    for method in ("named_parameters", "named_buffers"):
        model.__dict__[method] = lambda recurse=True: asked.append(recurse) or ()
    assert (compat.parameters_of(model), compat.buffers_of(model)) == ({}, {})
    assert asked == [False, False]


def test_module_that_was_not_initialised_fails_as_ever():
    """The error is the one without a tracker."""

    class Forgetful(nn.Module):
        def __init__(self):
            pass

        def forward(self, x):
            return x

    errors = []
    for context in (contextlib.nullcontext(), ModTracker()):
        with context, pytest.raises(AttributeError) as caught:
            Forgetful()(torch.ones(1))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert compat.buffers_of(Forgetful()) == {}


def test_module_behind_a_compiled_one_is_the_users():
    """And nothing is behind one that has a part of that name."""
    model, holder = nn.Linear(2, 2), nn.Module()
    holder.register_module("_orig_mod", model)
    assert compat.wrapped_by_compile(torch.compile(model, backend="eager")) is model
    assert compat.wrapped_by_compile(model) is compat.wrapped_by_compile(holder) is None

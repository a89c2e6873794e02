"""What modules hold, which of them the compiler made, and how torch calls them."""

from __future__ import annotations

import contextlib
import copy
import pickle
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


def test_children_are_the_table_itself_and_no_copy():
    """Every call asks; a child that is added or taken away is seen at once."""
    model = nn.Sequential(nn.ReLU())
    children = compat.children_of(model)
    model.append(nn.Tanh())
    assert children is model._modules
    assert list(children) == ["0", "1"]


def test_shared_child_is_listed_under_every_name_and_none_too():
    """Which `named_children`, that a module may override besides, would leave out."""

    class Hides(nn.Module):
        def named_children(self):
            raise ZeroDivisionError

    model, shared = Hides(), nn.ReLU()
    model.a = model.b = shared
    model.register_module("none", None)
    assert dict(compat.children_of(model)) == {"a": shared, "b": shared, "none": None}


def test_parameters_and_buffers_are_the_modules_own(x):
    """Those that are None are listed, those of children are not."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("none", None)
    model.register_buffer("mask", x.detach())
    model.register_buffer("gone", None, persistent=False)
    assert dict(compat.parameters_of(model)) == {"none": None}
    assert dict(compat.buffers_of(model)) == {"mask": model.mask, "gone": None}


def test_scripted_module_has_what_it_was_made_of():
    """Its tables are of a kind of their own."""
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    children = compat.children_of(model)
    assert list(children) == ["0", "1"]
    assert sorted(compat.parameters_of(children["0"])) == ["bias", "weight"]
    assert "running_mean" in compat.buffers_of(children["1"])


def test_lists_of_modules_that_raise_are_not_hidden():
    """Only where `nn.Module.__init__` has not run is there nothing to list."""

    class Raises(nn.Module):
        def named_children(self):
            raise ZeroDivisionError

    model = Raises()
    del model.__dict__["_modules"]
    with pytest.raises(ZeroDivisionError):
        compat.children_of(model)


def test_module_that_was_not_initialised_holds_nothing():
    """Asked before its call says what is missing."""
    bare = nn.ReLU.__new__(nn.ReLU)
    assert (compat.children_of(bare), compat.parameters_of(bare)) == ({}, {})
    assert compat.buffers_of(bare) == {}


def test_users_class_of_the_compilers_name_hides_nothing():
    """Without the part that the compiler's has, there is nothing behind it."""

    class OptimizedModule(nn.Module):
        pass

    assert compat.wrapped_by_compile(OptimizedModule()) is None


def traced():
    """A graph that the user traced."""
    return torch.fx.symbolic_trace(nn.Linear(2, 2))


def test_graph_that_the_user_traced_is_a_module_of_the_users():
    """Copied and pickled as well; and any other module is no graph."""
    graph = traced()
    for module in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), nn.Linear(2, 2)):
        assert not compat.is_compiled_graph(module)


@pytest.mark.parametrize("mark", ["id", "reason", "boxed"])
def test_graph_that_the_compiler_made_is_known_by_any_of_its_marks(mark):
    """Dynamo's has an id or a reason, AOTAutograd's takes its inputs in a list."""
    graph = traced()
    if mark == "id":
        graph.meta["dynamo_compile_id"] = None
    elif mark == "reason":
        graph.compile_subgraph_reason = None
    else:
        graph.graph.set_codegen(type("_BoxedCodeGen", (torch.fx.graph.CodeGen,), {})())
    assert compat.is_compiled_graph(graph)


@pytest.mark.parametrize("lost", ["meta", "graph"])
def test_graph_that_has_lost_its_notes_is_the_users(lost):
    """Of an older torch, or taken away: calling the module is not what fails."""
    graph = traced()
    if lost == "meta":
        del graph.meta
    else:
        del graph.graph._codegen
    assert not compat.is_compiled_graph(graph)


def test_graphs_the_compiler_makes_are_known(fresh_compiler):
    """Those that a backend is given by Dynamo."""
    given = []

    def backend(graph, inputs):
        given.append(graph)
        return graph.forward

    torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    assert [compat.is_compiled_graph(graph) for graph in given] == [True]

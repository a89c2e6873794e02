"""Private torch names: present on this torch, or the package does without."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies import _torch_compat as compat
from sac_policies._tensors import tensors_in
from sac_policies._torch_compat import _storages


@pytest.fixture
def without(monkeypatch):
    """Load the compat file again as a torch without one private name would."""

    def load(*names):
        folders = list(compat.__path__)
        spec = importlib.util.spec_from_file_location(
            "compat_without", compat.__file__, submodule_search_locations=folders
        )
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "compat_without", module)
        monkeypatch.setitem(sys.modules, "compat_without._storages", _storages)
        spec.loader.exec_module(module)
        monkeypatch.setattr(module, "_torch", {**module._torch, **dict.fromkeys(names)})
        return module

    return load


def test_hooks_are_found(without):
    """The innermost saved-tensor hooks are returned, None without any."""
    assert compat.saved_tensor_hooks() is None

    def pack(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert compat.saved_tensor_hooks() == (pack, pack)
        assert without("top_hooks").saved_tensor_hooks() is None


def test_alias_shares_the_version_counter_below_autograd():
    """Where an engine keeps values: a later change of what the user got is seen on what is kept."""
    kept = []

    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            kept.append(compat.alias(out))
            return out

    x = torch.ones(2, requires_grad=True)
    with Below():
        out = x.exp()
    before = kept[0]._version
    with torch.no_grad():
        out.add_(1)
    assert kept[0]._version == out._version > before


def test_alias_shares_the_version_counter():
    """An in-place change of the original is seen on the alias."""
    tensor = torch.ones(2)
    held = compat.alias(tensor)
    tensor.add_(1)
    assert held._version == tensor._version
    assert not held.requires_grad


def test_storage_key_is_that_of_the_storage():
    """A view shares it; another empty tensor does not."""
    tensor, empty, other = torch.ones(4), torch.ones(0), torch.ones(0)
    assert compat.storage_key(tensor) == compat.storage_key(tensor[1:])
    assert compat.storage_key(empty) != compat.storage_key(other)


def test_nothing_is_traced_here(without):
    """Eager code is not traced, and there is no graph."""
    assert not compat.is_traced()
    assert compat.traced_graph() is None
    for name in ("mode_of_key", "mode_keys"):
        assert not without(name).is_traced()
        assert without(name).traced_graph() is None


def test_traced_graph_is_the_one_being_recorded():
    """Inside make_fx there is a graph with the nodes so far."""
    from torch.fx.experimental.proxy_tensor import make_fx

    sizes = []

    def function(x):
        x = x.sin()
        assert compat.is_traced()
        sizes.append(len(compat.traced_graph().nodes))
        return x

    make_fx(function)(torch.ones(2))
    assert sizes == [2]


def test_func_transform_is_seen(without):
    """torch.func.grad is noticed where torch tells."""
    seen = []

    def function(x):
        seen.append((compat.in_func_transform(), without("functorch_level").in_func_transform()))
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [(True, False)]
    assert not compat.in_func_transform()


def test_operators_are_listed(without):
    """Registered names have a namespace; without the list there are no suggestions."""
    assert "aten::mm" in set(compat.registered_operators())
    assert not list(without("op_names").registered_operators())


def test_dispatch_is_installed_either_way(without):
    """A mode works with its code marked, and with torch's wrapper."""
    for module in (compat, *map(without, ("set_strategy", "strategy", "action"))):

        class Mode(torch.utils._python_dispatch.TorchDispatchMode):
            pass

        calls = []

        def dispatch(self, op, types, args=(), kwargs=None, calls=calls):
            calls.append(str(op))
            return op(*args, **(kwargs or {}))

        module.install_dispatch(Mode, dispatch)
        with Mode():
            torch.ones(2).sin()
        assert calls == ["aten.ones.default", "aten.sin.default"]


def test_no_module_is_running_here():
    """Outside of tracing there is no module path."""
    assert compat.running_modules() == ""


def test_running_module_is_the_innermost(monkeypatch):
    """While a module's operators are traced, its path is known."""
    stack = {"1": ("layers", torch.nn.Sequential), "2": ("layers.0", torch.nn.Linear)}
    monkeypatch.setitem(torch.fx.traceback.current_meta, "nn_module_stack", stack)
    assert compat.running_modules() == "layers.0"


def test_there_is_no_backward_outside_of_one(without):
    """As torch has it, and where it cannot tell."""
    assert compat.backward_id() == without("backward_id").backward_id() == -1
    assert not compat.after_backward(lambda: None)


def test_tensors_are_found_in_nested_containers(without):
    """In order, and without torch's own function in tuples, lists and dicts."""
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    nested = {"a": [one, (two, "text")], "b": three, "c": None}
    for module in (compat, without("tree_leaves")):
        leaves = module.tree_leaves(nested)
        assert [t.numel() for t in leaves if isinstance(t, torch.Tensor)] == [1, 2, 3]
    assert [t.numel() for t in tensors_in(nested)] == [1, 2, 3]


def test_fake_tensors_have_no_data(without):
    """They are told apart where torch names them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    assert compat.is_fake(fake)
    assert not compat.is_fake(torch.ones(2))
    assert not without("fake_tensor").is_fake(fake)

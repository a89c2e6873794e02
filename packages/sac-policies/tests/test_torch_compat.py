"""Private names of torch do what the package needs of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies import _torch_compat as compat


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


def test_missing_name_is_refused_in_one_sentence():
    """With the versions that have it."""
    with pytest.raises(ImportError, match=r"needs torch\._C\.gone, which torch .* between 2\.9"):
        compat.find("_C.gone")


def test_nothing_is_traced_here():
    """Eager code is not traced, and there is no graph."""
    assert not compat.is_traced()
    assert compat.traced_graph() is None


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


def test_func_transform_is_seen():
    """Inside torch.func.grad, and not after it."""
    seen = []

    def function(x):
        seen.append(compat.in_func_transform())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert seen == [True]
    assert not compat.in_func_transform()


def test_running_module_is_the_innermost(monkeypatch):
    """While a module's operators are traced, its path is known."""
    stack = {"1": ("layers", torch.nn.Sequential), "2": ("layers.0", torch.nn.Linear)}
    monkeypatch.setitem(torch.fx.traceback.current_meta, "nn_module_stack", stack)
    assert compat.running_modules() == "layers.0"


def test_there_is_no_backward_outside_of_one():
    """Nothing can be called at its end."""
    assert compat.backward_id() == -1
    assert not compat.after_backward(lambda: None)


def test_fake_tensors_have_no_data():
    """Others have."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    assert compat.is_fake(fake)
    assert not compat.is_fake(torch.ones(2))

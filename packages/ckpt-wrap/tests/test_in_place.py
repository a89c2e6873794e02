"""The in-place layer leaves names, types, copies and pickles of a module unchanged."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.nn.modules.lazy import LazyModuleMixin

from ckpt_wrap import (
    checkpoint_,
    checkpoint_wrapper,
    offload_,
    offload_stats,
    offload_wrapper,
    unwrap,
)


class Scaled(nn.Module):
    """Defined at module level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x, scale=1.0):
        """Scale."""
        return torch.tanh(self.inner(x) * self.factor * scale)


class Static(nn.Module):
    """Has a forward that is not a plain method."""

    @staticmethod
    def forward(x):
        return torch.tanh(x)


class Strict(nn.Module):
    """Refuses to set attributes after construction."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        vars(self)["made"] = True

    def __setattr__(self, name, value):
        if "made" in vars(self):
            raise RuntimeError(f"{name} is fixed")
        super().__setattr__(name, value)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Slotted(nn.Module):
    """Keeps an attribute in a slot."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2

    def forward(self, x):
        return torch.tanh(x) * self.scale


@pytest.mark.parametrize("change", [checkpoint_, offload_])
def test_names_types_and_signature_stay(change):
    """Names, class name, `isinstance`, repr and signature are unchanged."""
    plain = nn.Sequential(Scaled(), nn.BatchNorm1d(4))
    changed = copy.deepcopy(plain)
    assert change(changed[0]) is changed[0]
    change(changed)
    for names in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        expected = [name for name, _ in getattr(plain, names)()]
        assert [name for name, _ in getattr(changed, names)()] == expected
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert changed.state_dict()._metadata == plain.state_dict()._metadata
    assert isinstance(changed[0], Scaled)
    assert repr(changed) == repr(plain)
    assert inspect.signature(changed[0].forward) == inspect.signature(plain[0].forward)
    assert changed[0].forward.__doc__ == "Scale."


@pytest.mark.parametrize("change", [checkpoint_, offload_])
def test_copies_and_pickles_are_changed_too_and_independent(change):
    """deepcopy, copy, pickle and torch.save keep the behaviour; each copy has its own weights."""
    original = change(Scaled())
    buffer = io.BytesIO()
    torch.save(original, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(original),
        copy.copy(original),
        pickle.loads(pickle.dumps(original)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in copies:
        assert type(twin) is type(original)
        twin(torch.ones(1, 4)).sum().backward()
        unwrap(twin)
        assert type(twin) is Scaled
    assert type(original) is not Scaled
    copies[0].zero_grad()
    original.zero_grad()
    copies[0](torch.ones(1, 4)).sum().backward()
    assert original.inner.weight.grad is None


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, offload_wrapper, torchs.checkpoint_wrapper])
def test_unwrap_takes_every_layer_off(wrap):
    """After unwrap, the model has its original objects and classes, without leftovers."""
    block, inner = Scaled(), nn.Linear(4, 4)
    model = nn.Sequential(block, nn.Sequential(inner))
    keys = {module: set(vars(module)) for module in model.modules()}
    checkpoint_(offload_(block))
    model[1][0] = wrap(wrap(inner))
    model.alias = model[1] = wrap(model[1])
    assert unwrap(wrap(model)) is model
    assert model[0] is block
    assert model[1][0] is inner
    assert model.alias is model[1]
    del model.alias
    assert [type(m) for m in model.modules()] == [
        nn.Sequential,
        Scaled,
        nn.Linear,
        nn.Sequential,
        nn.Linear,
    ]
    assert {module: set(vars(module)) for module in model.modules()} == keys


def test_the_last_options_count():
    """A second `checkpoint_` replaces the options and does not nest."""
    module = checkpoint_(checkpoint_(Scaled()), early_stop=False)
    assert type(module).__mro__[1] is Scaled
    assert module._ckpt_wrap.checkpoint.options.early_stop is False


def test_a_changed_class_has_the_names_of_its_base():
    """Other code reads the class's name, module and qualified name."""

    class Layer(nn.Linear):
        """A class defined inside a function."""

    changed = type(checkpoint_(Layer(2, 2)))
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(changed, name) == getattr(Layer, name)


def test_subclasses_are_made_once():
    """Two modules of one class get the same subclass, so they share compiled code and pickles."""
    assert type(checkpoint_(Scaled())) is type(offload_(Scaled()))


def test_forward_set_on_the_instance_later_wins():
    """A `forward` set on the instance afterwards is called."""
    module = checkpoint_(nn.Linear(2, 2))
    inner = module.forward
    module.forward = lambda x: inner(x) * 0
    assert not module(torch.ones(1, 2)).any()


def test_the_exact_class_is_a_subclass():
    """Tools that look up the exact class skip the module, as the README says."""
    module = checkpoint_(nn.Linear(2, 2))
    assert type(module) is not nn.Linear
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(module), {nn.Linear})
    assert type(model[0]) is type(module)


@pytest.mark.parametrize("make", [Static, Strict, Slotted])
@pytest.mark.parametrize("change", [checkpoint_, offload_, checkpoint_wrapper, offload_wrapper])
def test_unusual_classes_work_and_come_back(make, change):
    """They run with and without gradients; `unwrap` returns the object with its original class."""
    module = make()
    changed = change(module)
    changed(torch.ones(2, 4, requires_grad=True)).sum().backward()
    with torch.no_grad():
        assert changed(torch.ones(2, 4)).shape == (2, 4)
    assert unwrap(changed) is module
    assert type(module) is make


@pytest.mark.parametrize("change", [checkpoint_, offload_])
def test_a_new_instance_of_the_class_of_a_changed_module_is_plain(change):
    """Some code builds a layer like another one by calling `type(module)`."""
    changed = change(nn.Linear(2, 3))
    new = type(changed)(changed.in_features, changed.out_features)
    new.load_state_dict(changed.state_dict())
    x = torch.ones(1, 2)
    assert torch.equal(new(x), nn.functional.linear(x, changed.weight, changed.bias))


def test_a_lazy_module_can_change_when_it_has_its_parameters():
    """Both for lazy modules that change their class on the first call and for others."""
    module = nn.LazyLinear(2)
    module(torch.ones(1, 2))

    class Ready(LazyModuleMixin, nn.Linear):
        cls_to_become = None

    for each in (module, Ready(2, 2)):
        assert checkpoint_(each) is each


def _with_hooks(block):
    """Set a forward on the instance, as accelerate's hooks do."""
    block._old_forward = block.forward
    block.before = 0.5

    def new_forward(module, *args, **kwargs):
        return module._old_forward(*(arg * module.before for arg in args), **kwargs)

    block.forward = partial(new_forward, block)
    return block


@pytest.mark.parametrize("twin", [lambda m: m, copy.deepcopy], ids=["itself", "copy"])
@pytest.mark.parametrize("change", [checkpoint_, "offload"])
def test_a_forward_of_the_instance_runs_through_it(change, twin, tmp_path, block_class):
    """Also in a deep copy, which has its own weights; `unwrap` gives the forward back."""
    torch.manual_seed(0)
    plain = _with_hooks(block_class().eval())
    block = copy.deepcopy(plain)
    own = block.forward
    if change == "offload":
        offload_(block, to=tmp_path, min_bytes=1)
    else:
        checkpoint_(checkpoint_(block))
    found = twin(block)
    runs = []
    found.linear.register_forward_hook(lambda *_: runs.append(1))
    x = torch.randn(4, 8, requires_grad=True)
    for module in (plain, found):
        module(x).sum().backward()
    assert torch.equal(found.linear.weight.grad, plain.linear.weight.grad)
    assert len(runs) == (1 if change == "offload" else 2)
    if change == "offload":
        assert offload_stats(found).copies_out > 0
    with torch.no_grad():
        assert torch.equal(found(x), plain(x))
    assert unwrap(block).forward is own

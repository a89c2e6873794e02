"""The in-place layer: what stays as it was."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.nn.utils import prune

from ckpt_wrap import (
    ModuleError,
    checkpoint_,
    checkpoint_layers_,
    checkpoint_wrapper,
    offload_,
    offload_wrapper,
    unwrap,
)


class Scaled(nn.Module):
    """At module level, so that it pickles."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x, scale=1.0):
        """Scale."""
        return torch.tanh(self.inner(x) * self.factor * scale)


class OnlyHolds(nn.Module):
    """A container of the user's own: no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


CONTAINERS = {
    "list": lambda: nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]),
    "dict": lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU()}),
    "parameters": lambda: nn.ParameterList([torch.zeros(2)]),
    "own": OnlyHolds,
}


@pytest.mark.parametrize("change", [checkpoint_, offload_])
def test_names_types_and_signature_stay(change):
    """Names of everything, class name, `isinstance`, repr and signature are as before."""
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


def test_sequential_stays_a_container():
    """Length, iteration, membership, indexing and deletion work as before."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    changed = checkpoint_(copy.deepcopy(plain))
    assert len(changed) == len(plain)
    assert [str(item) for item in changed] == [str(item) for item in plain]
    assert isinstance(changed[0], nn.Linear)
    assert changed[0] in changed
    changed[0] = nn.Tanh()
    assert isinstance(changed[0], nn.Tanh)
    del changed[0]
    assert len(changed) == 1


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("change", [checkpoint_, offload_])
def test_container_without_forward_is_refused(change, kind):
    """Its forward never runs, so nothing would be saved; it stays as it is."""
    container = CONTAINERS[kind]()
    before = type(container)
    with pytest.raises(ModuleError, match=r"has no forward.*Wrap its items instead, one by one"):
        change(container)
    assert type(container) is before


def test_selecting_a_container_changes_nothing():
    """The error names the container; modules before it stay as they are."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ModuleError, match=r"module '1' \(ModuleList\) has no forward"):
        checkpoint_layers_(model, lambda *_: True)
    assert type(model[0]) is nn.Linear


def test_swapping_a_layer_changes_forward_and_state_dict():
    """A layer set after the fact is the one that runs and is saved."""
    model = nn.Sequential(checkpoint_(Scaled()))
    zero = nn.Linear(4, 4)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    model.set_submodule("0.inner", zero)
    assert not model(torch.ones(1, 4)).any()
    assert not model.state_dict()["0.inner.weight"].any()
    assert model.get_buffer("0.factor") == 2.0


def test_prune_works_and_comes_off():
    """Its hooks run, and `unwrap` gives the class back."""
    x = torch.ones(1, 3, requires_grad=True)
    pruned = checkpoint_(nn.Linear(3, 3))
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    pruned(x).sum().backward()
    assert (pruned.weight == 0).any()
    prune.remove(pruned, "weight")
    assert type(unwrap(pruned)) is nn.Linear


@pytest.mark.parametrize("change", [checkpoint_, offload_])
def test_copies_and_pickles_are_changed_too_and_independent(change):
    """deepcopy, copy, pickle and torch.save keep the behaviour; weights are their own."""
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
    """After unwrap the model has its own objects and classes, and no trace."""
    block, inner = Scaled(), nn.Linear(4, 4)
    model = nn.Sequential(block, nn.Sequential(inner))
    keys = {module: set(vars(module)) for module in model.modules()}
    checkpoint_(offload_(block))
    model[1][0] = wrap(wrap(inner))
    model[1] = wrap(model[1])
    assert unwrap(wrap(model)) is model
    assert model[0] is block
    assert model[1][0] is inner
    assert [type(m) for m in model.modules()] == [
        nn.Sequential,
        Scaled,
        nn.Linear,
        nn.Sequential,
        nn.Linear,
    ]
    assert {module: set(vars(module)) for module in model.modules()} == keys


def test_the_last_options_count():
    """Called again, `checkpoint_` replaces options and does not nest."""
    module = checkpoint_(checkpoint_(Scaled()), early_stop=False)
    assert type(module).__mro__[1] is Scaled
    assert module._ckpt_wrap.checkpoint.options.early_stop is False


def test_subclasses_are_made_once():
    """Two modules of a class get the same class, so that they compile and pickle alike."""
    assert type(checkpoint_(Scaled())) is type(offload_(Scaled()))


def test_forward_set_on_the_instance_later_wins():
    """Code that patches `forward` on the instance afterwards is respected, as always."""
    module = checkpoint_(nn.Linear(2, 2))
    inner = module.forward
    module.forward = lambda x: inner(x) * 0
    assert not module(torch.ones(1, 2)).any()


def test_the_exact_class_is_a_subclass():
    """As the README says: tools that look classes up exactly skip the module."""
    module = checkpoint_(nn.Linear(2, 2))
    assert type(module) is not nn.Linear
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(module), {nn.Linear})
    assert type(model[0]) is type(module)

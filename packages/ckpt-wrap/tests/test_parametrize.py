"""`torch.nn.utils.parametrize` on modules changed in place, and on nested wrappers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from ckpt_wrap import (
    CheckpointImpl,
    CheckpointWrapper,
    ModuleError,
    checkpoint_,
    checkpoint_wrapper,
    offload_,
    offload_wrapper,
    unwrap,
)

IN_PLACE = [checkpoint_, offload_, lambda m: offload_(checkpoint_(m))]
NESTED = [
    checkpoint_wrapper,
    lambda m: checkpoint_wrapper(m, CheckpointImpl.REENTRANT),
    offload_wrapper,
    lambda m: checkpoint_wrapper(offload_wrapper(m)),
]


class Double(nn.Module):
    """Twice the tensor; the way back halves it."""

    def forward(self, tensor):
        return tensor * 2

    def right_inverse(self, tensor):
        return tensor / 2


@pytest.fixture
def linear():
    """A layer with weights of its own."""
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def _gradients(module):
    x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
    module.zero_grad()
    torch.tanh(module(x)).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def _parametrized(module, *names):
    for name in names:
        parametrize.register_parametrization(module, name, Double())
    return module


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_the_gradients_are_the_plain_modules(linear, change, when, equal):
    """Whichever came first; two tensors, and one of them twice."""
    plain = _parametrized(copy.deepcopy(linear), "weight", "bias", "weight")
    if when == "before":
        module = change(_parametrized(linear, "weight", "bias", "weight"))
    else:
        module = _parametrized(change(linear), "weight", "bias", "weight")
    assert equal(_gradients(plain), _gradients(module))
    assert list(module.state_dict()) == list(plain.state_dict())
    assert parametrize.is_parametrized(module, "weight")
    assert isinstance(module, nn.Linear)


@pytest.mark.parametrize("first", ["unwrap", "remove"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_both_come_off_in_either_order(linear, change, when, first):
    """The class is the module's own again, and so are its attributes."""
    attributes = set(vars(linear))
    weight = linear.weight
    module = change(_parametrized(linear, "weight"))
    if when == "after":
        parametrize.remove_parametrizations(module, "weight")
        module = _parametrized(module, "weight")
    steps = [
        lambda: unwrap(module),
        lambda: parametrize.remove_parametrizations(module, "weight"),
    ]
    for step in steps if first == "unwrap" else reversed(steps):
        step()
        _gradients(module)
    assert module is linear
    assert type(module) is nn.Linear
    assert set(vars(module)) == attributes
    assert module.weight is weight


@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_the_change_outlives_the_parametrization(linear, change):
    """Removed, the module is as it was after the change: it does what it did, and pickles."""
    expected = type(change(copy.deepcopy(linear)))
    module = _parametrized(change(_parametrized(linear, "weight")), "bias")
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(module, name)
    assert type(module) is expected
    assert type(pickle.loads(pickle.dumps(module))) is expected


@pytest.mark.parametrize("when", ["before", "after"])
def test_in_place_copies_are_independent(linear, when, equal):
    """A deepcopy is changed and parametrized too; freeing it leaves the original alone."""
    if when == "before":
        module = checkpoint_(_parametrized(linear, "weight"))
    else:
        module = _parametrized(checkpoint_(linear), "weight")
    twin = copy.deepcopy(module)
    assert equal(_gradients(module), _gradients(twin))
    parametrize.remove_parametrizations(unwrap(twin), "weight")
    assert type(twin) is nn.Linear
    assert parametrize.is_parametrized(module)
    assert vars(module)["_ckpt_wrap"].checkpoint is not None
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(module)


@pytest.mark.parametrize("wrap", NESTED)
def test_wrapper_cannot_be_parametrized(linear, wrap):
    """The error says where to register; on the wrapped module it works, and comes off again."""
    with pytest.raises(ModuleError, match="Register the parametrization before wrapping"):
        _parametrized(wrap(copy.deepcopy(linear)), "weight")
    plain, wrapped = _parametrized(copy.deepcopy(linear), "weight"), wrap(linear)
    _parametrized(linear, "weight")
    assert all(map(torch.equal, _gradients(plain), _gradients(wrapped)))
    parametrize.remove_parametrizations(linear, "weight")
    assert type(linear) is nn.Linear


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm, orthogonal])
def test_torchs_own_parametrizations_work(norm, linear, equal):
    """On a linear layer; the gradients are the plain layer's."""
    torch.manual_seed(1)
    plain = norm(copy.deepcopy(linear))
    torch.manual_seed(1)
    changed = norm(checkpoint_(linear))
    plain.eval()
    changed.eval()
    assert equal(_gradients(plain), _gradients(changed))


def test_a_class_that_is_set_otherwise_is_the_wrappers_own(linear):
    """Only parametrize is passed on: others, such as FSDP2, change the wrapper's class."""
    wrapped = checkpoint_wrapper(linear)
    kind = type("Mine", (CheckpointWrapper,), {})
    wrapped.__class__ = kind
    assert type(wrapped) is wrapped.__class__ is kind
    assert type(linear) is nn.Linear

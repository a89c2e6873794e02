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
    CheckpointWrapper,
    ModuleError,
    checkpoint_,
    checkpoint_wrapper,
    offload_,
    offload_wrapper,
    unwrap,
)

IN_PLACE = [checkpoint_, offload_, lambda m: offload_(checkpoint_(m))]
NESTED = [checkpoint_wrapper, offload_wrapper, lambda m: checkpoint_wrapper(offload_wrapper(m))]


class Double(nn.Module):
    """Doubles the tensor; the right inverse halves it."""

    def forward(self, tensor):
        return tensor * 2

    def right_inverse(self, tensor):
        return tensor / 2


@pytest.fixture
def linear():
    """A linear layer with fixed weights."""
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


@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_the_gradients_are_the_plain_modules(linear, change, equal):
    """Two parametrized tensors, one of them twice; removal restores the checkpointed module."""
    plain = _parametrized(copy.deepcopy(linear), "weight", "bias", "weight")
    expected = type(change(copy.deepcopy(linear)))
    module = _parametrized(change(linear), "weight", "bias", "weight")
    assert equal(_gradients(plain), _gradients(module))
    assert list(module.state_dict()) == list(plain.state_dict())
    assert isinstance(module, nn.Linear)
    twin = copy.deepcopy(module)
    assert equal(_gradients(module), _gradients(twin))
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(module, name)
    assert type(module) is type(pickle.loads(pickle.dumps(module))) is expected
    assert type(unwrap(module)) is nn.Linear
    assert parametrize.is_parametrized(twin)


@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_unwrapped_first_the_module_works_as_plain(linear, change, equal):
    """The class keeps the checkpointing subclass as a base, which does nothing."""
    plain = copy.deepcopy(linear)
    module = unwrap(_parametrized(change(linear), "weight"))
    assert "_ckpt_wrap" not in vars(module)
    parametrize.remove_parametrizations(module, "weight")
    _gradients(plain)
    _gradients(module)
    assert equal([plain.weight.grad, plain.bias.grad], [module.weight.grad, module.bias.grad])


@pytest.mark.parametrize("change", [checkpoint_, offload_])
def test_a_parametrized_module_is_refused(linear, change):
    """Removing the parametrization would remove the wrong class; it is accepted inside a module."""
    kind = type(_parametrized(linear, "weight"))
    with pytest.raises(ModuleError, match=r"is parametrized.*on the module that contains it"):
        change(linear)
    assert type(linear) is kind
    change(nn.Sequential(linear))(torch.ones(1, 3)).sum().backward()
    parametrize.remove_parametrizations(linear, "weight")
    assert type(linear) is nn.Linear


@pytest.mark.parametrize("wrap", NESTED)
def test_wrapped_module_can_be_parametrized(linear, wrap):
    """Registered on the wrapped module, before or after wrapping."""
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


def test_a_class_that_is_set_is_the_wrappers_own(linear):
    """FSDP2 also sets the class of a module."""
    wrapped = checkpoint_wrapper(linear)
    kind = type("Mine", (CheckpointWrapper,), {})
    wrapped.__class__ = kind
    assert type(wrapped) is wrapped.__class__ is kind
    assert type(linear) is nn.Linear

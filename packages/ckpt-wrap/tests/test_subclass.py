"""The class a module gets is made once, is not in the way, and goes again."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ckpt_wrap import (
    checkpoint_,
    checkpoint_wrapper,
    offload_,
    offload_wrapper,
    unwrap,
)


class Static(nn.Module):
    """A forward that is not a plain method."""

    @staticmethod
    def forward(x):
        return torch.tanh(x)


class Strict(nn.Module):
    """Refuses every attribute once it is made."""

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


@pytest.mark.parametrize("make", [Static, Strict, Slotted])
@pytest.mark.parametrize("change", [checkpoint_, offload_, checkpoint_wrapper, offload_wrapper])
def test_unusual_classes_work_and_come_back(make, change):
    """With and without gradients, and `unwrap` gives the object with its class."""
    module = make()
    changed = change(module)
    changed(torch.ones(2, 4, requires_grad=True)).sum().backward()
    with torch.no_grad():
        assert changed(torch.ones(2, 4)).shape == (2, 4)
    assert unwrap(changed) is module
    assert type(module) is make


@pytest.mark.parametrize("change", [checkpoint_, offload_])
def test_a_new_instance_of_the_class_of_a_changed_module_is_plain(change):
    """As code makes it that builds a layer like another."""
    changed = change(nn.Linear(2, 3))
    new = type(changed)(changed.in_features, changed.out_features)
    new.load_state_dict(changed.state_dict())
    x = torch.ones(1, 2)
    assert torch.equal(new(x), nn.functional.linear(x, changed.weight, changed.bias))


def test_a_changed_class_is_called_like_its_base():
    """Names and words of classes are data to others."""

    class Layer(nn.Linear):
        """Inside of a function."""

    changed = type(checkpoint_(Layer(2, 2)))
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(changed, name) == getattr(Layer, name)
    assert inspect.signature(changed.forward) == inspect.signature(Layer.forward)


def test_a_lazy_module_can_change_when_it_has_its_parameters():
    """Whether it is of another class by then or not."""
    module = nn.LazyLinear(2)
    module(torch.ones(1, 2))

    class Ready(LazyModuleMixin, nn.Linear):
        cls_to_become = None

    for each in (module, Ready(2, 2)):
        assert checkpoint_(each) is each

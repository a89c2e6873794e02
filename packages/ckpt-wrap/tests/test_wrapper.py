"""The drop-in wrappers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ckpt_wrap import (
    CheckpointWrapper,
    checkpoint_,
    checkpoint_wrapper,
    offload_,
    offload_wrapper,
    unwrap,
)

WRAPPERS = [checkpoint_wrapper, offload_wrapper]


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.flag = 1

    def forward(self, x):
        return self.linear(x) * self.flag


def test_load_errors_use_the_users_names():
    """Missing, unexpected and mismatched keys are reported without the prefix."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    wrong = {"0.weight": torch.ones(3, 3), "0.extra": torch.ones(1)}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(wrong)
    for part in ('"0.bias"', '"0.extra"', "size mismatch for 0.weight"):
        assert part in str(error.value)
    assert "_checkpoint_wrapped_module" not in str(error.value)
    result = model.load_state_dict({}, strict=False)
    assert result.missing_keys == ["0.weight", "0.bias"]


@pytest.mark.parametrize("root", [True, False])
def test_load_hooks_registered_on_the_wrapper_run(root):
    """Before and after loading, at the root and below it, with unprefixed names."""
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    model = wrapped if root else nn.Sequential(wrapped)
    called = []

    def rename(module, state_dict, prefix, *rest):
        called.append((module, prefix))
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "old")

    def note(module, incompatible):
        called.append((module, list(incompatible.missing_keys)))

    wrapped.register_load_state_dict_pre_hook(rename)
    wrapped.register_load_state_dict_post_hook(note)
    prefix = "" if root else "0."
    model.load_state_dict({prefix + "old": torch.ones(2, 2)}, strict=False)
    assert called == [(wrapped, prefix), (wrapped, [prefix + "bias"])]
    assert wrapped.weight.eq(1).all()


def test_setting_and_deleting_reach_the_inner_module():
    """Layers, flags, parameters and buffers set through the wrapper are set on the inner module."""
    model = nn.Sequential(checkpoint_wrapper(Flagged()))
    zero = nn.Linear(2, 2)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    model.set_submodule("0.linear", zero)
    assert not model(torch.ones(1, 2)).any()
    assert not model.state_dict()["0.linear.weight"].any()
    wrapped, inner = model[0], model[0]._checkpoint_wrapped_module
    wrapped.flag = 7
    assert inner.flag == 7
    del wrapped.flag
    assert not hasattr(inner, "flag")
    wrapped.register_buffer("extra", torch.ones(1))
    wrapped.register_parameter("scale", nn.Parameter(torch.ones(1)))
    wrapped.add_module("more", nn.ReLU())
    assert {"extra", "scale", "more"} <= set(dir(inner))
    assert model.get_buffer("0.count").shape == (2,)
    assert model.get_parameter("0.linear.weight") is zero.weight
    wrapped.count = torch.ones(2)
    assert inner.count.eq(1).all()
    del wrapped.count
    with pytest.raises(AttributeError):
        model.get_buffer("0.count")


def test_an_empty_instance_has_no_attributes_and_does_not_recurse():
    """An instance made by `__new__` alone raises AttributeError."""
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _ = CheckpointWrapper.__new__(CheckpointWrapper).anything


def test_a_subclass_may_set_attributes_of_its_own():
    """A user's subclass keeps its own class attributes and instance attributes."""

    class Mine(CheckpointWrapper):
        level = 0

        def __init__(self, module):
            super().__init__(module)
            self.level = 3
            self.note = "x"

        def state_dict(self, *args, **kwargs):
            return {"mine": super().state_dict(*args, **kwargs)}

    wrapped = Mine(nn.Linear(1, 1))
    assert list(wrapped.state_dict()["mine"]) == ["weight", "bias"]
    assert (wrapped.level, wrapped.note) == (3, "x")
    assert not hasattr(wrapped._checkpoint_wrapped_module, "level")


@pytest.mark.parametrize("name", ["__scale", "scale__", "_scale"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_attributes_with_underscores_are_those_of_the_module(wrapper, name):
    """Only names with double underscores on both sides belong to the wrapper class."""
    inner = nn.Linear(2, 2)
    setattr(inner, name, 3)
    assert getattr(wrapper(inner), name) == 3


@pytest.mark.parametrize("change", [checkpoint_, offload_, *WRAPPERS])
def test_prune_works_and_comes_off(change):
    """Pruning changes the parameters and hooks of the inner module, and can be removed."""
    model = nn.Sequential(change(nn.Linear(3, 3)))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    model(torch.ones(1, 3)).sum().backward()
    assert (model[0].weight == 0).any()
    assert model[0].weight_orig.grad is not None
    assert list(dict(model.named_parameters())) == ["0.bias", "0.weight_orig"]
    prune.remove(model[0], "weight")
    assert type(unwrap(model)[0]) is nn.Linear

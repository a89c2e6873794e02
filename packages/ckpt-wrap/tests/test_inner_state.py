"""Other code reaches a wrapped module's state through its wrapper."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.nn.utils import parametrize, prune

from ckpt_wrap import CheckpointWrapper, checkpoint_wrapper, offload_wrapper
from ckpt_wrap.modules._inner_state import InnerDict, innermost, is_wrapper


def test_prune_and_functional_call_work_through_a_wrapper():
    """Code that reaches into a module's parameters finds them at the wrapper."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    x = torch.ones(1, 2)
    assert not torch.func.functional_call(model, zeros, (x,)).any()
    assert model(x).any()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    model(x).sum().backward()
    assert model[0].weight_orig.grad is not None


def test_an_inner_dict_is_empty_to_iterate_and_full_to_ask():
    """So nothing in it is counted twice, and everything is found."""
    target = {"a": 1}
    inner = InnerDict(target)
    assert not list(inner)
    assert not inner
    assert "a" in inner
    assert "b" not in inner
    assert inner["a"] == 1
    with pytest.raises(KeyError, match="b"):
        inner["b"]


def test_what_is_written_to_an_inner_dict_is_the_targets():
    """Set, replaced and deleted."""
    target = {"a": 1}
    inner = InnerDict(target)
    inner["b"] = 2
    inner["a"] = 3
    assert target == {"a": 3, "b": 2}
    del inner["a"]
    assert target == {"b": 2}
    assert not list(inner)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_a_copy_of_an_inner_dict_is_over_a_copy(make):
    """What is written to one does not reach the other's target."""
    target = {"a": [1]}
    inner = make(InnerDict(target))
    assert type(inner) is InnerDict
    inner["a"].append(2)
    assert target == {"a": [1]}
    assert inner.target == {"a": [1, 2]}


def test_innermost_is_within_all_wrappers():
    """Ours and torch's, in any order; a plain module is its own."""
    module = nn.Linear(2, 2)
    wrapped = offload_wrapper(torchs.checkpoint_wrapper(checkpoint_wrapper(module)))
    assert innermost(wrapped) is module
    assert innermost(module) is module
    assert innermost(nn.Sequential(wrapped))[0] is wrapped


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, offload_wrapper, torchs.checkpoint_wrapper])
def test_a_wrapper_is_told_by_what_it_holds(wrap):
    """Not by its class."""
    assert is_wrapper(wrap(nn.Linear(2, 2)))
    assert not is_wrapper(nn.Linear(2, 2))
    assert not is_wrapper(nn.Sequential(wrap(nn.Linear(2, 2))))


def test_a_class_is_the_wrapped_modules_to_parametrize_alone():
    """To everybody else it is the wrapper's."""
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    assert wrapped.__class__ is type(wrapped) is CheckpointWrapper
    parametrize.register_parametrization(wrapped, "weight", nn.Identity())
    assert type(wrapped._checkpoint_wrapped_module).__name__ == "ParametrizedLinear"
    assert type(wrapped) is wrapped.__class__ is CheckpointWrapper


def test_load_errors_are_put_back_where_a_load_failed():
    """What a load left on the wrapper goes with it, and the next load works."""
    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight", "bias"'):
        wrapped.load_state_dict({})
    assert "_loading" not in vars(wrapped)
    assert "_load_from_state_dict" not in vars(wrapped._checkpoint_wrapped_module)
    wrapped.load_state_dict(nn.Linear(2, 2).state_dict())

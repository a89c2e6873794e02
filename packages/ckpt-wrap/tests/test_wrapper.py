"""The drop-in wrappers."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckpt_wrap import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)

WRAPPERS = [
    partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    checkpoint_wrapper,
    offload_wrapper,
]


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, a, b, c=None, d=None, **kwargs):
        return tuple(self.linear(x) for x in (a, b, c, d))


class OnlyKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, *, a=None, b=None):
        return self.linear(a), self.linear(b)


def test_state_dict_moves_between_wrapped_and_plain():
    """A wrapped module's state dict loads into a plain one and back."""
    wrapped = checkpoint_wrapper(
        nn.Linear(10, 10, bias=False),
        checkpoint_fn=checkpoint,
        use_reentrant=True,
        preserve_rng_state=False,
    )
    plain = nn.Linear(10, 10, bias=False)
    plain.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    assert torch.equal(plain.weight, wrapped.weight)
    with torch.no_grad():
        plain.weight.add_(0.5)
    wrapped.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert torch.equal(plain.weight, wrapped.weight)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_keyword_arguments_reach_the_module(wrapper):
    """Keyword tensors are passed on and change nothing about what requires grad."""
    model = wrapper(Keywords())
    assert isinstance(model, OffloadWrapper if wrapper is offload_wrapper else CheckpointWrapper)
    x = torch.ones(4, 10, requires_grad=True)
    with_keywords = model(x, x, c=x, d=x, e=x, f=x)
    without = model(x, x, x, x)
    assert len(with_keywords) == 4
    for one, other in zip(with_keywords, without, strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


def test_keyword_only_arguments_work_reentrantly():
    """A module that takes keywords only can be checkpointed with REENTRANT."""
    model = checkpoint_wrapper(OnlyKeywords(), checkpoint_impl=CheckpointImpl.REENTRANT)
    x = torch.ones(4, 10, requires_grad=True)
    assert len(model(a=x, b=x)) == 2


@pytest.mark.parametrize("checkpoint_fn", [None, checkpoint])
def test_context_fn_is_entered_for_forward_and_recompute(checkpoint_fn):
    """Each of the two contexts is entered once per step."""
    entered = []

    @contextlib.contextmanager
    def note(which):
        entered.append(which)
        yield

    options = {} if checkpoint_fn is None else {"use_reentrant": False}
    model = checkpoint_wrapper(
        nn.Linear(1, 1),
        checkpoint_fn=checkpoint_fn,
        context_fn=lambda: (note("forward"), note("recompute")),
        **options,
    )
    model(torch.randn(2, 1)).sum().backward()
    assert entered == ["forward", "recompute"]


def test_missing_attributes_are_the_inner_modules():
    """Indexing and unknown attributes go to the wrapped module."""
    linear = nn.Linear(1, 1)
    inner = nn.Sequential(linear, linear)
    wrapped = CheckpointWrapper(inner)
    inner.note = "bar"
    assert wrapped[0] is linear
    assert wrapped.note == "bar"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_of_the_plain_model(wrapper):
    """Parameters, buffers, modules and state dict have the same names, at any depth."""

    def build(wrap):
        inner = nn.Sequential(wrap(nn.Linear(2, 2)), nn.BatchNorm1d(2))
        return nn.Sequential(OrderedDict(a=wrap(inner), b=nn.Linear(2, 2)))

    plain, wrapped = build(lambda module: module), build(wrapper)
    for names in ("named_parameters", "named_buffers"):
        assert list(dict(getattr(plain, names)())) == list(dict(getattr(wrapped, names)()))
    assert {n for n, _ in plain.named_modules()} == {n for n, _ in wrapped.named_modules()}
    assert list(plain.state_dict()) == list(wrapped.state_dict())
    assert plain.state_dict()._metadata == wrapped.state_dict()._metadata

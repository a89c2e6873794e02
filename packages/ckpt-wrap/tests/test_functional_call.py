"""Recomputation uses the weights that `functional_call` substituted for the call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from ckpt_wrap import RecomputeError, checkpoint_


class Tied(nn.Module):
    """A block inside, a weight used twice, and a buffer that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first[0].weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return torch.tanh(self.second(self.first(x) * self.scale)).exp()


def _others(module, factor=2.0):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {k: (v.detach() * factor).requires_grad_() for k, v in tensors.items()}


def _tensors(module):
    return [*module.parameters(), *module.buffers()]


def _gradients(module, given, x, **how):
    """Gradients of the given tensors; backward runs after `functional_call` restored the module."""
    leaves = _others(module)
    call = how.get("call", functional_call)
    call(module, given(leaves), (x,)).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    return [leaf.grad for leaf in leaves.values()]


GIVEN = {
    "leaves": lambda leaves: leaves,
    "computed": lambda leaves: {k: v.sin() + v for k, v in leaves.items()},
    "two dicts": lambda leaves: (
        {k: v for k, v in leaves.items() if k == "scale"},
        {k: v for k, v in leaves.items() if k != "scale"},
    ),
}


@pytest.mark.parametrize("given", GIVEN)
def test_gradients_are_those_of_the_weights_that_were_given(wrap, given, equal):
    """Bit-identical, also for tied weights and buffers; afterwards the weights are restored."""
    plain = nn.Sequential(nn.Linear(4, 4), Tied())
    wrapped = copy.deepcopy(plain)
    wrapped[1] = wrap(wrapped[1])
    own = _tensors(wrapped)
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    expected = _gradients(plain, GIVEN[given], x)
    assert len(expected) == 5
    assert equal(expected, _gradients(wrapped, GIVEN[given], x))
    assert all(
        a is b for a, b in zip(own, [*wrapped.parameters(), *wrapped.buffers()], strict=True)
    )


def test_nested_checkpoints(wrap, equal):
    """The inner checkpoint is recomputed from the weights passed to the outer one."""
    plain = nn.Sequential(nn.Linear(4, 4), Tied())
    wrapped = copy.deepcopy(plain)
    checkpoint_(wrapped[1].first)
    wrapped[1] = wrap(wrapped[1])
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    for given in (GIVEN["leaves"], GIVEN["computed"]):
        assert equal(_gradients(plain, given, x), _gradients(wrapped, given, x))


def test_two_calls_with_different_weights_and_one_backward(wrap, equal):
    """Each call keeps its own weights, as in an ensemble that shares one module."""

    def values(module):
        ensemble = [_others(module, factor) for factor in (0.5, 2.0, 3.0)]
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        sum(functional_call(module, given, (x,)).sum() for given in ensemble).backward()
        return [leaf.grad for given in ensemble for leaf in given.values()]

    plain = Tied()
    assert equal(values(plain), values(wrap(copy.deepcopy(plain))))


@pytest.mark.parametrize("inside", [True, False])
def test_given_buffers_that_forward_changes(wrap, inside, equal):
    """BatchNorm, called twice with substituted buffers: each call updates them once."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
            self.inside = inside

        def forward(self, x):
            result = self.block(self.block(x))
            if self.inside:
                result.sum().backward()
            return result

    def values(module):
        weights = {k: (v.detach() * 2).requires_grad_() for k, v in module.named_parameters()}
        buffers = {k: v.clone() for k, v in module.named_buffers()}
        loss = functional_call(module, (weights, buffers), (x,)).sum()
        if not inside:
            loss.backward()
        return [*(w.grad for w in weights.values()), *buffers.values(), *module.buffers()]

    x = torch.linspace(-1, 1, 12).reshape(3, 4) ** 3
    plain = Twice()
    wrapped = copy.deepcopy(plain)
    wrapped.block = wrap(wrapped.block)
    assert equal(values(plain), values(wrapped))


def test_a_given_tensor_that_is_no_parameter_is_put_back():
    """The tensor is no longer set in backward."""

    class Bare(nn.Module):
        def forward(self, x):
            return torch.tanh(x * self.weight).exp()

    gradients = []
    for module in (Bare(), checkpoint_(Bare())):
        given = torch.ones(4, requires_grad=True)
        functional_call(module, {"weight": given}, (torch.ones(2, 4),)).sum().backward()
        assert not hasattr(module, "weight")
        gradients.append(given.grad)
    assert torch.equal(*gradients)


def test_a_replaced_parameter_is_refused(wrap):
    """Also refused if `functional_call` substituted it as an `nn.Parameter`."""
    module = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    given = {name: nn.Parameter(p.detach() * 2) for name, p in module.named_parameters()}
    loss = functional_call(module, given, (torch.ones(2, 4),)).sum()
    with pytest.raises(RecomputeError, match=r"parameter '0.weight' of module Sequential was repl"):
        loss.backward()

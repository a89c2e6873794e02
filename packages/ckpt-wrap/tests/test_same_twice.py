"""A second run that does not repeat the first, or that raises, is noticed and named."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from ckpt_wrap import RecomputeError, checkpoint_, checkpoint_wrapper


class Fickle(nn.Module):
    """Saves something else in its second run."""

    def __init__(self, second) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.runs = 0
        self.second = second

    def forward(self, x):
        self.runs += 1
        return torch.tanh(x * self.weight) if self.runs == 1 else self.second(x, self.weight)


def test_a_module_that_swallows_exceptions_still_stops_early():
    """`except Exception` in the module cannot make recomputation run on."""

    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            try:
                y = torch.tanh(x * self.weight)
            except Exception:
                y = torch.sin(x * self.weight)
            return y

    module = Swallows()
    x = torch.ones(2, 3, requires_grad=True)
    module(x).sum().backward()
    expected = module.weight.grad.clone()
    module.zero_grad()
    checkpoint_(module)(x).sum().backward()
    assert torch.equal(expected, module.weight.grad)


class Careless(nn.Module):
    """Catches every exception of its body and goes on, or raises another."""

    def __init__(self, then=None) -> None:
        super().__init__()
        self.body = Fickle(lambda x, w: torch.tanh(x[:, :2] * w[:2]))
        self.then = then

    def forward(self, x):
        try:
            return self.body(x)
        except Exception:
            if self.then is not None:
                raise self.then from None
            return x


@pytest.mark.parametrize("then", [None, KeyError("other")])
def test_a_module_that_swallows_exceptions_cannot_hide_a_difference(then):
    """The error is raised after all, not lost together with the gradients."""
    loss = checkpoint_(Careless(then))(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(RecomputeError, match="saved tensor 0 of module Careless is"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_inside_a_wrapper():
    """TorchScript saves other tensors once it has optimised: an error says so, then it works."""
    wrapped = checkpoint_wrapper(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    loss = wrapped(torch.randn(3, 4, requires_grad=True)).sum()
    with contextlib.suppress(RecomputeError):
        loss.backward()
    wrapped(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert wrapped.get_parameter("0.weight").grad is not None

"""Hooks that a forward registers are called as often as without checkpointing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from ckpt_wrap import checkpoint_, checkpoint_wrapper


class Hooked(nn.Module):
    """Calls `register` on its input, its weight and a value inside."""

    def __init__(self, register) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register = register
        self.calls = 0
        self.handles = []

    def count(self, *_):
        self.calls += 1

    def forward(self, x, outer=None):
        y = torch.tanh(self.linear(x))
        self.register(self, x, y, outer)
        y = torch.sin(y)
        return y if outer is None else y * outer


def _scale(m, x, y, _):
    x.register_hook(lambda g: g * 1.5)


def _scale_inside(m, x, y, _):
    y.register_hook(lambda g: g * 1.5)


def _scale_weight(m, x, y, _):
    m.linear.weight.register_hook(lambda g: g * 1.5)


def _post_accumulate(m, x, y, _):
    m.linear.weight.register_post_accumulate_grad_hook(m.count)


def _multi(m, x, y, _):
    register_multi_grad_hook([x, m.linear.weight, y], m.count)


def _retain(m, x, y, _):
    x.retain_grad()
    y.retain_grad()


def _on_and_off(m, x, y, _):
    x.register_hook(lambda g: g * 1.5).remove()
    m.linear.weight.register_hook(m.count).remove()


def _outer(m, x, y, outer):
    outer.register_hook(lambda g: g * 1.5)


def _module(m, x, y, _):
    handle = m.linear.register_forward_hook(lambda mod, args, out: out * 1.5)
    m.linear(x)
    handle.remove()


def _module_stays(m, x, y, _):
    m.linear.register_forward_hook(lambda *_: None)


def _inner_gradient(m, x, y, _):
    z = y * 2
    z.register_hook(lambda g: g * 3)
    (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    y.data.mul_(slope.detach().mean())


WAYS = [
    _scale,
    _scale_inside,
    _scale_weight,
    _post_accumulate,
    _multi,
    _retain,
    _on_and_off,
    _outer,
    _module,
    _module_stays,
    _inner_gradient,
]


def _step(module, leaf):
    x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
    outer = torch.ones(2, 4, requires_grad=True)
    module.zero_grad()
    for _ in range(2):
        module(x if leaf else x * 2, outer=outer * 1).sum().backward()
    return [x.grad, outer.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("make", [checkpoint_, checkpoint_wrapper])
@pytest.mark.parametrize("register", WAYS)
def test_hooks_act_once(make, register, early_stop, leaf):
    """Two steps: gradients, calls, and hooks that are left, are those of the plain module."""
    plain = Hooked(register)
    inner = copy.deepcopy(plain)
    expected = _step(plain, leaf)
    got = _step(make(inner, early_stop=early_stop), leaf)
    assert all(map(torch.equal, expected, got))
    assert plain.calls == inner.calls
    assert len(plain.linear._forward_hooks) == len(inner.linear._forward_hooks)

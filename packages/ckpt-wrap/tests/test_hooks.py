"""Hooks of checkpointed or offloaded modules: which ones run, how often, and their arguments."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from ckpt_wrap import checkpoint_, checkpoint_wrapper, offload_

CHANGES = [lambda module: module, offload_, checkpoint_, checkpoint_wrapper]


def _block():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def _step(module):
    module(torch.ones(2, 4, requires_grad=True)).sum().backward()


def _watch(module):
    """Register one hook of each kind; return their names and the modules they received."""
    seen = []

    def note(kind):
        return lambda seen_module, *_: seen.append((kind, seen_module))

    module.register_forward_pre_hook(note("pre"))
    module.register_forward_pre_hook(note("pre with kwargs"), with_kwargs=True)
    module.register_forward_hook(note("forward"))
    module.register_forward_hook(note("always"), always_call=True)
    module.register_full_backward_pre_hook(note("backward pre"))
    module.register_full_backward_hook(note("backward"))
    return seen


def test_hooks_on_the_module_run_once_per_step(layer):
    """Hooks of every kind run in the order of a plain module, with the original module."""
    plain, changed = _block(), layer(_block())
    expected, seen = _watch(plain), _watch(changed)
    for module in (plain, changed):
        _step(module)
        _step(module)
    assert [kind for kind, _ in seen] == [kind for kind, _ in expected]
    assert len(seen) == 12
    assert {module for _, module in seen} == {changed}


def test_hooks_below_run_again_with_the_forward_and_once_in_backward(layer, offloads):
    """Forward hooks run again in recomputation; backward hooks run once."""
    changed = layer(_block())
    seen = _watch(changed[0])
    _step(changed)
    kinds = [kind for kind, _ in seen]
    runs = 1 if offloads else 2
    assert kinds.count("pre") == kinds.count("forward") == runs
    assert kinds.count("backward") == kinds.count("backward pre") == 1


def test_what_hooks_return_counts(layer):
    """A hook that changes the input, the result or the gradient is applied once."""
    plain, changed = _block(), layer(_block())
    changed.load_state_dict(plain.state_dict())
    gradients = []
    for module in (plain, changed):
        x = torch.ones(2, 4, requires_grad=True)
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        module.register_forward_hook(lambda _, args, result: result * 3)
        module.register_full_backward_hook(lambda _, grads, __: (grads[0] * 5,))
        module(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_removed_hooks_are_gone(layer):
    """A handle created before the module was changed still removes its hook."""
    module = _block()
    seen = []
    handle = module.register_forward_hook(lambda *_: seen.append("forward"))
    changed = layer(module)
    handle.remove()
    _step(changed)
    assert seen == []


@pytest.mark.parametrize("change", CHANGES)
def test_state_dict_hooks_of_a_changed_module_are_the_plain_ones(change):
    """Saving and loading, at the root and below it."""
    module = change(_block())
    seen = []
    module.register_state_dict_pre_hook(lambda *_: seen.append("save pre"))
    module.register_state_dict_post_hook(lambda *_: seen.append("save post"))
    module.register_load_state_dict_pre_hook(lambda *_: seen.append("load pre"))
    module.register_load_state_dict_post_hook(lambda *_: seen.append("load post"))
    for model in (module, nn.Sequential(module)):
        model.load_state_dict(model.state_dict())
    assert seen == ["save pre", "save post", "load pre", "load post"] * 2


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


def _gradients(module, leaf):
    x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
    outer = torch.ones(2, 4, requires_grad=True)
    module.zero_grad()
    for _ in range(2):
        module(x if leaf else x * 2, outer=outer * 1).sum().backward()
    return [x.grad, outer.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("register", WAYS)
def test_hooks_that_forward_registers_act_once(wrap, register, early_stop, leaf):
    """Gradients, calls and remaining hooks after two steps match the plain module."""
    plain = Hooked(register)
    inner = copy.deepcopy(plain)
    expected = _gradients(plain, leaf)
    got = _gradients(wrap(inner, early_stop=early_stop), leaf)
    assert all(map(torch.equal, expected, got))
    assert plain.calls == inner.calls
    assert len(plain.linear._forward_hooks) == len(inner.linear._forward_hooks)

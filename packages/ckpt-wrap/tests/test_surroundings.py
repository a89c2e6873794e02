"""Changing a module between forward and backward is an error, unless a forward changed it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ckpt_wrap import RecomputeError, checkpoint_


class Block(nn.Module):
    """Reads plain attributes and submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.heat = 1.0
        self.active = ["a"]
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.down(self.dropout(torch.tanh(self.up(x) * self.heat))))


def _inner(module):
    return next(m for m in module.modules() if isinstance(m, Block))


def _step(module, change=None):
    """Gradients of two forwards and one backward, with `change` called between them."""
    module.zero_grad()
    torch.manual_seed(0)
    loss = sum(module(torch.ones(3, 4)).sum() for _ in range(2))
    if change is not None:
        change(_inner(module))
    loss.backward()
    return [p.grad.clone() for p in module.parameters()]


def _hook(block):
    return block.up.register_forward_hook(lambda module, args, result: result * 2)


CHANGES = {
    "training": (lambda b: b.eval(), "attribute 'training' of .*from True to False"),
    "training below": (
        lambda b: b.dropout.eval(),
        r"attribute 'training' of submodule 'dropout' \(Dropout\)",
    ),
    "number": (lambda b: setattr(b, "heat", 2.0), "attribute 'heat' of .*from 1.0 to 2.0"),
    "item of a list": (lambda b: b.active.append("b"), "attribute 'active'"),
    "new attribute": (lambda b: setattr(b, "merged", True), "attribute 'merged'"),
    "hook": (_hook, r"the forward hooks of submodule 'up' \(Linear\)"),
    "submodule": (lambda b: setattr(b, "up", nn.Linear(4, 4)), "the submodules of"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_before_backward_is_an_error(how, wrap):
    """The error names module and attribute; no gradient is computed."""
    change, message = CHANGES[how]
    module = wrap(Block())
    with pytest.raises(RecomputeError, match=message):
        _step(module, change)
    assert all(p.grad is None for p in module.parameters())


def test_a_removed_hook_is_an_error(wrap):
    """Recomputation would run without the hook."""
    module = wrap(Block())
    handle = _hook(_inner(module))
    with pytest.raises(RecomputeError, match="the forward hooks of submodule 'up'"):
        _step(module, lambda block: handle.remove())


def test_a_change_that_is_undone_is_no_error(wrap):
    """Switching to evaluation and back, or adding and removing a hook."""

    def change(block):
        block.eval()
        _hook(block).remove()
        block.train()

    plain = Block()
    wrapped = wrap(copy.deepcopy(plain))
    assert all(map(torch.equal, _step(plain), _step(wrapped, change)))


def test_changes_by_forwards_are_no_errors(wrap):
    """A counter that forward increments, over several forwards, backwards and steps."""
    plain = Block()
    wrapped = wrap(copy.deepcopy(plain))
    for _ in range(2):
        torch.testing.assert_close(_step(wrapped), _step(plain))


def test_a_change_between_two_forwards_is_an_error(wrap):
    """Switching adapters, for example: the first forward cannot be recomputed."""
    module = wrap(Block())
    first = module(torch.ones(3, 4)).sum()
    _inner(module).heat = 2.0
    second = module(torch.ones(3, 4)).sum()
    second.backward()
    with pytest.raises(RecomputeError, match=r"attribute 'heat' of .*from 1.0 to 2.0"):
        first.backward()


def test_hooks_of_the_module_itself_run_outside():
    """They may change between forward and backward."""
    module = checkpoint_(Block())
    handle = module.register_forward_hook(lambda module, args, result: result * 2)
    _step(module, lambda block: handle.remove())


def test_a_change_of_another_module_is_no_error(wrap):
    """Neither is a change after backward."""
    module, other = wrap(Block()), Block()
    _step(module, lambda block: other.eval())
    _inner(module).heat = 3.0
    _step(module)


class _Twice(nn.Module):
    """Calls its block with two values of one attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        self.block.heat = 1.0
        x = self.block(x)
        self.block.heat = 2.0
        return self.block(x)


def test_a_forward_around_changes_an_attribute():
    """An error, also in nested checkpoints; correct if only the outer module is checkpointed."""
    x = torch.ones(2, 4)
    model = _Twice()
    model.block.dropout.p = 0.0
    model(x).sum().backward()
    outside = copy.deepcopy(model)
    outside.zero_grad()
    checkpoint_(outside)(x).sum().backward()
    for one, other in zip(model.parameters(), outside.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for is_around in (False, True):
        nested = copy.deepcopy(model)
        checkpoint_(nested.block)
        if is_around:
            checkpoint_(nested)
        with pytest.raises(RecomputeError, match=r"'heat' of .* from 1.0 to 2.0"):
            nested(x).sum().backward()

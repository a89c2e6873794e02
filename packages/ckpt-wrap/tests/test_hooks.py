"""Hooks of modules that are checkpointed or offloaded: which run, how often, and on what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_wrap import checkpoint_, checkpoint_wrapper, offload_

CHANGES = [lambda module: module, offload_, checkpoint_, checkpoint_wrapper]


def _block():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def _step(module):
    module(torch.ones(2, 4, requires_grad=True)).sum().backward()


def _watch(module):
    """Register one hook of each kind; their names, and the modules they saw."""
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
    """Every kind, in the order of a plain module, with the module they were registered on."""
    plain, changed = _block(), layer(_block())
    expected, seen = _watch(plain), _watch(changed)
    for module in (plain, changed):
        _step(module)
        _step(module)
    assert [kind for kind, _ in seen] == [kind for kind, _ in expected]
    assert len(seen) == 12
    assert {module for _, module in seen} == {changed}


def test_hooks_below_run_again_with_the_forward_and_once_in_backward(layer, offloads):
    """What is run again is run with its hooks; gradients pass once."""
    changed = layer(_block())
    kinds = [kind for kind, _ in _run_and_return(changed, _watch(changed[0]))]
    runs = 1 if offloads else 2
    assert kinds.count("pre") == kinds.count("forward") == runs
    assert kinds.count("backward") == kinds.count("backward pre") == 1


def _run_and_return(module, seen):
    _step(module)
    return seen


def test_what_hooks_return_counts(layer):
    """A hook that changes the input, the result or the gradient does so once."""
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
    """A handle taken before the change works after it."""
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

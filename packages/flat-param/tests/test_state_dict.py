"""Whole states of a module that is not sharded, which needs no process group."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flat_param


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer and its optimizer after a step."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_module_alone_is_loaded_from_either_form() -> None:
    """A plain state dict, or one with the model inside."""
    module, _ = _trained()
    for state in (module.state_dict(), flat_param.full_state_dict(module)):
        other = nn.Linear(3, 2)
        flat_param.load_full_state_dict(other, state)
        assert torch.equal(other.weight, module.weight)


def test_optimizer_comes_back_with_its_module() -> None:
    """Its next step is that of the one that was saved."""
    module, optimizer = _trained()
    state = copy.deepcopy(flat_param.full_state_dict(module, optimizer=optimizer))
    other = nn.Linear(3, 2)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    flat_param.load_full_state_dict(other, state, optimizer=again)
    x = torch.randn(4, 3)
    for layer, steps in ((module, optimizer), (other, again)):
        steps.zero_grad()
        layer(x).sum().backward()
        steps.step()
    assert torch.equal(other.weight, module.weight)


@pytest.mark.parametrize("nested", [True, False])
def test_optimizer_without_a_state_is_refused_and_nothing_changes(nested: bool) -> None:
    """The keys that there are, and what to do."""
    module, optimizer = _trained()
    state = flat_param.full_state_dict(module) if nested else module.state_dict()
    before = module.weight.clone()
    with pytest.raises(flat_param.StateError) as raised:
        flat_param.load_full_state_dict(module, state, optimizer=optimizer)
    keys = ["model"] if nested else ["bias", "weight"]
    assert str(raised.value).startswith(
        f"flat_param.load_full_state_dict: the state has the keys {keys}, but an optimizer is "
        "loaded from 'optim' beside 'model'. Leave"
    )
    assert torch.equal(module.weight, before)

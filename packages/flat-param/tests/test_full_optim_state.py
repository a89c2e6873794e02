"""Optimizer state as whole tensors, under names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flat_param
from flat_param import StateError
from flat_param.checkpoint._full_optim_state import full_optimizer_state


@pytest.mark.usefixtures("group_of_one")
def test_state_is_that_of_the_plain_optimizer_by_name() -> None:
    """Tensors of each shape, counts, and the options of groups."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    torch.manual_seed(0)
    sharded = flat_param.fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, sharded)]
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    found = full_optimizer_state(sharded, optimizers[1])
    names = [name for name, _ in plain.named_parameters()]
    assert found["param_groups"][0]["params"] == names
    assert found["param_groups"][0]["lr"] == 0.1
    for name, param in plain.named_parameters():
        expected = optimizers[0].state[param]
        assert list(found["state"][name]) == list(expected)
        for key, value in expected.items():
            assert found["state"][name][key].shape == value.shape
            assert torch.equal(found["state"][name][key], value)


@pytest.mark.usefixtures("group_of_one")
def test_parameters_without_state_are_left_out() -> None:
    """Those that never had a gradient; and all, before the first step."""
    sharded = flat_param.fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    assert full_optimizer_state(sharded, optimizer)["state"] == {}


@pytest.mark.usefixtures("group_of_one")
def test_optimizer_of_another_module_is_refused() -> None:
    """Its parameters have no names here."""
    sharded = flat_param.fully_shard(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises((StateError, flat_param.ParameterError), match="does not have"):
        full_optimizer_state(sharded, optimizer)

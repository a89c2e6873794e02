"""Optimizers do not step with state that was made over other parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

import flat_param
from flat_param import StateError

SEPARATE = r"state '\w+' has shape \(4, 3\), but the chunk .* has \(8,\).*load_optimizer_state"


def model() -> nn.Module:
    """Two parameters, 16 elements, which two chunks of 8 hold."""
    torch.manual_seed(0)
    return nn.Linear(3, 4)


def stepped(module: nn.Module, optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimizer after a step."""
    optimizer.zero_grad()
    module(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


def values(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters, copied."""
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_state_of_separate_parameters_is_not_stepped_over_chunks(
    options: dict[str, Any], elsewhere: bool, tmp_path: Any
) -> None:
    """As many chunks as parameters: torch loads it. Nothing changes, and the way in is named."""
    module = model()
    state = stepped(module, optim.AdamW(module.parameters(), **options)).state_dict()
    flat = flat_param.flatten(module)
    optimizer = optim.AdamW(flat.chunks(8), **options)
    if elsewhere:
        flat_param.offload_optimizer(optimizer, folder=tmp_path)
    optimizer.load_state_dict(state)
    before = values(module)
    with pytest.raises(StateError, match=SEPARATE):
        stepped(module, optimizer)
    assert all(map(torch.equal, values(module), before))
    flat.load_optimizer_state(optimizer, state)
    stepped(module, optimizer)
    assert not torch.equal(values(module)[0], before[0])


def test_every_load_is_looked_at() -> None:
    """Also that of an optimizer which has stepped; state that fits is taken again."""
    module = model()
    foreign = stepped(module, optim.AdamW(module.parameters())).state_dict()
    flat = flat_param.flatten(module)
    optimizer = stepped(module, optim.AdamW(flat.chunks(8)))
    own = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        optimizer.load_state_dict(foreign)
        with pytest.raises(StateError, match=SEPARATE):
            stepped(module, optimizer)
        optimizer.load_state_dict(own)
        stepped(module, optimizer)


@pytest.mark.parametrize(
    "kind", [optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adam, optim.AdamW, optim.NAdam]
)
def test_own_state_of_each_optimizer_fits(kind: type[optim.Optimizer]) -> None:
    """All that torch's element-wise optimizers keep has the parameter's shape, or counts."""
    flat = flat_param.flatten(model())
    known = {"momentum": 0.9} if kind in (optim.SGD, optim.RMSprop) else {}
    optimizer = kind(flat.chunks(8), lr=0.1, **known)  # type: ignore[call-arg]
    stepped(flat.module, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(flat.module, optimizer)
    assert any(value.shape == (8,) for value in next(iter(optimizer.state.values())).values())


class OneScale(optim.AdamW):
    """Keeps a value a block, as optimizers with quantised state do."""

    def step(self, closure: Any = None) -> Any:
        """Put it beside the others."""
        loss = super().step(closure)
        for state in self.state.values():
            state["scale"] = torch.ones(2)
        return loss


def test_optimizers_that_are_not_torchs_are_left_alone() -> None:
    """What they keep may have any shape."""
    flat = flat_param.flatten(model())
    optimizer = OneScale(flat.chunks(8))
    for _ in range(2):
        optimizer.load_state_dict(stepped(flat.module, optimizer).state_dict())

"""A budget also includes the optimizer's state, a reserve and the device's free memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from sac_policies import BudgetError, fit_
from sac_policies.budget import InPlaceFit, _step
from sac_policies.budget._optimizer import existing_bytes, state_bytes

from ._blocks import stack
from ._fitted import BATCH

CPU = torch.device("cpu")
KIND = torch.accelerator.current_accelerator() or CPU
Make = Callable[[Any], optim.Optimizer]


def stepped(model: nn.Module, optimizer: optim.Optimizer) -> optim.Optimizer:
    """Run one step of the optimizer."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    model.zero_grad()
    return optimizer


MAKES: dict[str, Make] = {
    "Adadelta": optim.Adadelta,
    "Adagrad": optim.Adagrad,
    "Adam": optim.Adam,
    "Adamax": optim.Adamax,
    "AdamW": lambda params: optim.AdamW(params, amsgrad=True),
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": optim.RMSprop,
    "RMSprop centered": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_state_of_the_first_step_is_known_before_it(make: Make) -> None:
    """To the byte, with frozen parameters and parameter groups; no state is created."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    model[1].bias.requires_grad_(False)
    optimizer = make(model.parameters())
    made, before = len(optimizer.state), state_bytes(optimizer, CPU)
    assert len(optimizer.state) == made
    stepped(model, optimizer)
    assert before == state_bytes(optimizer, CPU) == existing_bytes(optimizer, CPU)


def test_state_counts_in_the_budget_and_stays_as_it_is() -> None:
    """An optimizer counts the same with and without existing state."""
    model = stack()
    plain = fit_(model, BATCH, 1.0)
    assert isinstance(plain, InPlaceFit)
    plain.undo()
    optimizer = optim.AdamW(model.parameters())
    state = 2 * sum(each.nbytes for each in model.parameters())
    for _ in range(2):
        found = fit_(model, BATCH, plain.plain_bytes, optimizer=optimizer)
        assert isinstance(found, InPlaceFit)
        assert found.plain_bytes == pytest.approx(plain.plain_bytes + state, rel=0.001)
        assert found.peak_bytes <= plain.plain_bytes
        assert any(region.level != "keeps everything" for region in found.regions)
        found.undo()
        if not existing_bytes(optimizer, CPU):
            assert not optimizer.state
            stepped(model, optimizer)


def test_optimizer_of_unknown_state_needs_a_step() -> None:
    """After a step, its state is counted."""
    model = stack()
    optimizer = optim.Adafactor(model.parameters())
    with pytest.raises(BudgetError, match=r"optimizer Adafactor has no state yet, .* Run one step"):
        fit_(model, BATCH, "80%", optimizer=optimizer)
    stepped(model, optimizer)
    assert fit_(model, BATCH, 1.0, optimizer=optimizer)


@pytest.mark.parametrize(("reserve", "left"), [(1000, 1000), ("1 KiB", 1024), ("10%", 0), (0.1, 0)])
def test_reserve_stays_free(reserve: Any, left: int) -> None:
    """Bytes, or a share of the budget."""
    found = fit_(stack(), BATCH, 0.9, reserve=reserve)
    assert isinstance(found, InPlaceFit)
    whole = int(0.9 * found.plain_bytes)
    assert found.budget_bytes == pytest.approx(whole - (left or 0.1 * whole), abs=2)
    assert found.peak_bytes <= found.budget_bytes


@pytest.mark.parametrize(
    ("budget", "given", "said"),
    [
        ("80%", {"optimizer": 3}, r"optimizer 3 is a int, but its state"),
        ("80%", {"reserve": -1}, r"reserve -1 is not a size, but a reserve is bytes"),
        ("80%", {"reserve": 1.5}, r"reserve 1\.5 is a fraction, but"),
        ("80%", {"reserve": "much"}, r"size 'much' does not parse"),
        ("device", {}, r"budget 'device' is the memory .* device 'cpu' has no such number\. Pass"),
    ],
)
def test_what_cannot_be_counted_is_refused(budget: str, given: dict[str, Any], said: str) -> None:
    """Refused before a step runs."""
    model = stack()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a step runs"))
    with pytest.raises(BudgetError, match=said):
        fit_(model, BATCH, budget, **given)


def test_device_budget_is_what_is_free_and_what_the_step_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters, batch, gradients and state are already allocated."""
    monkeypatch.setattr(_step, "free_bytes", lambda device: 1000)
    model = nn.Linear(4, 4)
    optimizer = stepped(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step = _step.Step(model, torch.ones(2, 4), None)
    assert step.available() == 1000 + 80 + 32
    model(torch.ones(2, 4)).sum().backward()
    step = _step.Step(model, torch.ones(2, 4), None, optimizer)
    assert step.available() == 1000 + 3 * 80 + 32
    found = fit_(stack(), BATCH, "device", reserve=100)
    assert not found


@pytest.mark.accelerator
@pytest.mark.skipif(
    not torch.accelerator.is_available()
    or not hasattr(torch.get_device_module(KIND), "mem_get_info"),
    reason="needs an accelerator that tells its free memory",
)
def test_device_budget_is_met_on_an_accelerator() -> None:
    """For a small model, everything is kept."""
    model = stack().to(KIND)
    batch = {name: value.to(KIND) for name, value in BATCH.items()}
    found = fit_(model, batch, "device", reserve="5%", optimizer=optim.AdamW(model.parameters()))
    assert isinstance(found, InPlaceFit)
    assert all(region.level == "keeps everything" for region in found.regions)

"""A model fitted in place, then changed, copied, interrupted and undone."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from sac_policies import BudgetError, fit_
from sac_policies.budget import Infeasible, InPlaceFit, _step
from sac_policies.trials import _rollback
from sac_policies.trials._generators import Generators

from ._blocks import stack
from ._fitted import BATCH, ROWS, own_forwards, training


def test_a_forward_that_somebody_else_has_put_there_comes_back() -> None:
    """The user's forward runs inside the region and is restored by undo."""
    model, calls = stack(2), []
    own = model.blocks[0].forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return own(*args, **kwargs)

    model.blocks[0].forward = forward  # type: ignore[method-assign]
    found = fit_(model, BATCH, "60%")
    assert isinstance(found, InPlaceFit)
    calls.clear()
    model(ROWS)
    assert calls == [1]
    found.undo()
    assert model.blocks[0].forward is forward


def test_a_forward_that_was_put_around_it_stays_and_calls_the_own_one() -> None:
    """The region is still called and does nothing; until then the model counts as fitted."""
    model, calls = stack(2), []
    found = fit_(model, BATCH, "60%")
    assert isinstance(found, InPlaceFit)
    region = model.blocks[0].forward

    def around(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return region(*args, **kwargs)

    for block in model.blocks:
        block.forward = around
    with pytest.raises(BudgetError, match="is checkpointed by an earlier fit_"):
        fit_(model, BATCH, "60%")
    found.undo()
    assert all(block.forward is around for block in model.blocks)
    again = fit_(model, BATCH, "60%")
    assert isinstance(again, InPlaceFit)
    assert again.plain_bytes == found.plain_bytes
    found.undo()
    assert own_forwards(model) != []
    assert calls


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_checkpointed_and_apart(copied: Callable[[nn.Module], Any]) -> None:
    """Regions of the copy use the copy's weights."""
    model = stack()
    assert fit_(model, BATCH, "50%")
    twin = copied(model)
    assert own_forwards(twin) == own_forwards(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(map(torch.equal, training(twin), training(stack())))
    again = fit_(twin, BATCH, "50%")
    assert isinstance(again, InPlaceFit)
    again.undo()
    assert own_forwards(twin) == []
    assert own_forwards(model) != []


def test_what_cannot_fit_leaves_the_model_and_says_what_would() -> None:
    """With the reported budget, it fits."""
    model = stack()
    found = fit_(model, BATCH, 1000)
    assert isinstance(found, Infeasible)
    assert not found
    assert own_forwards(model) == []
    assert str(found).startswith(f"nothing fits 1,000 bytes: {found.smallest_bytes:,} are needed")
    assert re.fullmatch(
        r"\d+ % of what it takes without checkpointing"
        r"(, \d x [a-z ]+: blocks[.a-z\d ]+ \(Block\))+",
        found.how,
    )
    assert f"Raise the budget, or save memory: {found.helps}" in str(found)
    assert re.search(r"sharding over 2 ranks saves [\d.]+ KiB on each", found.helps)
    again = fit_(model, BATCH, found.smallest_bytes)
    assert isinstance(again, InPlaceFit)


@pytest.mark.parametrize("sets", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [2, 31, 46, 69])
def test_interrupt_while_a_forward_is_set_leaves_the_model(
    monkeypatch: pytest.MonkeyPatch, at: int, sets: bool
) -> None:
    """When calls are counted or marked, and when a level is put on a block."""
    model, numbers, set_attribute = stack(), count(1), nn.Module.__setattr__

    def interrupted(module: nn.Module, name: str, value: Any) -> None:
        if name != "forward" or next(numbers) != at:
            set_attribute(module, name, value)
            return
        if sets:
            set_attribute(module, name, value)
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.Module, "__setattr__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_(model, BATCH, "60%")
    assert own_forwards(model) == []
    assert not _step._being_fitted


def test_interrupt_while_gradients_are_held_gives_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each tensor that is noted when measuring begins."""
    model, note = stack(1), _rollback._Tensor.__init__
    grads = [torch.ones_like(each) for each in model.parameters()]
    for at in range(1, 2 * len(grads) + 1):
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        numbers = count(1)

        def interrupted(noted: Any, tensor: torch.Tensor, numbers: Any = numbers, at: int = at):
            if next(numbers) == at:
                raise KeyboardInterrupt
            note(noted, tensor)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(_rollback._Tensor, "__init__", interrupted)
            fit_(model, BATCH, "60%")
        now = [each.grad for each in model.parameters()]
        assert all(one is other for one, other in zip(now, grads, strict=True)), at
        assert not _step._being_fitted


@pytest.mark.parametrize("name", ["_end", "_put_back"])
def test_interrupt_before_everything_is_put_back_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At the beginning of the functions that are called at the end."""
    model, numbers = stack(1), count(1)
    real = getattr(_rollback.Rollback, name)

    def interrupted(rollback: _rollback.Rollback) -> None:
        if next(numbers) == 1:
            raise KeyboardInterrupt
        real(rollback)

    grads = {}
    for each, parameter in model.named_parameters():
        grads[each] = parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(5)
    monkeypatch.setattr(_rollback.Rollback, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_(model, BATCH, "85%")
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert all(p.grad is grads[each] for each, p in model.named_parameters())
    assert own_forwards(model) == []


@pytest.mark.parametrize("at", range(3, 10, 2))
def test_an_interrupt_while_everything_is_put_back_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """No blocks remain checkpointed; buffers and gradients of a measured step are gone."""
    model, presses = stack(), count(1)
    put_back = Generators.put_back

    def interrupted(generators: Generators) -> None:
        # The first trials only prepare; the last call is at the end.
        if next(presses) == at:
            raise KeyboardInterrupt
        put_back(generators)

    monkeypatch.setattr(Generators, "put_back", interrupted)
    model.blocks[0].norm = nn.BatchNorm1d(24)
    before = {name: b.clone() for name, b in model.named_buffers()}
    grads = {}
    for name, parameter in model.named_parameters():
        grads[name] = parameter.grad = torch.ones_like(parameter)
    with pytest.raises(KeyboardInterrupt):
        fit_(model, BATCH, "85%")
    assert next(presses) > at
    assert own_forwards(model) == []
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    assert all(p.grad is grads[name] for name, p in model.named_parameters())

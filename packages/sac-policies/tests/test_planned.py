"""A plan meets other tensors than it was made for: kept and counted, or refused."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sac_policies import (
    BudgetPlan,
    Fit,
    RecomputeError,
    UnmatchedEntryWarning,
    checkpoint,
    fit,
    from_json,
    profile,
    report,
    solve,
    to_json,
)

from ._recipe import leaf

_TANH = "TanhBackward0"
OPS = (torch.sin, torch.exp, F.silu, torch.tanh, lambda t: t * t, lambda t: t @ t)


def _chain(ops: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        for each in ops:
            x = OPS[each](x * 0.5)
        return x

    return function


def _plan(function: Callable[..., Any], *args: Any, strict: bool = False) -> BudgetPlan:
    trace = profile(function, *args)
    plan = solve(trace, trace.fixed_bytes(), strict=strict)
    assert isinstance(plan, BudgetPlan)
    return plan


def _gradient(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(function(x).sum(), x)
    return grad


def _run(plan: BudgetPlan, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(function, x, policy=plan, engine="recipe")


def _planned(x: torch.Tensor) -> torch.Tensor:
    return (F.silu(x) * x).sin().exp()


def _longer(x: torch.Tensor) -> torch.Tensor:
    return (F.silu(x) * x).sin().tanh().exp()


@settings(deadline=None)
@given(
    planned=st.lists(st.integers(0, len(OPS) - 1), max_size=5),
    run=st.lists(st.integers(0, len(OPS) - 1), max_size=5),
)
def test_gradients_are_plain_whatever_the_plan_was_made_for(
    planned: list[int], run: list[int]
) -> None:
    """To the bit, for any two functions."""
    x = leaf(4, 4)
    plan = _plan(_chain(planned), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmatchedEntryWarning)
        assert torch.equal(_gradient(_run(plan, _chain(run)), x), _gradient(_chain(run), x))


def test_unknown_tensor_is_kept_counted_and_told_of_once() -> None:
    """With who made it and where; the values that the plan knows are still made again."""
    x = leaf(8, 8)
    plan = _plan(_planned, x)
    with pytest.warns(UnmatchedEntryWarning, match=r"1 of \d+ tensors .*TanhBackward0, at .*py:\d"):
        _run(plan, _longer)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(_gradient(_run(plan, _longer), x), _gradient(_longer, x))
    kept = [each for each in report(_longer, x, policy=plan).saved if not each.replayed]
    assert [each.made_by for each in kept if each.why == "the plan does not know it"] == [_TANH]
    before = [each for each in report(_planned, x, policy=plan).saved if not each.replayed]
    assert len(kept) == len(before) + 1


def test_decisions_are_found_again_after_other_tensors() -> None:
    """Two more at the start take nothing from those behind them, kept or not."""
    x = leaf(8, 8)
    trace = profile(_planned, x)
    plan = solve(trace, (trace.fixed_bytes() + trace.total_bytes()) // 2)

    def shifted(t: torch.Tensor) -> torch.Tensor:
        return _planned(t.tanh().tanh())

    def done(function: Callable[..., Any]) -> list[tuple[str, bool, str]]:
        saved = report(function, x, policy=plan).saved
        return [(s.made_by, s.replayed, s.why) for s in saved if s.made_by not in ("", _TANH)]

    with pytest.warns(UnmatchedEntryWarning, match=r"2 of \d+ tensors"):
        found = done(shifted)
    assert found == done(_planned)
    assert {replayed for _, replayed, _ in found} == {True, False}


def test_missing_tensor_is_no_matter() -> None:
    """Less is saved than was planned: nothing to tell."""
    x = leaf(8, 8)
    plan = _plan(_longer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(_gradient(_run(plan, _planned), x), _gradient(_planned, x))


@pytest.mark.parametrize(
    ("planned", "run", "says"),
    [
        (_planned, _longer, "saved tensor 4 is made by TanhBackward0 .* it was ExpBackward0"),
        (_longer, _planned, "saved tensor 4 is made by ExpBackward0 .* it was TanhBackward0"),
        (_planned, lambda x: F.silu(x) * x, "saved tensor 3 is missing .* it was the caller|Mul"),
        (lambda x: x.sin(), _planned, "saved tensor 1 is made by .* it was nothing"),
    ],
)
def test_strict_plan_refuses(
    planned: Callable[..., Any], run: Callable[..., Any], says: str
) -> None:
    """In the forward, with both tensors, and with what to do."""
    x = leaf(4, 4)
    plan = _plan(planned, x, strict=True)
    assert torch.equal(_gradient(_run(plan, planned), x), _gradient(planned, x))
    with pytest.raises(RecomputeError, match=says) as caught:
        _run(plan, run)(x)
    assert "Profile and solve again" in str(caught.value)


def test_strictness_is_part_of_the_plan_and_not_of_its_digest() -> None:
    """JSON carries it; ranks compare decisions."""
    x = leaf(4, 4)
    easy, strict = _plan(_planned, x), _plan(_planned, x, strict=True)
    assert strict.strict
    assert not easy.strict
    assert from_json(to_json(strict)) == strict != easy
    assert strict.digest == easy.digest


def test_fit_makes_strict_plans_where_asked() -> None:
    """By default they are not."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.ones(4, 8)
    for strict in (False, True):
        found = fit(model, x, 1.0, strict=strict)
        assert isinstance(found, Fit)
        assert found.policy.strict is strict


def test_nothing_outlives_a_forward_that_a_strict_plan_refused() -> None:
    """The values of the region go with it."""
    x = leaf(4, 4)
    plan = _plan(_planned, x, strict=True)
    seen: list[weakref.ref[torch.Tensor]] = []

    def run(t: torch.Tensor) -> torch.Tensor:
        made = t.sin()
        seen.append(weakref.ref(made))
        return made.tanh().exp()

    with pytest.raises(RecomputeError):
        _run(plan, run)(x)
    gc.collect()
    assert seen[0]() is None

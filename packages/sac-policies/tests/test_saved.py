"""One forward is written down with what its calls are given and without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sac_policies import BudgetPlan, Trace, checkpoint, profile, recompute_all, solve, span
from sac_policies.budget._saved import nanoseconds_of_a_call

from ._recipe import bytes_kept, is_plain, leaf, run

ROWS, WIDTH = 256, 64
W = leaf(WIDTH, WIDTH)


def added(x: Tensor) -> Tensor:
    """A sum with a number, which its node forgets."""
    return (x @ W + 1.0).sin()


def normed(x: Tensor) -> Tensor:
    """Two statistics for each row, which the norm's call makes again."""
    return F.layer_norm(x @ W, (WIDTH,)) @ W


def gated(x: Tensor) -> Tensor:
    """Nothing that a call has to be seen for."""
    return F.silu(x @ W) * x


def solved(trace: Trace, share: float) -> BudgetPlan:
    """A plan for this share of what may be kept."""
    least, most = trace.fixed_bytes(), trace.total_bytes()
    plan = solve(trace, least + int(share * (most - least)))
    assert isinstance(plan, BudgetPlan)
    return plan


@pytest.mark.parametrize("function", [added, normed, gated])
def test_both_tell_of_the_same_tensors(function: Callable[..., Tensor]) -> None:
    """Of one forward: the same calls made them, in the same order."""
    count = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return function(x)

    trace = profile(counted, leaf(ROWS, WIDTH))
    assert count == 1
    assert trace.unseen is not None
    assert [pack.storage for pack in trace.unseen] == [pack.storage for pack in trace.packs]


def test_a_sum_with_a_number_is_not_made_again() -> None:
    """Nothing but the call knows the number."""
    trace = profile(added, leaf(ROWS, WIDTH))
    assert trace.unseen is not None
    assert trace.packs[-1].producer == "AddBackward0"
    assert trace.unseen[-1].producer == ""


def test_statistics_are_kept() -> None:
    """Four bytes for each of two in a row; a region that sees calls keeps none."""
    trace = profile(normed, leaf(ROWS, WIDTH))
    other = trace.without_calls
    assert other is not None
    assert (other.sees_calls, other.calls_cost, other.unseen) == (False, 0, None)
    assert other.fixed_bytes() == trace.fixed_bytes() + 2 * 4 * ROWS
    assert trace.total_bytes() == other.total_bytes()


@pytest.mark.parametrize("inside", [span(torch.sin, "sine"), lambda x: run(torch.sin, x)])
def test_where_others_have_a_say_calls_are_seen(inside: Callable[..., Tensor]) -> None:
    """Only one of the two knows of a span, and of a region inside."""
    trace = profile(lambda x: inside(added(x)), leaf(ROWS, WIDTH))
    assert trace.unseen is None
    assert trace.without_calls is None


def test_seeing_calls_costs_time_and_no_operations() -> None:
    """As many calls as there were, each at what the least one takes."""
    x = leaf(ROWS, WIDTH)
    trace = profile(lambda x: x.sin().cos(), x)
    assert trace.calls_cost == 2 * nanoseconds_of_a_call() > 0
    assert profile(added, x, unit="flops").calls_cost == 0


class Heard(TorchFunctionMode):
    """Counts calls that a mode inside of it passed on from Python."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Count it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [added, normed])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_engine_does_as_either_was_written_down(
    function: Callable[..., Tensor], share: float
) -> None:
    """Bytes and gradients, in a forward that decides, that is written down, and that follows."""
    x = leaf(ROWS, WIDTH)
    trace = profile(function, x)
    plans = [solved(each, share) for each in (trace, trace.without_calls) if each is not None]
    assert not plans[1].sees_calls
    for plan in plans:
        for _ in range(4):
            assert bytes_kept(function, x, policy=plan) == plan.kept_bytes
            assert is_plain(function, x, policy=plan)


def test_plan_that_does_without_is_not_taught_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other forwards of the function showed is not for it."""
    x = leaf(ROWS, WIDTH)
    for _ in range(2):
        run(normed, x, policy=recompute_all())
    trace = profile(normed, x).without_calls
    assert trace is not None
    plan = solved(trace, 0.5)
    entered: list[object] = []
    modes = "sac_policies.engines.recipe._calls.CallsMode.__enter__"
    monkeypatch.setattr(modes, lambda mode: entered.append(mode) or mode)
    for _ in range(4):
        checkpoint(normed, x, policy=plan).sum().backward()
    assert entered == []


def test_nothing_of_the_forward_stays() -> None:
    """Neither of the two holds what was saved when the profile is there."""
    marks: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        made = x @ W
        marks.append(weakref.ref(made))
        return made.sin() + 1.0

    gc.disable()
    try:
        trace = profile(function, leaf(ROWS, WIDTH))
        assert marks[0]() is None
    finally:
        gc.enable()
    assert trace.packs

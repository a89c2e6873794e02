"""A plan says what it costs, whom it is for, and what is wrong with it."""

from __future__ import annotations

import pytest

from sac_policies import BudgetPlan


@pytest.mark.parametrize(
    ("cost", "bound", "gap"), [(8, 8, 0.0), (8, 6, 0.25), (8, 0, 1.0), (0, 0, 0.0)]
)
def test_gap_is_the_share_that_a_better_plan_could_save(cost: int, bound: int, gap: float) -> None:
    """None for an optimal plan, nor where nothing is repeated."""
    assert BudgetPlan((), (), 0, cost, bound, "ns").gap == gap

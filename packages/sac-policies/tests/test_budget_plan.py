"""Costs, digests and error messages of plans."""

from __future__ import annotations

from typing import Any

import pytest

from sac_policies.budget import BudgetPlan, Infeasible
from sac_policies.policies import Decision


def plan(**changed: Any) -> BudgetPlan:
    """A plan, with some of its fields given."""
    fields = {
        "choices": ((("aten.mm.default", 0), Decision.SAVE),),
        "kept_bytes": 8,
        "recompute_cost": 6,
        "unit": "ns",
    }
    return BudgetPlan(**(fields | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"choices": ()},
        {"choices": ((("aten.mm.default", 0), Decision.OFFLOAD),)},
    ],
)
def test_plan_that_decides_otherwise_has_another_digest(changed: dict[str, Any]) -> None:
    """Decisions for single calls are part of the digest."""
    assert plan(**changed).digest != plan().digest


def test_costs_are_no_part_of_the_digest() -> None:
    """Ranks measure different times for the same decisions."""
    assert plan(recompute_cost=9, unit="flops").digest == plan().digest


def test_what_does_not_fit_is_false_and_says_what_would() -> None:
    """The message says how many bytes are missing."""
    found = Infeasible(1_000, 2_500)
    assert not found
    assert str(found).startswith("nothing fits 1,000 bytes: 2,500 are needed, 1,500 more.")
    found = Infeasible(1_000, 2_500, "4 x runs again")
    assert "bytes: 2,500 are needed (4 x runs again), 1,500 more." in str(found)

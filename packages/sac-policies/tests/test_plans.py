"""Plans decide single calls."""

from __future__ import annotations

import pytest
import torch

from sac_policies import PolicyError, UnmatchedEntryWarning, checkpoint
from sac_policies.budget import Infeasible
from sac_policies.policies import Decision, OpView
from sac_policies.policies import save_by_index as plan_of

MM = ("aten.mm.default", 1)


def test_only_listed_calls_have_an_answer():
    """The second matmul is saved; other calls have no answer."""
    plan = plan_of({MM: Decision.SAVE})
    op = torch.ops.aten.mm.default
    assert [plan.decide(OpView(op, index)) for index in range(3)] == [None, Decision.SAVE, None]


def test_order_of_listing_does_not_matter():
    """Plans with the same calls are equal."""
    rows = [(MM, Decision.SAVE), (("aten.sin.default", 0), Decision.OFFLOAD)]
    assert plan_of(rows) == plan_of(rows[::-1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(("aten.mm.default", -1), Decision.SAVE)], "-1.* decides no call"),
        ([(MM, True)], "True.* decides no call"),
        ([("aten.mm", Decision.SAVE)], "'aten.mm'.* decides no call"),
        ([(MM, Decision.SAVE), (MM, Decision.OFFLOAD)], "is listed twice"),
    ],
)
def test_bad_rows_are_named(rows, message):
    """Every row is checked when the plan is made."""
    with pytest.raises(PolicyError, match=message):
        plan_of(rows)


def test_call_that_never_comes_is_reported():
    """It means that the plan was made for another region."""
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.warns(UnmatchedEntryWarning, match=r"aten\.mm\.default\[1\]"):
        checkpoint(torch.mm, x, x, policy=plan_of({MM: Decision.SAVE}))


def test_what_does_not_fit_is_false_and_says_what_would() -> None:
    """The message says how many bytes are missing."""
    found = Infeasible(1_000, 2_500)
    assert not found
    assert str(found).startswith("nothing fits 1,000 bytes: 2,500 are needed, 1,500 more.")
    found = Infeasible(1_000, 2_500, "4 x recomputes everything")
    assert "bytes: 2,500 are needed (4 x recomputes everything), 1,500 more." in str(found)

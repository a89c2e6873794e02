"""Plans decide single calls, and have the same digest on every rank."""

from __future__ import annotations

import re

import pytest
import torch

from sac_policies import PolicyError, UnmatchedEntryWarning, checkpoint, solve
from sac_policies.budget import Trace
from sac_policies.policies import Decision, OpView
from sac_policies.policies import save_by_index as plan_of

MM = ("aten.mm.default", 1)


def test_only_listed_calls_have_an_answer():
    """The second matmul is saved; other calls have no answer."""
    plan = plan_of({MM: Decision.SAVE})
    op = torch.ops.aten.mm.default
    assert [plan.decide(OpView(op, index)) for index in range(3)] == [None, Decision.SAVE, None]


def test_order_of_listing_does_not_matter():
    """Plans with the same calls are equal and have equal digests."""
    rows = [(MM, Decision.SAVE), (("aten.sin.default", 0), Decision.OFFLOAD)]
    assert plan_of(rows) == plan_of(rows[::-1])
    assert plan_of(rows).digest == plan_of(rows[::-1]).digest


def test_digest_tells_plans_apart():
    """Another decision for one call gives another digest."""
    assert plan_of({MM: Decision.SAVE}).digest != plan_of({MM: Decision.OFFLOAD}).digest


def test_digest_is_sixteen_hexadecimal_digits():
    """For a plan written by hand, a solved plan, and a trace."""
    trace = Trace("ns", (), ())
    for plan in (plan_of({MM: Decision.SAVE}), solve(trace, 0), trace):
        assert re.fullmatch("[0-9a-f]{16}", plan.digest)


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

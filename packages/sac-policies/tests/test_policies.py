"""Single policies, and their combination with `|`, `&`, `~` and `first_match`."""

from __future__ import annotations

import pytest
import torch

from sac_policies import (
    ConflictError,
    PolicyError,
    first_match,
    offload,
    recompute_all,
    recompute_ops,
    save_all,
    save_ops,
)
from sac_policies.policies import Decision, OpView, as_policy

MM = torch.ops.aten.mm.default
SIN = torch.ops.aten.sin.default


SAVE, RECOMPUTE = Decision.SAVE, Decision.RECOMPUTE


def _decide(policy, op=MM):
    return policy.decide(OpView(op, 0))


@pytest.mark.parametrize(
    ("policy", "of_mm", "of_sin"),
    [
        (save_ops("aten.mm") | recompute_ops("aten.mm"), SAVE, None),
        (save_ops("aten.mm") & save_all(), SAVE, None),
        (save_ops("aten.sin") & save_all(), None, SAVE),
        (~save_ops("aten.mm"), RECOMPUTE, SAVE),
        (first_match(recompute_ops("aten.mm"), save_all()), RECOMPUTE, SAVE),
    ],
    ids=["union", "intersection", "less", "complement", "first"],
)
def test_policies_combine(policy, of_mm, of_sin):
    """`|` takes the larger decision, `&` the smaller, `~` inverts, `first_match` stops at one."""
    assert [_decide(policy), _decide(policy, SIN)] == [of_mm, of_sin]


def test_saving_and_offloading_one_value_is_a_conflict():
    """A value is kept in one place; the error names the operator and the rule."""
    with pytest.raises(ConflictError, match=r"aten\.mm\.default is saved by one side .*py:\d+ in"):
        _decide(save_ops("aten.mm") | offload("aten.mm"))


def test_complement_of_an_offloading_policy_is_refused():
    """Offloading has no complement."""
    with pytest.raises(PolicyError, match="can offload, but only saving has an opposite"):
        ~offload("aten.mm")


def test_first_match_of_nothing_is_refused():
    """An empty first_match decides nothing."""
    with pytest.raises(PolicyError, match=r"rules \(\) are empty"):
        first_match()


def test_constant_agrees_with_decide():
    """If the operator alone determines the decision, both methods return it."""
    policies = [save_ops("aten.mm"), ~save_ops("aten.mm"), offload("aten.mm"), recompute_all()]
    for policy in policies:
        assert policy.constant(MM) is _decide(policy)
        assert policy.constant(SIN) is _decide(policy, SIN)


@pytest.mark.parametrize("other", ["aten.sin", lambda ctx, op: True, None])
def test_only_policies_combine(other):
    """For other operands, Python raises the TypeError of `|` and `&`."""
    with pytest.raises(TypeError, match="unsupported operand"):
        save_ops("aten.mm") | other
    with pytest.raises(TypeError, match="unsupported operand"):
        save_ops("aten.mm") & other


def test_where_a_rule_was_written_is_no_part_of_its_value():
    """One function or list, made a policy on two lines, gives equal policies."""
    entries = ["aten.mm"]
    first = as_policy(entries), as_policy(_decide)
    again = as_policy(entries), as_policy(_decide)
    assert first == again
    assert list(map(hash, first)) == list(map(hash, again))

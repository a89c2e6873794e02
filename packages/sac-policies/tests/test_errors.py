"""Every error is a SacError and one of Python's own, and says what to do next."""

from __future__ import annotations

import pytest

import sac_policies
from sac_policies import SacError


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (sac_policies.PolicyError, ValueError),
        (sac_policies.UnmatchedNameError, ValueError),
        (sac_policies.DecisionError, ValueError),
        (sac_policies.ConflictError, ValueError),
        (sac_policies.EngineError, RuntimeError),
        (sac_policies.RecomputeError, RuntimeError),
        (sac_policies.MutationError, RuntimeError),
        (sac_policies.BudgetError, ValueError),
    ],
)
def test_errors_are_caught_both_ways(error, builtin):
    """Each leaf is a SacError and a built-in error."""
    assert issubclass(error, SacError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sac_policies.save_ops("aten.nothing_like_it"),
        lambda: sac_policies.save_every_nth("aten.mm", n=0),
        lambda: sac_policies.from_json("[]"),
        lambda: sac_policies.first_match(),
        lambda: sac_policies.from_torch("save"),
        lambda: sac_policies.as_policy(3),
        lambda: ~sac_policies.offload("aten.mm"),
        lambda: sac_policies.scoped("attn", sac_policies.save_all()),
        lambda: sac_policies.first_match([sac_policies.save_all()]),
        lambda: sac_policies.save_modules(["attn"]),
        lambda: sac_policies.name(3, 4),
        lambda: sac_policies.solve(sac_policies.Trace("ns", (), ()), 1, backend="fast"),
    ],
)
def test_messages_have_place_rule_and_next_step(make):
    """`sac_policies.<function>: <thing>, but <rule>. <Next step>.`"""
    with pytest.raises(SacError, match=r"^sac_policies\.\w+: .*, but [^.]+.*\. .+[.?]$"):
        make()

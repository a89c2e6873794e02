"""Every error is a SacError and a builtin error, and gives a remedy."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

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
    """Each class derives from SacError and from a builtin error."""
    assert issubclass(error, SacError)
    assert issubclass(error, builtin)


VALUES = torch.full((2, 3), 0.123)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sac_policies.checkpoint(VALUES, nn.ReLU(), policy=sac_policies.save_all()),
        lambda: sac_policies.report([VALUES], nn.ReLU(), policy=sac_policies.save_all()),
        lambda: sac_policies.fit_(VALUES, nn.ReLU(), "50%"),
        lambda: sac_policies.fit_({"x": VALUES}, nn.ReLU(), "50%"),
        lambda: sac_policies.fit_(UserDict(x=VALUES), nn.ReLU(), "50%"),
        lambda: sac_policies.fit_(nn.Linear(3, 3), "50%", VALUES),
        lambda: sac_policies.checkpoint(nn.ReLU(), VALUES, policy=VALUES),
    ],
)
def test_wrong_order_of_arguments_prints_no_tensor_values(call):
    """Shapes are enough to see what was passed where."""
    with pytest.raises(SacError, match=r"of shape \(2, 3\)") as caught:
        call()
    assert "0.123" not in str(caught.value)


@pytest.mark.parametrize(("budget", "batch"), [("70%", VALUES), (0.7, {"x": VALUES})])
def test_budget_before_batch_is_answered_with_the_order(budget, batch):
    """One sentence gives the right call."""
    said = rf"the order is model, batch, budget\. Write fit_\(model, batch, {budget!r}\)"
    with pytest.raises(sac_policies.BudgetError, match=said):
        sac_policies.fit_(nn.Linear(3, 3), budget, batch)


X = torch.ones(2, 4, requires_grad=True)
KEEP = sac_policies.save_ops("aten.addmm")


@pytest.mark.parametrize(
    ("call", "next_step"),
    [
        (lambda m: sac_policies.checkpoint(m, X, KEEP), r"Write policy=\.\.\."),
        (lambda m: sac_policies.checkpoint(KEEP, m, X), "the policy as policy="),
        (
            lambda m: sac_policies.checkpoint(m(X), policy=KEEP),
            r"do not call it: checkpoint\(module",
        ),
        (
            lambda m: sac_policies.checkpoint(m, X, policy=sac_policies.save_all),
            r"save_all\(\.\.\.",
        ),
        (
            lambda m: sac_policies.checkpoint(m, X, policy="save_all"),
            r"Call it: .*save_all\(\.\.\.",
        ),
        (lambda m: torch_checkpoint(m, X, use_reentrant=False, context_fn=KEEP), "context_fn=sac"),
        (lambda m: sac_policies.save_ops(["aten.mm"]), r"save_ops\(\*entries\)"),
        (lambda m: sac_policies.save_modules(m), "Write for example 'attn'"),
        (lambda m: sac_policies.save_modules(["attn"]), r"save_modules\(\*names\)"),
    ],
)
def test_natural_mistake_is_answered_with_the_right_call(call, next_step):
    """Common mistakes, and the calls that the errors recommend."""
    with pytest.raises(SacError, match=next_step):
        call(nn.Linear(4, 4))


@pytest.mark.parametrize("policy", [sac_policies.MATMULS, torch.ops.aten.addmm.default])
def test_group_or_operator_is_a_policy_that_saves_it(policy):
    """It means the same as a list with this entry."""
    rows = sac_policies.report(nn.Linear(4, 4), X, policy=policy).kept
    assert [row.op for row in rows] == ["aten.addmm.default"]

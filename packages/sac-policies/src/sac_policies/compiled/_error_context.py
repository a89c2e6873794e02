"""Where an error happened and which rule of the policy had decided, for messages."""

from __future__ import annotations

from .._frames import user_line
from ..policies._policies import DEPENDS, Policy
from ..policies._views import Operator


def error_context(policy: Policy, op: Operator | None) -> str:
    """Say "at file.py:12 in forward; rule ..." for an error about a value of `op`.

    Args:
        policy: what decided.
        op: the operator that made the value; None where no rule can speak of it.

    Example:
        >>> import torch
        >>> from sac_policies import recompute_all, save_ops
        >>> rules = save_ops("aten.mm") | save_ops("aten.sin")
        >>> rule_for(rules, torch.ops.aten.sin.default).text
        "OpRule(entries=('aten.sin',), answer=<Decision.SAVE: 'save'>)"
    """
    if op is None:
        return f"at {user_line()}; policy {policy.text}"
    return f"at {user_line()}; rule {rule_for(policy, op).text}"


def rule_for(policy: Policy, op: Operator) -> Policy:
    """Return the innermost rule that decides `op` by itself.

    Where several may, depending on the call, it is the policy that joins them.
    """
    answer = policy.constant(op)
    speakers = [part for part in policy.parts if part.constant(op) is answer]
    if not speakers or (answer is DEPENDS and len(speakers) > 1):
        return policy
    return rule_for(speakers[0], op)

"""Policies as functions for torch's selective checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._decisions import to_torch
from ._functions import FunctionPolicy
from ._policies import Policy
from ._rules import Always, OpRule
from ._views import Operator, OpView


def is_selective(policy: Policy) -> bool:
    """Whether torch's selective checkpointing can follow a policy: it reads only operators.

    Example:
        >>> from sac_policies import save_modules, save_ops
        >>> is_selective(save_ops("aten.mm")), is_selective(save_modules("attn"))
        (True, False)
    """
    return not policy.offloads and _is_of_operators(policy)


def selective(policy: Policy) -> Callable[..., Any]:
    """Return the policy as a function for torch, without modules, names or call numbers.

    Example:
        >>> import torch
        >>> from sac_policies import save_ops
        >>> selective(save_ops("aten.mm"))(None, torch.ops.aten.mm.default).name
        'MUST_SAVE'
    """
    if isinstance(policy, FunctionPolicy):
        return policy.function

    def ask(ctx: Any, op: Operator, *args: Any, **kwargs: Any) -> Any:
        return to_torch(policy.decide(OpView(op, 0, None, args, kwargs)))

    return ask


def _is_of_operators(policy: Policy) -> bool:
    if policy.parts:
        kinds = (policy.reads_modules, policy.reads_names)
        return not any(kinds) and all(map(_is_of_operators, policy.parts))
    return isinstance(policy, (OpRule, Always, FunctionPolicy))

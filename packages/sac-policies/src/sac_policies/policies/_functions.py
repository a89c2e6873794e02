"""Plain functions, lists and dicts as policies, and policies as functions for torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .._errors import DecisionError, PolicyError, shown
from .._frames import user_line
from . import _rules
from ._catalogue import Group
from ._decisions import Answer, Decision, decision_of, to_torch
from ._policies import Combined, Policy, Replaced, first_match
from ._rules import Always, OpRule, offload, recompute_all, recompute_ops, save_ops, scoped
from ._views import Operator, OpView, RegionSummary

PolicyFunction = Callable[..., Any]
"""(ctx, op, *args, **kwargs) -> CheckpointPolicy or bool; `ctx` is an `OpView`."""

PolicyLike = Policy | PolicyFunction | str | Group | list[Any] | Mapping[Any, Any]
"""What `as_policy` reads."""

_INSIDE = " :: "
_MAKERS = {
    Decision.SAVE: save_ops,
    Decision.OFFLOAD: offload,
    Decision.RECOMPUTE: recompute_ops,
}


@dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A plain function that is called for every operator call.

    Equal if the function is the same object. Slower than rules, since it is called every time.
    """

    function: PolicyFunction

    def decide(self, view: OpView) -> Answer:
        """Call the function."""
        try:
            given = self.function(view, view.op, *view.args, **view.kwargs)
        except TypeError as error:  # see DecisionError
            raise DecisionError(
                f"sac_policies.checkpoint: policy {_label(self.function)} raised TypeError "
                f"({error}) for operator {view.op} (at {user_line()}), but it must answer. It "
                "takes (ctx, op, *args, **kwargs)."
            ) from error
        answer = decision_of(given)
        if answer is None:
            raise DecisionError(
                f"sac_policies.checkpoint: policy {_label(self.function)} returned {shown(given)} "
                f"for operator {view.op} (at {user_line()}), but an answer is a CheckpointPolicy "
                "or a bool. Return one of them on every path."
            )
        return answer

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Return the packets that the function compares operators with, if it kept nothing."""
        overloads = (op for op in seen.ops if isinstance(op, OpOverload) and not seen.kept)
        return tuple(
            f"{op.overloadpacket} (a packet; operators are overloads, as {op})"
            for op in overloads
            if self._would_save(op.overloadpacket)
        )

    def _would_save(self, packet: Any) -> bool:
        try:
            answer = decision_of(self.function(OpView(packet, 0), packet))
        except Exception:  # it may require arguments
            return False
        return answer is not None and answer.keeps


def as_policy(given: PolicyLike) -> Policy:
    """Convert functions, operators, lists and dicts to policies.

    Args:
        given: a policy; a function (ctx, op, *args, **kwargs) -> CheckpointPolicy or bool; an
            operator or group to save, or a list of them, as for `save_ops`; or a dict from
            operators to decisions, in which the first matching entry decides. A decision is a
            `Decision`, its word ("save", "offload", "recompute"), a CheckpointPolicy or a bool.
            "PATHS :: OPERATOR", in a list or a dict, is an operator inside modules, as for
            `scoped`.

    Raises:
        PolicyError: it is none of these, or an entry is not.

    Example:
        >>> as_policy(["aten.mm"]) == save_ops("aten.mm")
        True
        >>> as_policy("*.router :: aten.mm") == scoped(save_ops("aten.mm"), "*.router")
        True
        >>> as_policy({"aten.mm": "recompute", "aten.*": "save"}).rules[0].answer.value
        'recompute'
    """
    if isinstance(given, Policy):
        return given
    _check_called(given)
    if isinstance(given, (str, Group, OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return _rule(given, Decision.SAVE)
    if isinstance(given, Mapping):
        rules = [_rule(entry, _decision(entry, found)) for entry, found in given.items()]
        return first_match(*rules) if rules else recompute_all()
    if isinstance(given, (list, tuple, set, frozenset)):
        if any(isinstance(entry, str) and _INSIDE in entry for entry in given):
            return first_match(*[_rule(entry, Decision.SAVE) for entry in given])
        return save_ops(*given) if given else recompute_all()
    if callable(given):
        return FunctionPolicy(given)
    raise PolicyError(
        f"sac_policies.checkpoint: policy {shown(given)} is a {type(given).__name__}, but a "
        "policy, a function, or a list or dict of operators is needed. Try save_ops('aten.mm')."
    )


def _check_called(given: object) -> None:
    """Refuse `save_all`, or its name, in place of `save_all()`."""
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    if not str(name).startswith(("save_", "recompute_", "offload", "scoped")):
        return
    maker = getattr(_rules, str(name), None)
    if maker is not None and (given is maker or isinstance(given, str)):
        raise PolicyError(
            f"sac_policies.checkpoint: policy {shown(given)} is the name of a function, but the "
            f"policy that it returns is needed. Call it: policy=sac_policies.{name}(...)."
        )


def _rule(entry: Any, decision: Decision) -> Policy:
    make = _MAKERS[decision]
    if not (isinstance(entry, str) and _INSIDE in entry):
        return make(entry)
    paths, _, op = entry.rpartition(_INSIDE)
    return scoped(make(op.strip()), paths.strip())


def _decision(entry: Any, given: Any) -> Decision:
    words = [each.value for each in Decision]
    if isinstance(given, str) and given in words:
        return Decision(given)
    decision = decision_of(given)
    if decision is None:
        raise PolicyError(
            f"sac_policies.checkpoint: policy decides {shown(given)} for {shown(entry)}, but a "
            f"decision is one of {', '.join(map(repr, words))}, a CheckpointPolicy or a bool. "
            "Write for example {'aten.mm': 'save'}."
        )
    return decision


def _label(function: PolicyFunction) -> str:
    return getattr(function, "__qualname__", None) or shown(function)


# For torch's selective checkpointing


def is_selective(policy: Policy) -> bool:
    """Whether torch's selective checkpointing can follow a policy: it reads only operators.

    Example:
        >>> from sac_policies import save_modules
        >>> is_selective(save_ops("aten.mm")), is_selective(save_modules("attn"))
        (True, False)
    """
    if policy.offloads or not isinstance(
        policy, (OpRule, Always, FunctionPolicy, Combined, Replaced)
    ):
        return False
    return all(map(is_selective, policy.parts))


def selective(policy: Policy) -> Callable[..., Any]:
    """Return the policy as a function for torch, without modules, names or call numbers.

    Example:
        >>> import torch
        >>> selective(save_ops("aten.mm"))(None, torch.ops.aten.mm.default).name
        'MUST_SAVE'
    """
    if isinstance(policy, FunctionPolicy):
        return policy.function

    def ask(ctx: Any, op: Operator, *args: Any, **kwargs: Any) -> Any:
        return to_torch(policy.decide(OpView(op, 0, None, args, kwargs)), op, policy)

    return ask

"""Plain functions, lists and dicts as policies, with torch's conventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .._errors import DecisionError, PolicyError, shown
from .._frames import user_line
from . import _builders
from ._builders import offload, recompute_all, recompute_ops, save_ops, scoped
from ._catalogue import Group
from ._decisions import Decision, from_torch
from ._policies import Answer, Policy, first_match
from ._views import OpView, RegionSummary

PolicyFunction = Callable[..., Any]
"""(ctx, op, *args, **kwargs) -> CheckpointPolicy or bool; `ctx` is an `OpView`."""

PolicyLike = Policy | PolicyFunction | str | Group | list[Any] | Mapping[Any, Any]
"""What `as_policy` reads."""

_INSIDE = " :: "
_RULES = {
    Decision.SAVE: save_ops,
    Decision.OFFLOAD: offload,
    Decision.RECOMPUTE: recompute_ops,
}


_MAKERS = {
    name: each
    for name, each in vars(_builders).items()
    if getattr(each, "__module__", "") == _builders.__name__ and not name.startswith("_")
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
            answer = self.function(view, view.op, *view.args, **view.kwargs)
        except TypeError as error:  # see DecisionError
            raise DecisionError(
                f"sac_policies.checkpoint: policy {_label(self.function)} raised TypeError "
                f"({error}) for operator {view.op} (at {user_line()}), but it must answer. It "
                "takes (ctx, op, *args, **kwargs)."
            ) from error
        try:
            return from_torch(answer)
        except DecisionError:
            raise DecisionError(
                f"sac_policies.checkpoint: policy {_label(self.function)} returned "
                f"{shown(answer)} for "
                f"operator {view.op} (at {user_line()}), but an answer is a CheckpointPolicy or a "
                "bool. Return one of them on every path."
            ) from None

    @property
    def text(self) -> str:
        """The function's name and line."""
        code = getattr(self.function, "__code__", None)
        place = "" if code is None else f" (at {code.co_filename}:{code.co_firstlineno})"
        return f"{_label(self.function)}{place}"

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Return the packets that the function compares operators with, if it kept nothing."""
        if seen.kept:
            return ()
        overloads = (op for op in seen.ops if isinstance(op, OpOverload))
        return tuple(
            f"{op.overloadpacket} (a packet; operators are overloads, as {op})"
            for op in overloads
            if self._would_save(op.overloadpacket)
        )

    def _would_save(self, packet: Any) -> bool:
        try:
            return from_torch(self.function(OpView(packet, 0), packet)).keeps
        except Exception:  # a callable object may require arguments
            return False


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
    name = given if isinstance(given, str) else getattr(given, "__name__", None)
    if name in _MAKERS and given in (name, _MAKERS[name]):
        raise PolicyError(
            f"sac_policies.checkpoint: policy {shown(given)} is the name of a function, but the "
            f"policy that it returns is needed. Call it: policy=sac_policies.{name}(...)."
        )
    if isinstance(given, (str, Group, OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return _rule(given, Decision.SAVE)
    if isinstance(given, Mapping):
        rules = [_rule(entry, _decision(entry, found)) for entry, found in given.items()]
        return first_match(*rules) if rules else recompute_all()
    if isinstance(given, (list, tuple, set, frozenset)):
        inside = [entry for entry in given if isinstance(entry, str) and _INSIDE in entry]
        if not inside:
            return save_ops(*given) if given else recompute_all()
        return first_match(*[_rule(entry, Decision.SAVE) for entry in given])
    if callable(given):
        return FunctionPolicy(given)
    raise PolicyError(
        f"sac_policies.checkpoint: policy {shown(given)} is a {type(given).__name__}, but a "
        "policy, a function, or a list or dict of operators is needed. Try save_ops('aten.mm')."
    )


def _rule(entry: Any, decision: Decision) -> Policy:
    rule = _RULES[decision]
    if not (isinstance(entry, str) and _INSIDE in entry):
        return rule(entry)
    paths, _, op = entry.rpartition(_INSIDE)
    return scoped(rule(op.strip()), paths.strip())


def _decision(entry: Any, given: Any) -> Decision:
    try:
        return Decision(given) if isinstance(given, str) else from_torch(given)
    except (ValueError, DecisionError):
        words = ", ".join(repr(each.value) for each in Decision)
        raise PolicyError(
            f"sac_policies.checkpoint: policy decides {shown(given)} for {shown(entry)}, but a "
            f"decision is one of {words}, a CheckpointPolicy or a bool. Write for example "
            "{'aten.mm': 'save'}."
        ) from None


def _label(function: PolicyFunction) -> str:
    return getattr(function, "__qualname__", None) or shown(function)

"""Plain functions and lists of operators as policies, as torch takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from .._errors import DecisionError, PolicyError, shown
from .._frames import user_line
from ._builders import recompute_all, save_ops
from ._decisions import from_torch
from ._policies import Answer, Policy
from ._views import OpView, RegionSummary

PolicyFunction = Callable[..., Any]
"""(ctx, op, *args, **kwargs) -> CheckpointPolicy or bool; `ctx` is an `OpView`."""


@dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A plain function asked about every operator call.

    Equal where the function is the same object. Slower than rules: it is asked every time.
    """

    function: PolicyFunction

    def decide(self, view: OpView) -> Answer:
        """Ask the function."""
        try:
            answer = self.function(view, view.op, *view.args, **view.kwargs)
        except TypeError as error:  # see DecisionError
            raise DecisionError(
                f"sac_policies.checkpoint: policy {_label(self.function)} raised TypeError "
                f"({error}) for operator {view.op} (at {user_line()}), but it is to answer. It "
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
        """The function's name, and where it is."""
        code = getattr(self.function, "__code__", None)
        place = "" if code is None else f" (at {code.co_filename}:{code.co_firstlineno})"
        return f"{_label(self.function)}{place}"

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Packets, where a function that kept nothing compares operators with packets."""
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
        except Exception:  # asked without arguments; a function that needs them cannot tell
            return False


def as_policy(given: Policy | PolicyFunction | list[Any]) -> Policy:
    """Read whatever is accepted as a policy.

    Args:
        given: a policy; a list of operators to save; or a function
            (ctx, op, *args, **kwargs) -> CheckpointPolicy or bool.

    Raises:
        PolicyError: none of these.

    Example:
        >>> as_policy(["aten.mm"]) == save_ops("aten.mm")
        True
    """
    if isinstance(given, Policy):
        return given
    if isinstance(given, (list, tuple, set, frozenset)):
        return save_ops(*given) if given else recompute_all()
    if callable(given):
        return FunctionPolicy(given)
    raise PolicyError(
        f"sac_policies.checkpoint: policy {shown(given)} is a {type(given).__name__}, but a "
        "policy, a "
        "function or a list of operators is needed. Try save_ops('aten.mm')."
    )


def _label(function: PolicyFunction) -> str:
    return getattr(function, "__qualname__", None) or shown(function)

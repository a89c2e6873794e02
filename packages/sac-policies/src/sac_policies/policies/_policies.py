"""The base class of policies, and how two of them combine.

- A policy is a frozen value. It answers only from the `OpView` of a call, so equal views in the
  same order get equal decisions, in eager and compiled code and on every rank.
- An answer is a `Decision`, or None if no rule applies. A call without an answer is recomputed.
- Answers are ordered None < RECOMPUTE < SAVE. `|` takes the larger, `&` the smaller; `~` turns SAVE
  into RECOMPUTE and every other answer into SAVE.
- If one side of `|` or `&` saves a value and the other offloads it, that is a `ConflictError`.
- `constant(op)` is the answer for every call of `op`, or `DEPENDS`. The tape does no bookkeeping
  for an operator whose constant answer keeps nothing.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

from .._errors import ConflictError, PolicyError, shown
from .._frames import user_line
from ._decisions import Decision
from ._handles import handle_of
from ._views import Operator, OpView, RegionSummary, Unmatched


class _Depends(enum.Enum):
    """Type of `DEPENDS`."""

    DEPENDS = "depends"


DEPENDS: Final = _Depends.DEPENDS
"""The answer of `Policy.constant` where one call of the operator may differ from the next."""

Answer = Decision | None
Constant = Decision | _Depends | None


class Policy(ABC):
    """A rule that decides, for every operator call of a region, what is kept for backward.

    Subclasses are frozen dataclasses and implement `decide`; `constant`, `counts` and
    `offloads` have safe defaults.

    Attributes:
        handle: text by which compiled code finds this object in this process (`_handles.py`); not
            part of its value, and not pickled.
    """

    handle: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the object and its handle."""
        del args, kwargs
        made = super().__new__(cls)
        object.__setattr__(made, "handle", handle_of(made))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the handle and cached values."""
        kept = (name for name in vars(self) if name != "handle")
        own = (name for name in kept if not isinstance(_declared(self, name), cached_property))
        return {name: getattr(self, name) for name in own}

    @abstractmethod
    def decide(self, view: OpView) -> Answer:
        """Decide one call, after it ran; None if no rule of this policy applies."""

    def constant(self, op: Operator) -> Constant:
        """Return the answer for every call of `op`, or `DEPENDS`."""
        del op
        return DEPENDS

    def counts(self, op: Operator) -> bool:
        """Whether `decide` reads how often `op` has been called (`view.region`)."""
        return any(part.counts(op) for part in self.parts)

    @property
    def offloads(self) -> bool:
        """Whether the policy can answer OFFLOAD."""
        return any(part.offloads for part in self.parts)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies this one is made of, in order."""
        return ()

    @property
    def text(self) -> str:
        """Text for messages."""
        return repr(self)

    @property
    def reads_modules(self) -> bool:
        """Whether `decide` reads `view.module`."""
        return any(part.reads_modules for part in self.parts)

    @property
    def reads_names(self) -> bool:
        """Whether `decide` reads `view.label`."""
        return any(part.reads_names for part in self.parts)

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Return operators that this policy names and that `seen` lacks; they cause a warning."""
        return tuple(entry for part in self.parts for entry in part.unmatched(seen))

    def missing(self, seen: RegionSummary) -> tuple[Unmatched, ...]:
        """Return modules and tensors that this policy names and `seen` lacks: an error."""
        return tuple(name for part in self.parts for name in part.missing(seen))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be called, as by code that takes a policy for a function.

        Raises:
            PolicyError: with what to pass instead.
        """
        raise PolicyError(
            f"sac_policies.Policy: {shown(self)} is called, but a policy is a value. Call "
            "sac_policies.checkpoint(function, *args, policy=policy), or pass "
            "context_fn=sac_policies.context_fn(policy) to torch's checkpoint."
        )

    def __or__(self, other: Policy) -> Policy:
        return Union(self, other) if isinstance(other, Policy) else NotImplemented

    def __and__(self, other: Policy) -> Policy:
        return Intersection(self, other) if isinstance(other, Policy) else NotImplemented

    def __invert__(self) -> Policy:
        return Complement(self)


def _declared(policy: Policy, name: str) -> object:
    return getattr(type(policy), name, None)


def check_policy(given: object, *, where: str) -> None:
    """Refuse objects that are not policies.

    Raises:
        PolicyError: the message says how to make one.
    """
    if not isinstance(given, Policy):
        raise PolicyError(
            f"sac_policies.{where}: {shown(given)} is a {type(given).__name__}, but a policy is "
            "needed there. Write save_ops(...), or as_policy(...) around a function or a list."
        )


_RANK: dict[Answer, int] = {None: 0, Decision.RECOMPUTE: 1, Decision.SAVE: 2, Decision.OFFLOAD: 2}


@dataclass(frozen=True)
class _Pair(Policy):
    left: Policy
    right: Policy

    _choose: ClassVar[Callable[..., Answer]]

    def decide(self, view: OpView) -> Answer:
        """Combine the answers of both sides."""
        return self._combined(self.left.decide(view), self.right.decide(view), view.op)

    def constant(self, op: Operator) -> Constant:
        """Return the combined answer if both sides have a constant one."""
        left, right = self.left.constant(op), self.right.constant(op)
        if left is DEPENDS or right is DEPENDS:
            return DEPENDS
        return self._combined(left, right, op)

    def _combined(self, left: Answer, right: Answer, op: Operator) -> Answer:
        if {left, right} == {Decision.SAVE, Decision.OFFLOAD}:
            raise ConflictError(
                f"sac_policies.decide: operator {op} is saved by one side and offloaded by the "
                f"other of {shown(self, 200)} (at {user_line()}), but a value is kept in one "
                "place. Put the stronger rule first in first_match(...)."
            )
        return self._choose(left, right, key=_RANK.__getitem__)

    @property
    def parts(self) -> tuple[Policy, ...]:
        return (self.left, self.right)


@dataclass(frozen=True)
class Union(_Pair):
    """`left | right`: kept if either side keeps it."""

    _choose = staticmethod(max)


@dataclass(frozen=True)
class Intersection(_Pair):
    """`left & right`: kept if both sides keep it."""

    _choose = staticmethod(min)


@dataclass(frozen=True)
class Complement(Policy):
    """`~inner`: saves values that `inner` does not keep, recomputes values that it saves."""

    inner: Policy

    def __post_init__(self) -> None:
        if self.inner.offloads:
            raise PolicyError(
                f"sac_policies.Complement: policy {shown(self.inner)} can offload, but only "
                "saving has an opposite. Negate the part that saves and add offload(...) beside it."
            )

    def decide(self, view: OpView) -> Answer:
        """Swap saving and recomputing."""
        return _swapped(self.inner.decide(view))

    def constant(self, op: Operator) -> Constant:
        """Return the swapped answer if `inner` has a constant one."""
        answer = self.inner.constant(op)
        return DEPENDS if answer is DEPENDS else _swapped(answer)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The negated policy."""
        return (self.inner,)


def _swapped(answer: Answer) -> Decision:
    return Decision.RECOMPUTE if answer is Decision.SAVE else Decision.SAVE


@dataclass(frozen=True)
class FirstMatch(Policy):
    """The answer of the first policy that has one."""

    rules: tuple[Policy, ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise PolicyError(
                "sac_policies.first_match: rules () are empty, but at least one is needed. "
                "Pass recompute_all() to save nothing."
            )

    def decide(self, view: OpView) -> Answer:
        """Call each rule in order; return the first answer."""
        return _first(rule.decide(view) for rule in self.rules)

    def constant(self, op: Operator) -> Constant:
        """Return the first answer; `DEPENDS` if an earlier rule may answer."""
        return _first(rule.constant(op) for rule in self.rules)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The rules, in order."""
        return self.rules


def _first(answers: Iterable[Any]) -> Any:
    return next((answer for answer in answers if answer is not None), None)


def first_match(*rules: Policy) -> FirstMatch:
    """Combine policies: the first that has an answer decides.

    Example:
        >>> from sac_policies import recompute_ops, save_ops
        >>> small_first = first_match(recompute_ops("aten.mm"), save_ops("aten.*"))
    """
    for rule in rules:
        check_policy(rule, where="first_match")
    return FirstMatch(tuple(rules))

"""The base class of policies, and how they combine.

- A policy is a frozen value. It answers only from the `OpView` of a call, so equal views get equal
  decisions, in eager and compiled code and on every rank.
- An answer is a `Decision`, or None if no rule applies. A call without an answer is recomputed.
- Answers are ordered None < RECOMPUTE < SAVE. `|` takes the larger, `&` the smaller; `~` turns
  answers that keep a value into RECOMPUTE and every other answer into SAVE.
- If one side of `|` or `&` saves a value and the other offloads it, that is a `ConflictError`.
- `constant(op)` is the answer for every call of `op`, or `DEPENDS`. The tape does no bookkeeping
  for an operator whose constant answer keeps nothing.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from .._errors import ConflictError, PolicyError, shown
from .._frames import user_line
from ._decisions import Answer, Decision
from ._views import Missing, Operator, OpView, RegionSummary


class _Depends(enum.Enum):
    """Type of `DEPENDS`."""

    DEPENDS = "depends"


DEPENDS: Final = _Depends.DEPENDS
"""The answer of `Policy.constant` where one call of the operator may differ from the next."""

Constant = Answer | _Depends

_numbers = itertools.count()
_by_handle: weakref.WeakValueDictionary[str, Policy] = weakref.WeakValueDictionary()


class Policy(ABC):
    """A rule that decides, for every operator call of a region, what is kept for backward.

    Subclasses are frozen dataclasses and implement `decide`; the rest has safe defaults.

    Attributes:
        handle: text by which compiled code finds this object in this process: every supported torch
            takes text as a constant, and compiles again if it differs. Not pickled.
    """

    handle: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the object and its handle."""
        del args, kwargs
        made = super().__new__(cls)
        handle = f"{cls.__name__} {next(_numbers)}"
        object.__setattr__(made, "handle", handle)
        _by_handle[handle] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the handle."""
        return {name: value for name, value in vars(self).items() if name != "handle"}

    @abstractmethod
    def decide(self, view: OpView) -> Answer:
        """Decide one call, after it ran; None if no rule of this policy applies."""

    def constant(self, op: Operator) -> Constant:
        """Return the answer for every call of `op`, or `DEPENDS`."""
        del op
        return DEPENDS

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies this one is made of, in order."""
        return ()

    @property
    def offloads(self) -> bool:
        """Whether the policy can answer OFFLOAD."""
        return any(part.offloads for part in self.parts)

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

    def missing(self, seen: RegionSummary) -> tuple[Missing, ...]:
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
        return Combined("|", (self, other)) if isinstance(other, Policy) else NotImplemented

    def __and__(self, other: Policy) -> Policy:
        return Combined("&", (self, other)) if isinstance(other, Policy) else NotImplemented

    def __invert__(self) -> Policy:
        return Replaced(self, _COMPLEMENT)


def behind(handle: str) -> Policy:
    """Return the policy of a handle."""
    return _by_handle[handle]


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


_RANK: dict[Any, int] = {None: 0, Decision.RECOMPUTE: 1, Decision.SAVE: 2, Decision.OFFLOAD: 2}


@dataclass(frozen=True, repr=False)
class Combined(Policy):
    """Several policies: kept if one keeps it, if all keep it, or as the first answer says."""

    how: Literal["|", "&", "first"]
    rules: tuple[Policy, ...]

    def decide(self, view: OpView) -> Answer:
        """Combine the answers of all rules; with "first", ask until one has an answer."""
        answer: Answer = self._combined((rule.decide(view) for rule in self.rules), view.op)
        return answer

    def constant(self, op: Operator) -> Constant:
        """Combine the constant answers."""
        answer: Constant = self._combined((rule.constant(op) for rule in self.rules), op)
        return answer

    def _combined(self, answers: Iterable[Any], op: Operator) -> Any:
        if self.how == "first":
            return next((answer for answer in answers if answer is not None), None)
        found = list(answers)
        if DEPENDS in found:
            return DEPENDS
        if Decision.SAVE in found and Decision.OFFLOAD in found:
            raise ConflictError(
                f"sac_policies.checkpoint: operator {op} is saved by one side and offloaded by the "
                f"other of {shown(self, 200)} (at {user_line()}), but a value is kept in one "
                "place. Put the stronger rule first in first_match(...)."
            )
        return (max if self.how == "|" else min)(found, key=_RANK.__getitem__)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The rules, in order."""
        return self.rules

    def __repr__(self) -> str:
        if self.how == "first":
            return f"first_match({', '.join(map(repr, self.rules))})"
        return f"({f' {self.how} '.join(map(repr, self.rules))})"


def first_match(*rules: Policy) -> Policy:
    """Combine policies: the first that has an answer decides.

    Example:
        >>> from sac_policies import recompute_ops, save_ops
        >>> small_first = first_match(recompute_ops("aten.mm"), save_ops("aten.*"))
    """
    if not rules:
        raise PolicyError(
            "sac_policies.first_match: no rules are given, but at least one is needed. "
            "Pass recompute_all() to save nothing."
        )
    for rule in rules:
        check_policy(rule, where="first_match")
    return Combined("first", rules)


@dataclass(frozen=True, repr=False)
class Replaced(Policy):
    """`inner` with other answers: `~inner` and `offload(inner)`."""

    inner: Policy
    answers: tuple[tuple[Answer, Answer], ...]

    def decide(self, view: OpView) -> Answer:
        """Replace the answer of `inner`."""
        answer: Answer = self._replaced(self.inner.decide(view))
        return answer

    def constant(self, op: Operator) -> Constant:
        """Replace the constant answer of `inner`."""
        answer: Constant = self._replaced(self.inner.constant(op))
        return answer

    def _replaced(self, answer: Any) -> Any:
        return next((new for old, new in self.answers if old is answer), answer)

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The inner policy."""
        return (self.inner,)

    @property
    def offloads(self) -> bool:
        """Whether OFFLOAD is among the new answers."""
        return any(new is Decision.OFFLOAD for _, new in self.answers)

    def __repr__(self) -> str:
        return f"offload({self.inner!r})" if self.offloads else f"~{self.inner!r}"


_COMPLEMENT: tuple[tuple[Answer, Answer], ...] = (
    (None, Decision.SAVE),
    (Decision.RECOMPUTE, Decision.SAVE),
    (Decision.SAVE, Decision.RECOMPUTE),
    (Decision.OFFLOAD, Decision.RECOMPUTE),
)
OFFLOADED: tuple[tuple[Answer, Answer], ...] = ((Decision.SAVE, Decision.OFFLOAD),)

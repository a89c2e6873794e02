"""Plans: policies with a decision for each listed operator call, as a solver returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .._errors import PolicyError, shown
from ._decisions import Answer, Decision
from ._policies import DEPENDS, Constant, Policy
from ._views import Operator, OpView, RegionSummary

Call = tuple[str, int]
"""Operator name as `str(op)` spells it ("aten.mm.default"), number among its calls, from 0."""

Unit = Literal["ns", "flops"]
"""What work is measured in."""


@dataclass(frozen=True)
class Plan(Policy):
    """Decisions for named calls of one region; calls that are not listed have no answer.

    Attributes:
        choices: ((operator name, call number), decision), sorted.
    """

    choices: tuple[tuple[Call, Decision], ...]

    def decide(self, view: OpView) -> Answer:
        """Look the call up."""
        return self._by_call.get((str(view.op), view.index))

    def constant(self, op: Operator) -> Constant:
        """Return no answer for operators that are not listed."""
        name = str(op)
        return DEPENDS if any(call[0] == name for call, _ in self.choices) else None

    @property
    def offloads(self) -> bool:
        """Whether a call is offloaded."""
        return any(choice is Decision.OFFLOAD for _, choice in self.choices)

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Return listed calls that the region did not have."""
        calls = {str(op): count for op, count in seen.ops.items()}
        return tuple(
            f"{name}[{index}]"
            for (name, index), _ in self.choices
            if name not in calls or index >= calls[name] > 0
        )

    def __repr__(self) -> str:
        """Format briefly, since a plan lists every call of a region."""
        return f"{type(self).__name__}({len(self.choices)} calls)"

    @cached_property
    def _by_call(self) -> dict[Call, Decision]:
        return dict(self.choices)


def save_by_index(decisions: Mapping[Call, Decision] | Iterable[tuple[Call, Decision]]) -> Plan:
    """Decide single calls by operator name and call number in the region.

    Args:
        decisions: (operator name, number among its calls) to decision.

    Raises:
        PolicyError: a call is listed twice, a number is negative, or a value is not a Decision.

    Example:
        >>> save_by_index({("aten.mm.default", 1): Decision.SAVE}).choices
        ((('aten.mm.default', 1), <Decision.SAVE: 'save'>),)
    """
    rows = decisions.items() if isinstance(decisions, Mapping) else decisions
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes)):
        raise PolicyError(
            f"sac_policies.save_by_index: decisions {shown(decisions)} are a "
            f"{type(decisions).__name__}, but a mapping of calls to decisions, or pairs of them, "
            "is needed. Write {('aten.mm.default', 0): Decision.SAVE}."
        )
    found: dict[Call, Decision] = {}
    for row in rows:
        if not _is_row(row):
            raise PolicyError(
                f"sac_policies.save_by_index: row {shown(row)} decides no call, but a row is "
                "(operator name, number from 0) and a Decision. "
                "Write (('aten.mm.default', 0), Decision.SAVE)."
            )
        call, choice = row
        if call in found:
            raise PolicyError(
                f"sac_policies.save_by_index: call {shown(call)} is listed twice, but one call has "
                "one decision. Remove one of the two."
            )
        found[call] = choice
    return Plan(tuple(sorted(found.items(), key=lambda row: row[0])))


def _is_row(row: Any) -> bool:
    if not (isinstance(row, (tuple, list)) and len(row) == 2 and isinstance(row[1], Decision)):
        return False
    call = row[0]
    is_call = isinstance(call, tuple) and [type(each) for each in call] == [str, int]
    return is_call and call[1] >= 0

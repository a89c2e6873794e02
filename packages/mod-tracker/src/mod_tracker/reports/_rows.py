"""Amounts by module and phase: their sums, the rows of a report, and numbers with units.

A module's own amount ("self") leaves out the modules inside it. So the own amounts of all modules
and of the outside add up to the total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .._attribution import Attribution
from .._record import ThreadState
from ._flame_page import Stack

PHASES = ("forward", "recompute", "backward")

OUTSIDE_NAME = "(outside)"


def stack_of(name: str) -> Stack:
    """Return the names from the root to a module.

    Example:
        >>> stack_of("Net.layers.0")
        ('Net', 'Net.layers', 'Net.layers.0')
    """
    parts = name.split(".") if name else []
    return tuple(".".join(parts[: end + 1]) for end in range(len(parts)))


class PhaseTotals:
    """Amounts by stack of module names and phase.

    Attributes:
        total: sum of all amounts, added up separately as a check on the sums by module.
        stacks: amounts by stack, which is () for the outside, and phase.

    Example:
        >>> totals = PhaseTotals()
        >>> totals.add(("Net", "Net.0"), "forward", 3); totals.add((), "outside", 1)
        >>> own, inside = by_module(totals.stacks)
        >>> own["Net"]["forward"], inside["Net"]["forward"]
        (0, 3)
    """

    def __init__(self) -> None:
        self.total = 0
        self.stacks: dict[Stack, dict[str, int]] = {}

    def add(self, stack: Stack, phase: str, amount: int) -> None:
        self.total += amount
        amounts = self.stacks.setdefault(stack, {})
        amounts[phase] = amounts.get(phase, 0) + amount


def by_module(
    stacks: Mapping[Stack, Mapping[str, int]],
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """Return amounts by name and phase, without and with nested modules; the outside is "".

    The phase "outside" counts as forward.
    """
    own: dict[str, dict[str, int]] = {"": dict.fromkeys(PHASES, 0)}
    inside: dict[str, dict[str, int]] = {"": dict.fromkeys(PHASES, 0)}
    for stack, amounts in stacks.items():
        around = dict.fromkeys(stack or ("",))
        for name in around:
            if name not in inside:
                own[name], inside[name] = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, 0)
        last = own[stack[-1] if stack else ""]
        for phase, amount in amounts.items():
            shown = phase if phase in last else "forward"
            last[shown] += amount
            for name in around:
                inside[name][shown] += amount
    return own, inside


@dataclass(frozen=True)
class PhaseRow:
    """Amounts of one module by phase, in the `unit` of the report.

    Args:
        name: of the module, as in `ModuleCall`.
        calls: number of calls in forward; a recomputation is no call.
        self_forward: without the modules inside it; likewise `self_recompute`, `self_backward`.
        forward: with the modules inside it; likewise `recompute` and `backward`.
    """

    name: str
    calls: int = 0
    self_forward: int = 0
    self_recompute: int = 0
    self_backward: int = 0
    forward: int = 0
    recompute: int = 0
    backward: int = 0

    @property
    def self_total(self) -> int:
        """Amount of the module itself in all phases."""
        return self.self_forward + self.self_recompute + self.self_backward

    @property
    def total(self) -> int:
        """Amount of the module and those inside it in all phases."""
        return self.forward + self.recompute + self.backward


def values_of(row: Any) -> dict[str, int]:
    """Return a row's numbers by column name."""
    return {item.name: getattr(row, item.name) for item in fields(row) if item.name != "name"}


def calls_of(attribution: Attribution, states: Iterable[ThreadState]) -> Counter[str]:
    """Return the number of calls of each module that ran in some threads, by name."""
    calls = Counter(attribution.gone_calls)
    for state in list(states):
        for path in state.walk():
            if path.name:
                calls[path.name] += path.calls
    return calls


def phase_rows(totals: PhaseTotals, attribution: Attribution) -> dict[str, PhaseRow]:
    """Turn totals into rows by name; the outside has the name ""."""
    own, everything = by_module(totals.stacks)
    calls = calls_of(attribution, attribution.states)
    return {
        name: PhaseRow(
            name or OUTSIDE_NAME,
            calls=calls.get(name, 0),
            **{f"self_{phase}": own[name][phase] for phase in PHASES},
            **everything[name],
        )
        for name in everything
    }


_PREFIXES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_TIMES = ((10**9, "s"), (10**6, "ms"), (10**3, "us"))


def with_unit(value: int, unit: str) -> str:
    """Format an amount.

    Example:
        >>> with_unit(20480, "B"), with_unit(-7, "B")
        ('20.5 kB', '-7 B')
    """
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value} {unit}"


def bytes_shown(value: int) -> str:
    """Format a number of bytes with a decimal prefix."""
    return with_unit(value, "B")


def time_shown(nanoseconds: int) -> str:
    """Format a time in the unit that fits.

    Example:
        >>> time_shown(1500), time_shown(12)
        ('1.5 us', '12 ns')
    """
    for factor, unit in _TIMES:
        if abs(nanoseconds) >= factor:
            return f"{nanoseconds / factor:.3g} {unit}"
    return f"{nanoseconds} ns"

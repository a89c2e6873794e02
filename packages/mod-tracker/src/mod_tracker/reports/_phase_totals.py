"""Amounts by module and phase, and their sums over the enclosing modules.

A module's own amount ("self") leaves out the modules inside it. So the own amounts of all modules
and of the outside add up to the total.
"""

from __future__ import annotations

from collections.abc import Mapping

PHASES = ("forward", "recompute", "backward")

Stack = tuple[str, ...]


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

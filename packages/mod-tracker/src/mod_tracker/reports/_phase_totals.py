"""Amounts by module and phase, and their sums over the modules around.

The amount of a module itself ("self") leaves out the modules inside it, so each unit is in one
place: self amounts over all modules and the outside add up to everything that was added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from .._record import Path

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
    """Adds amounts.

    Attributes:
        total: sum of all amounts, kept on its own, as a check on the sums by module.

    Example:
        >>> totals = PhaseTotals()
        >>> totals.add_at(("Net", "Net.0"), "forward", 3); totals.add_at((), "outside", 1)
        >>> totals.by_module()["Net"]["forward"], totals.by_module(inside=False)["Net"]["forward"]
        (3, 0)
    """

    def __init__(self) -> None:
        self.total = 0
        self._paths: defaultdict[tuple[Path, str], int] = defaultdict(int)
        self._stacks: defaultdict[tuple[Stack, str], int] = defaultdict(int)

    def add(self, path: Path, phase: str, amount: int) -> None:
        """Add to the module a path leads to."""
        self.total += amount
        self._paths[path, phase] += amount

    def add_at(self, stack: Stack, phase: str, amount: int) -> None:
        """Add to the innermost module of a stack of names; () is the outside."""
        self.total += amount
        self._stacks[stack, phase] += amount

    def add_all(self, other: PhaseTotals) -> None:
        """Add everything that another totals has."""
        self.total += other.total
        for key, amount in other._paths.items():
            self._paths[key] += amount
        for place, amount in other._stacks.items():
            self._stacks[place] += amount

    def by_module(self, *, inside: bool = True) -> dict[str, dict[str, int]]:
        """Return amounts by name and phase; the outside has the name "".

        Args:
            inside: count a module's amount for the modules around it, too.
        """
        sums: dict[str, dict[str, int]] = {"": dict.fromkeys(PHASES, 0)}
        for (stack, phase), amount in self._merged():
            own = stack[-1:] or ("",)
            for name in dict.fromkeys(stack or ("",)):
                row = sums.setdefault(name, dict.fromkeys(PHASES, 0))
                if inside or name in own:
                    # What runs outside of modules and of a backward is shown as forward.
                    row[phase if phase in row else "forward"] += amount
        return sums

    def by_stack(self) -> dict[Stack, dict[str, int]]:
        """Return amounts by stack of names and phase; the outside is ()."""
        found: dict[Stack, dict[str, int]] = {}
        for (stack, phase), amount in self._merged():
            found.setdefault(stack, {})[phase] = amount
        return found

    def _merged(self) -> Iterable[tuple[tuple[Stack, str], int]]:
        merged = defaultdict(int, self._stacks)
        for (path, phase), amount in self._paths.items():
            merged[path.names(), phase] += amount
        return merged.items()

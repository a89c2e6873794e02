"""Where the frames of a flame chart lie.

A frame is a module where it was called; it lies below the module that called it and is as wide as
its amount, that of the modules inside it included. What it does itself is the part of it below
which there is nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ._colours import PHASES

Stack = tuple[str, ...]
"""Names of modules from the root to the one that runs; () is the outside."""

Amounts = dict[str, int]
"""Amounts by phase."""


@dataclass(frozen=True)
class Frame:
    """One module where it was called.

    Attributes:
        name: of the module, "" for the outside.
        label: the same, less what the name of the module around it says already.
        depth: modules around it.
        start: amount of what lies before it in the chart.
        amounts: by phase, of the module and those inside it, in the order of the colours.
        own: amount of the module itself, in all phases.
    """

    name: str
    label: str
    depth: int
    start: int
    amounts: Amounts
    own: int

    @property
    def total(self) -> int:
        """Amount in all phases: the frame's width."""
        return sum(self.amounts.values())


class _Node:
    def __init__(self) -> None:
        self.amounts: Amounts = {}
        self.own = 0
        self.inside: dict[str, _Node] = {}


def frames_of(stacks: Mapping[Stack, Amounts]) -> list[Frame]:
    """Lay out the frames, outer ones before inner ones, each kind in the order first seen.

    Frames without an amount are left out.

    Example:
        >>> frames = frames_of({("Net", "Net.0"): {"forward": 3}, ("Net",): {"backward": 1}})
        >>> [(frame.name, frame.start, frame.total, frame.own) for frame in frames]
        [('Net', 0, 4, 1), ('Net.0', 0, 3, 3)]
    """
    root = _Node()
    for stack, amounts in stacks.items():
        node = root
        for name in stack or ("",):
            node = node.inside.setdefault(name, _Node())
            for phase, amount in amounts.items():
                node.amounts[phase] = node.amounts.get(phase, 0) + amount
        node.own += sum(amounts.values())
    return list(_frames(root))


def _frames(root: _Node) -> Iterator[Frame]:
    left = [(root, "", 0, 0)]  # no recursion: modules may be nested deeper than Python's stack
    for node, around, depth, start in left:
        for name, inner in node.inside.items():
            width = sum(inner.amounts.values())
            if width:
                label = name.removeprefix(f"{around}.") or "(outside)"
                yield Frame(name, label, depth, start, _in_order(inner.amounts), inner.own)
                left.append((inner, name, depth + 1, start))
                start += width


def _in_order(amounts: Amounts) -> Amounts:
    known = {phase: amounts[phase] for phase in PHASES if amounts.get(phase)}
    return known | {phase: amount for phase, amount in amounts.items() if amount}

"""Values that calls make again, in a forward that follows steps.

Rule 1. The call is seen in this forward too, with what it is given now: numbers that changed, such
        as an eps, change what is made. Only functions that steps name are looked at.
Rule 2. What the graph made and a call reads is what a step held of it, in this forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .._calls import GIVEN, PRODUCTS
from .._recipes import keep
from .._shared_values import Source
from ..untracked._call_table import operators_of
from ..untracked._seen_calls import Remade, SeenCall, names_behind
from ._at_edges import AtEdge, Returned, Seen, Value
from ._followed import FollowedValues
from ._remade import Keeper, Operands


@dataclass(frozen=True, slots=True)
class Again:
    """A tensor that calls make again.

    Attributes:
        at: which of the results of its call it is.
        names: of the functions that are called, or that it is a view of.
    """

    at: int
    names: frozenset[str]


def noted(region: Keeper) -> Again:
    """Write down what a region that decides has just made of a tensor."""
    call, at = region.edges.calls.untracked.used[-1]
    number = call.first
    names = (
        name
        for name in names_behind(call)
        if not any(region.saves(op, number) for op in operators_of(name))
    )
    return Again(at, frozenset(names))


def heeded(steps: Iterable[tuple[Any, Any, Any]], values: Iterable[Value]) -> frozenset[str]:
    """The functions of which a forward that follows these steps has to see calls.

    Args:
        steps: what it does.
        values: all that its replays make.
    """
    names: frozenset[str] = frozenset()
    for _, _, what in steps:
        if type(what) is Again:
            names |= what.names
    operands = (each for value in values for each in value.operands or ())
    ends = {type(each.end) for each in operands if type(each) is AtEdge}
    if Returned in ends:
        names |= PRODUCTS
    return names | GIVEN if Seen in ends else names


class FollowedOperands(Operands):
    """Finds operands for a forward that follows.

    Args:
        values: what it looked at.
        names: of functions that may be called again.
    """

    def __init__(self, values: FollowedValues, names: frozenset[str]) -> None:
        self._values, self._names = values, names

    def repeats(self, call: SeenCall) -> bool:
        """Whether the region may make a call again."""
        return call.first >= self._values.first and call.name in self._names

    def tracked(self, tensor: torch.Tensor) -> tuple[Source | None, bool]:
        """What a step held of it (Rule 2)."""
        return self._values.held(tensor)

    def kept(self, tensor: torch.Tensor) -> Source:
        """Keep another value, to be read."""
        return Source(keep(tensor, None), self._values.read)


def followed(
    values: FollowedValues, tensor: torch.Tensor, number: int, step: Again
) -> Remade | None:
    """What is held of a tensor as its step says; None where it is not to be had so.

    Args:
        values: what the forward looked at, and the calls that it saw.
        tensor: what is saved.
        number: that after the node that saves it, counted from the first of the region.
        step: that was written down for it.
    """
    calls = values.calls
    if calls is None:
        return None
    maker = calls.untracked.saved(tensor, values.first + number)
    if maker is None:
        return None
    made = None
    if maker[1] == step.at:
        made = FollowedOperands(values, step.names).remade(tensor, maker, values.policy)
    if made is None:
        maker[0].saved -= 1  # who decides in place of the step asks for the same result
    else:
        values.shortened.setdefault(number, []).append(made.cell)
    return made

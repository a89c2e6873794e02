"""Tells what is held for replays that no node knows, for who plans which values are replayed.

Rule 1. What no node knows and a replay reads at edges is held from the first recipe on that reads
        it (`_edges`); what lies behind a value that is kept by then is not read. What calls read
        that are made again is held whatever is planned (`_remade`).
Rule 2. What is small is copied, for each operand anew; of others the storage lives on.
Rule 3. Nobody knows what will read an operand that a call is given: until the forward ends, all are
        held as they are.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...._torch_compat import node_number
from ..._guards import is_small
from .._calls import Calls
from .._own_rules import known_rule
from .._recipes import Recipe
from .._replay import LEAF_NODE, Node
from .._sources import Edges
from .._views import TAKES
from ..untracked._seen_calls import Remade

Outputs = Container[tuple[Node, int]]


@dataclass(frozen=True, slots=True)
class HeldConstant:
    """One value that is held.

    Attributes:
        key: of who holds it; what is copied is another for each.
        tensor: that is held, or was copied; None for a state of random numbers.
        copy_bytes: of the copy; 0 where it is held itself.
    """

    key: Any
    tensor: torch.Tensor | None
    copy_bytes: int


def held_for(held: Any, edges: Edges, kept: Outputs) -> list[HeldConstant]:
    """What is held for a value that calls make again.

    Args:
        held: what is held of the value.
        edges: of the region.
        kept: outputs that may be kept by now.
    """
    found: list[HeldConstant] = []
    if not isinstance(held, Remade):
        return found
    if held.code.state_bytes:
        found.append(HeldConstant(held.code, None, held.code.state_bytes))
    for source in held.code.sources():
        it = source.held
        if isinstance(it, Recipe):
            if it.node is not None:
                found += held_behind(it.node, edges, kept)
        elif type(it) is tuple and not it[0].requires_grad:
            tensor, _, maker = it
            if maker is type(None):
                found.append(_held(source, tensor))
    return found


def held_behind(node: Node, edges: Edges, kept: Outputs) -> list[HeldConstant]:
    """What is held for a recipe of what a node made.

    Args:
        node: that made it.
        edges: of the region.
        kept: outputs that are kept by now.
    """
    found: list[HeldConstant] = []
    seen, left = {node}, [node]
    while left:
        node = left.pop()
        rule = known_rule(type(node))
        distance = edges.cell(node).distance
        saved_all = distance == 0 if type(distance) is int else rule.ready(node)
        if saved_all:
            continue
        number = node_number(node)
        for at, (maker, output) in rule.at_edges(node):
            if maker is None:
                constant = edges.calls.operand(node, number, at)
                if constant is not None and constant.tensor is not None:
                    found.append(_held((number, at), constant.tensor))
                continue
            end = _replayed(maker, output, edges, kept)
            if end is not None and end not in seen:
                seen.add(end)
                left.append(end)
    return found


def seen_in(calls: Calls) -> Iterator[HeldConstant]:
    """What is held as long as the forward runs, whether a replay will read it or not (Rule 3)."""
    for constant in calls.operands.values():
        if constant.tensor is not None:
            yield HeldConstant(None, constant.tensor, 0)


def _replayed(node: Node, output: int, edges: Edges, kept: Outputs) -> Node:
    """What is replayed for the value behind an edge; None where it is there (`_edges`)."""
    while type(node).__name__ != LEAF_NODE:
        if edges.held(node, output) is not None or (node, output) in kept:
            return None
        if type(node).__name__ not in TAKES:
            return node
        node, output = node.next_functions[0]
    return None


def _held(key: Any, tensor: torch.Tensor) -> HeldConstant:
    return HeldConstant(key, tensor, tensor.nbytes if is_small(tensor) else 0)

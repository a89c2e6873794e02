"""Rebuilds the value behind an edge, and the output of a node, in backward.

Rule 1. A value is made at most once for all its readers (`SharedValue`), from the end of the
        chain on: an operand is dropped as soon as its last reader has it.
Rule 2. What was rebuilt through edges is compared with what it was before anyone reads it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..._errors import RecomputeError
from .._guards import compare
from ._proof import check, storage_of
from ._replay import Node, is_leaf_node
from ._replay_table import RULES
from ._shared_values import CELL, SharedValue
from ._views import TAKES

Unseen = Callable[[torch.Tensor | None], Exception]
"""Makes the error for a leaf that changed, or for a value that does."""


def rebuilt(node: Node, cell: SharedValue, unseen: Unseen) -> torch.Tensor:
    """Replay the operator of a node.

    Args:
        node: the node.
        cell: what readers of its output share.
        unseen: makes what is raised where the forward's operands are no more.
    """
    rule = RULES[type(node).__name__]
    if cell.through:
        assert rule.through is not None
        edges = node.next_functions
        value = rule.through(
            node,
            *(
                getattr(node, each.saved)
                if each.is_saved(node)
                else value_at(edges[each.edge], unseen)
                for each in rule.operands_of(node)
            ),
        )
        if cell.proof is not None:
            check(cell.proof, value, lambda: unseen(None))
        return value
    leaf = rule.leaf_of(node)
    if cell.leaf is not None and leaf is not None:
        live = leaf
        leaf = cell.leaf.read(lambda: live, lambda: unseen(live))
    value = rule.run(node, leaf)
    if cell.sums is not None and leaf is not None:
        compare(cell.sums, storage_of(value), lambda: unseen(leaf))
    return value


def value_at(edge: tuple[Node, int], unseen: Unseen) -> torch.Tensor:
    """Return the value behind an edge: a leaf's, a kept one, or replayed."""
    node, output = edge
    if is_leaf_node(node):
        return _leaf(node.variable)
    cell: SharedValue | None = node.metadata.get(CELL)
    if cell is not None:
        kept = None if cell.kept is None else cell.kept.get(output)
        source = None if kept is None else kept()
        if source is not None:
            return source.value()
    take = TAKES.get(type(node).__name__)
    if take is not None:
        return take(node, value_at(node.next_functions[0], unseen), output)
    assert cell is not None
    shared = cell
    return shared.get(lambda: rebuilt(node, shared, unseen))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise RecomputeError(
            f"sac_policies.checkpoint: parameter of shape {tuple(tensor.shape)} has no data when "
            "a replay reads it, but the region read it in the forward. Make the module that "
            "frees it a region of its own."
        )
    return tensor

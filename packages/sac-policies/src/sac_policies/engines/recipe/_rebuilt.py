"""Rebuilds the value behind an edge, and the output of a node, in backward.

Rule 1. A value is made at most once for all its readers (`SharedValue`), from the end of the
        chain on: an operand is dropped as soon as its last reader has it.
Rule 2. What was rebuilt for a saved tensor is compared with what that was before anyone reads it.
        So a rule may guess first (`_replay`, Rule 6).
Rule 3. Where nothing is compared, no leaf that a replay reads may have been written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ..._errors import MutationError, RecomputeError
from ..._torch_compat import is_freed
from ..._torch_compat._leaf_hooks import FORGETS_HOOKS, restore_hooks
from ._own_rules import known_rule
from ._proof import check, proof_of
from ._replay import LEAF_NODE, Node, Rule, each_of, is_leaf_node
from ._shared_values import SharedValue, Source
from ._views import TAKES

Unseen = Callable[[], Exception]
"""Makes the error for a value that is not as it was."""


def rebuilt(node: Node, cell: SharedValue, unseen: Unseen) -> torch.Tensor:
    """Replay the operator of a node.

    Args:
        node: the node.
        cell: what readers of its output share.
        unseen: makes what is raised where the forward's operands are no more.
    """
    rule = known_rule(type(node))
    for leaf, version in cell.leaves:
        if leaf._version != version:
            raise _changed(leaf, rule)
    proof = cell.proof
    is_known = proof is not None and type(proof[0]) is int
    try:
        if is_known and rule.guess is not None and not cell.through:
            guessed = rule.guess(node)
            if guessed is not None:
                if proof == proof_of(guessed):
                    return guessed
                rule.guess.missed(node)
        if cell.through:
            assert rule.through is not None
            taken = cell.operands
            operands = (
                _operands(rule, node, cell, unseen)
                if taken is None
                else [_taken(node, each, unseen) for each in taken]
            )
            value = rule.through(node, *operands)
            if cell.stride is not None and value.stride() != cell.stride:
                # A copy among what it is made of chose a format that its node does not tell.
                value = value.new_empty_strided(value.size(), cell.stride).copy_(value)
        elif rule.leaf is None:
            assert rule.rebuild is not None
            value = rule.rebuild(node)
        else:
            own: torch.Tensor | None = rule.leaf_of(node) if cell.leaf is None else cell.leaf
            value = rule.run(node, None if own is None else _leaf(own))
    finally:
        if FORGETS_HOOKS:
            restore_hooks(node)
    if proof is not None and not (is_known and proof == proof_of(value)):
        check(proof, value, unseen)
    return value


def _operands(rule: Rule, node: Node, cell: SharedValue, unseen: Unseen) -> list[torch.Tensor]:
    edges, held = node.next_functions, cell.held
    assert held is not None
    found: list[torch.Tensor] = []
    operands = each_of(len(edges)) if rule.operands is None else rule.operands
    for at, each in enumerate(operands):
        if each.saved and (each.unless is None or edges[each.unless][0] is not None):
            found.append(getattr(node, each.saved))
        elif at in held:
            views, source = held[at]
            # A number that was seen where it was given has no edge.
            found.append(_kept(edges[each.edge] if views else (None, 0), views, source()))
        else:
            found.append(_made(edges[each.edge], cell.key, unseen))
    return found


def _taken(node: Node, operand: Any, unseen: Unseen) -> torch.Tensor:
    """Return an operand that a forward took from steps: from the node, or from behind an edge.

    Args:
        node: whose operand it is.
        operand: an attribute of the node; or what is behind an edge, a source, a leaf's node, or
            a node with the cell of its output, and the views before it as (take, node, output).
        unseen: as for `rebuilt`.
    """
    if type(operand) is str:
        saved: torch.Tensor = getattr(node, operand)
        return saved
    base, views = operand
    if type(base) is tuple:
        maker, cell = base
        value: torch.Tensor = cell.get(partial(rebuilt, maker, cell, unseen))
    else:
        value = base.value() if type(base) is Source else _leaf(base.variable)
    for take, view, output in views:
        value = take(view, value, output)
    return value


def _kept(edge: tuple[Node, int], views: int, source: Source | None) -> torch.Tensor:
    """Return the value behind an edge of which a value is kept, so many views further."""
    assert source is not None
    if not views:
        return source.value()
    node, output = edge
    value = _kept(node.next_functions[0], views - 1, source)
    return TAKES[type(node).__name__](node, value, output)


def _made(edge: tuple[Node, int], key: str, unseen: Unseen) -> torch.Tensor:
    """Return the value behind an edge: a leaf's, or replayed."""
    node, output = edge
    name = type(node).__name__
    if name == LEAF_NODE:
        return _leaf(node.variable)
    take = TAKES.get(name)
    if take is not None:
        return take(node, _made(node.next_functions[0], key, unseen), output)
    cell: SharedValue = node.metadata[key]
    return cell.get(partial(rebuilt, node, cell, unseen))


def leaves_of(
    node: Node, rule: Rule, at_edges: Iterable[tuple[int, tuple[Node, int]]]
) -> tuple[tuple[torch.Tensor, int], ...]:
    """Leaves that a replay reads and its node did not save, and how often each was written to.

    Args:
        node: the node.
        rule: its rule.
        at_edges: the operands that are not saved, as the rule lists them.
    """
    own = rule.leaf_of(node)
    found = [] if own is None else [own]
    for _, (maker, _) in at_edges:
        while type(maker).__name__ in TAKES:
            maker = maker.next_functions[0][0]
        if is_leaf_node(maker):
            found.append(maker.variable)
    return tuple((leaf, leaf._version) for leaf in found)


def _changed(leaf: torch.Tensor, rule: Rule) -> MutationError:
    return MutationError(
        f"sac_policies.checkpoint: leaf of shape {tuple(leaf.shape)} was changed in place between "
        f"forward and backward, but a replay of {rule.op} reads it. Change it after backward."
    )


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    if is_freed(tensor):
        raise freed(tensor)
    return tensor


def freed(tensor: torch.Tensor) -> RecomputeError:
    """Make the error for a parameter that has no data when a replay reads it."""
    return RecomputeError(
        f"sac_policies.checkpoint: parameter of shape {tuple(tensor.shape)} has no data when "
        "a replay reads it, but the region read it in the forward. Make the module that "
        'frees it a separate region, or use engine="contexts".'
    )

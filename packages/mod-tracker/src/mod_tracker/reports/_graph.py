"""The nodes of autograd graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._torch_compat import UNNUMBERED, number_of


def nodes_below(roots: Iterable[Any], read: set[int], first: int) -> list[Any]:
    """Return the nodes of graphs in order of creation, without those of leaves.

    Args:
        roots: autograd nodes; None is ignored.
        read: numbers of nodes to leave out; gets the numbers of the nodes found.
        first: nodes with smaller numbers are left out.
    """
    found: dict[Any, int] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        number = number_of(node)
        if number >= UNNUMBERED or number < first or number in read:
            continue
        found[node] = number
        waiting += [reached for reached, _ in node.next_functions]
    read.update(found.values())
    return sorted(found, key=found.__getitem__)

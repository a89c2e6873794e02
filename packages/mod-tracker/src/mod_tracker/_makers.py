"""Which thread made an autograd node, noted on nodes whose numbers do not say it.

Note [Makers]
Each device has a backward thread with a counter of its own. During a backward that creates a graph,
such a thread gives its nodes numbers that nodes of the forward have, too.
Rule 1: nodes that can be reached from a node of the forward were made in the forward. They are all
        marked when the first operator of such a backward is seen.
Rule 2: before a marked node runs, the unmarked nodes that made its gradients are marked: they were
        made by this thread.
Rule 3: nodes of leaves outlive graphs, have no number, and are not marked. A hook on the leaf
        tensor sees the gradients that arrive there; it is removed when the backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ._record import ThreadState
from ._torch_compat import LEAF_NODE, at_backward_end, graph_task

KEPT_BACKWARDS = 8
"""Backwards whose hooks on leaves are kept; more never run at once."""


class Makers:
    """Marks nodes with the state of the thread that made them. See Note [Makers].

    Args:
        state_here: returns the state of this thread.
    """

    def __init__(self, state_here: Callable[[], ThreadState]) -> None:
        self._state_here = state_here
        self._key = f"mod_tracker.maker.{id(self)}"
        self._hooked: dict[int, list[Any]] = {}

    def of(self, node: Any) -> ThreadState | None:
        """Return the state of the thread that made a node; None if the node is not marked."""
        found: ThreadState | None = node.metadata.get(self._key)
        return found

    def follow(self, node: Any, maker: ThreadState) -> None:
        """Mark a node and the nodes below it with their maker, and mark what they will make."""
        task = graph_task()
        if self._key in node.metadata and task in self._hooked:
            return
        leaves = self._mark([node], maker, through=True)
        while len(self._hooked) >= KEPT_BACKWARDS:
            self._unhook(next(iter(self._hooked)))  # of one that failed
        hooked = self._hooked.setdefault(task, [])
        for leaf in leaves:
            variable = getattr(leaf, "variable", None)
            if variable is not None:
                hooked.append(variable.register_hook(self._arrives))
        at_backward_end(partial(self._unhook, task))

    def _runs(self, grads: tuple) -> None:
        made = [grad.grad_fn for grad in grads if grad is not None and grad.grad_fn is not None]
        if made:
            self._mark(made, self._state_here())

    def _arrives(self, grad: Any) -> None:
        self._runs((grad,))

    def _unhook(self, task: int) -> None:
        for handle in self._hooked.pop(task, []):
            handle.remove()

    def _mark(
        self, nodes: Iterable[Any], maker: ThreadState, *, through: bool = False
    ) -> list[Any]:
        """Mark what can be reached, up to marked nodes or `through` them; return the leaves."""
        leaves, waiting, seen = [], list(nodes), set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node) is LEAF_NODE:
                leaves.append(node)
                continue
            if self._key not in node.metadata:
                node.metadata[self._key] = maker
                node.register_prehook(self._runs)
            elif not through:
                continue
            waiting += [reached for reached, _ in node.next_functions]
        return leaves

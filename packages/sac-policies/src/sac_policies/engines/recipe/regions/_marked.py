"""Follows policies that read names of tensors or paths of modules.

Rule 1. autograd numbers nodes as they are made, so what a module made are the numbers that were
        given while it ran, innermost; and a name is the number of the node behind views.
Rule 2. What is named is kept where a node saves it or a replay reads it, and only there. A name
        comes after the value: what was written to between the two is no operand of replays.
Rule 3. In a region inside, the inner policy decides.
Rule 4. Names and paths that no region has had are an error in backward (`_unmatched`, Rule 2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ...._torch_compat import node_number, sequence_number
from ....policies._decisions import Decision
from ....policies._modules import ModulePath, named_root
from ....policies._names import NAME_OP, listening
from ....policies._policies import DEPENDS, Policy
from ....policies._spans import SPAN_OP
from ....policies._unmatched import Watch
from ....policies._views import Operator, OpView, RegionState, RegionSummary
from ..._engine_disabled import active
from .._recipes import Reader
from .._replay import Node
from .._replay_entries import ReplayTable, Why
from ._around import region_around
from ._region import Region


class Tables:
    """The replay tables of one policy.

    Attributes:
        policy: whose they are.
        anywhere: what is the same in all modules.
    """

    def __init__(self, policy: Policy, compares: bool = True) -> None:
        self.policy = policy
        self.anywhere = ReplayTable(policy, compares=compares)
        self._by_path: dict[str, ReplayTable] = {}

    def at(self, path: str) -> ReplayTable:
        """The table for what is made in the module with this path."""
        table = self._by_path.get(path)
        if table is None:
            table = self._by_path[path] = ReplayTable(self.policy, path, self.anywhere.compares)
        return table


class _NumberedPath(ModulePath):
    """Notes from which number on which module makes the nodes."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self._numbers = [0]
        self._paths = [""]

    def at(self, number: int) -> str:
        """Path of the module that made the node with this number."""
        return self._paths[bisect_right(self._numbers, number) - 1]

    def _start(self, module: nn.Module, args: Any) -> None:
        super()._start(module, args)
        self._note()

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._stop(module, args, output)
        self._note()

    def _note(self) -> None:
        self._numbers.append(sequence_number())
        self._paths.append(self.now)


class Marks:
    """What a policy says of the nodes of one forward.

    Attributes:
        compares: as for any that decides.
        path: follows the modules; None where the policy reads none.
        named: numbers of nodes whose output is kept by name.
    """

    def __init__(self, tables: Tables, root: nn.Module | None) -> None:
        self._tables, self.compares = tables, tables.anywhere.compares
        reads = tables.policy.reads_modules
        self.path = _NumberedPath(named_root(root)) if reads else None
        self.named: set[int] = set()

    def entry(self, node: Node, number: int) -> Any:
        """The entry of a node with this number."""
        if number in self.named:
            return Why.NAMED
        tables = self._tables
        table = tables.anywhere if self.path is None else tables.at(self.path.at(number))
        return table[type(node)]


class MarkedRegion(Region):
    """A forward under a policy that reads names or module paths."""

    def __init__(
        self, tables: Tables, watch: Watch, root: nn.Module | None, given: tuple[Any, ...] = ()
    ) -> None:
        self._marks = Marks(tables, root)
        super().__init__(tables.anywhere, given, self._marks)
        self._policy = tables.policy
        self._watch = watch
        self.unpack = _checked(self.read, watch)
        self._labels: set[str] = set()
        self._state = RegionState()

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call the region's function under its hooks, and hear names and modules."""
        with ExitStack() as extras:
            if self._marks.path is not None:
                self._marks.path.follow(extras)
            if self._policy.reads_names:
                extras.enter_context(listening(self._heard))
            extras.enter_context(self._watch.forward())
            return super().run(function, args, kwargs)

    def saves_span(self) -> bool:
        """Whether the policy saves what runs in the span that begins."""
        path = self._marks.path
        if path is None:
            return super().saves_span()
        return self._policy.constant_in(SPAN_OP, path.now) is Decision.SAVE

    def saves(self, op: Operator, number: int) -> bool:
        """Whether the policy saves, or may save, what an operator made when this was next."""
        path = self._marks.path
        if path is None:
            return super().saves(op, number)
        return self._policy.constant_in(op, path.at(number)) in (Decision.SAVE, DEPENDS)

    def producer(self, tensor: torch.Tensor, node: Node, entry: Any, consumer: int) -> Any:
        """Follow views to the producer, or say why nothing is to replay it."""
        found = super().producer(tensor, node, entry, consumer)
        if isinstance(found, Why):
            return found
        decided = self._marks.entry(found[0], node_number(found[0]))
        return decided if isinstance(decided, Why) else found

    def seen(self, ops: Mapping[Operator, int]) -> RegionSummary:
        """What ran, was named, and could be."""
        path = self._marks.path
        known = frozenset() if path is None else path.known
        return RegionSummary(ops, frozenset(self._labels), known)

    def _heard(self, tensor: torch.Tensor, label: str) -> None:
        self._labels.add(label)
        if region_around() is not self:  # Rule 3
            return
        index = self._state.enter(NAME_OP)
        path = "" if self._marks.path is None else self._marks.path.now
        view = OpView(NAME_OP, index, tensor, (tensor, label), {}, path, label, self._state)
        if self._policy.decide(view) is Decision.SAVE:
            self._keep_named(tensor)

    def _keep_named(self, tensor: torch.Tensor) -> None:
        node, _ = self._entries.past_views(tensor.grad_fn)
        if node is not None:
            self._marks.named.add(node_number(node))
            self.edges.calls.name(tensor)


def _checked(read: Reader, watch: Watch) -> Reader:
    """Have backward say first which names of the policy no region has had (Rule 4)."""

    def checked(held: Any) -> torch.Tensor:
        if watch.is_due and all(mode.recomputes for mode in active.modes):
            raise watch.error()
        return read(held)

    return checked

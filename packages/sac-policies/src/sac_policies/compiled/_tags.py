"""The engine of compiled code: it tags the traced graph with the answers of a policy.

Under torch.compile, AOTAutograd traces a checkpointed region once, forward and recomputation, and
its partitioner decides from node metadata what is saved. `TagForward` asks the policy about each
operator and writes the answer on its nodes; `TagRecompute` returns every traced value, so that the
trace has each operator once.

A recomputation in backward would read a tensor from outside after the region wrote to it, such as a
buffer. So the results of operators that read such a tensor are kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakIdKeyDictionary

from .._tensors import tensors_in
from .._torch_compat import alias, node_meta, running_modules, traced_graph
from ..policies._decisions import Decision, to_torch
from ..policies._names import NAME_OP
from ..policies._operators import facts_of
from ..policies._policies import Policy
from ..policies._unmatched import uses
from ..policies._views import Operator, OpView, RegionSummary

_Values = defaultdict[Operator, list[Any]]
_TAGS = ("recompute", "ac_graph_id")
"""What this engine writes into the metadata of nodes to come."""


class _TagMode(TorchDispatchMode):
    """Base of both modes; not compiled, since they run during compilation."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore compiled callables inside the region."""
        return True

    supports_higher_order_operators = True

    def __init__(self, values: _Values) -> None:
        super().__init__()
        self.values = values


class TagForward(_TagMode):
    """Traces a region and tags its nodes.

    Attributes:
        ac_graph_id: number of the region, set by torch; None if it is not set.
    """

    def __init__(self, policy: Policy, values: _Values) -> None:
        super().__init__(values)
        self._policy = policy
        self._calls: Counter[Operator] = Counter()
        self._kept = False
        self._outside = _Outside()
        self.ac_graph_id: int | None = None
        self._meta_before: dict[str, Any] = {}

    def __enter__(self) -> Any:
        self._meta_before = dict(node_meta())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        # If no node of another graph provides metadata, these changes would stay permanently.
        super().__exit__(*error)
        meta = node_meta()
        for tag in _TAGS:
            meta.pop(tag, None)
            if tag in self._meta_before:
                meta[tag] = self._meta_before[tag]
        for node in self._outside.read_and_written():
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if error[0] is None and traced_graph() is not None:
            seen = RegionSummary(self._calls, kept=self._kept)
            uses.of(self._policy).forward_traced(self._policy, seen)

    def __torch_dispatch__(
        self, op: Operator, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and tag the nodes it made."""
        kwargs = kwargs or {}
        meta = node_meta()
        meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        if self.ac_graph_id is not None:
            meta["ac_graph_id"] = self.ac_graph_id
        graph = traced_graph()
        before = 0 if graph is None else len(graph.nodes)
        out = op(*args, **kwargs)
        new = [] if graph is None else _newest(graph, len(graph.nodes) - before)
        self._outside.note(op, args, kwargs, out, new)
        if facts_of(op).bookkeeping:
            return out
        self.values[op].append(_detached(out))
        tag = self._tag(op, out, args, kwargs)
        for node in new:
            node.meta["recompute"] = tag
        return out

    def _tag(
        self, op: Operator, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CheckpointPolicy:
        label = args[1] if op is NAME_OP else None
        view = OpView(op, self._calls[op], out, args, kwargs, running_modules(), label)
        self._calls[op] += 1
        decision = self._policy.decide(view)
        self._kept |= decision is Decision.SAVE
        return to_torch(decision, op, self._policy)


class TagRecompute(_TagMode):
    """Returns the traced values, operator by operator."""

    def __init__(self, values: _Values) -> None:
        super().__init__(values)
        self._calls: Counter[Operator] = Counter()

    def __torch_dispatch__(
        self, op: Operator, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the traced value of this call."""
        if facts_of(op).bookkeeping:
            return op(*args, **(kwargs or {}))
        index = self._calls[op]
        self._calls[op] += 1
        if index < len(self.values[op]):
            return self.values[op][index]
        return op(*args, **(kwargs or {}))


def tags(policy: Policy) -> tuple[TagForward, TagRecompute]:
    """Return the two modes of one traced region."""
    values: _Values = defaultdict(list)
    return TagForward(policy, values), TagRecompute(values)


class _Outside:
    """Nodes that read tensors from outside of the region, and which of those it writes to."""

    def __init__(self) -> None:
        self._sources = WeakIdKeyDictionary()
        self._readers: defaultdict[int, list[torch.fx.Node]] = defaultdict(list)
        self._written: set[int] = set()

    def note(
        self,
        op: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        nodes: list[torch.fx.Node],
    ) -> None:
        """Note an operator's call, and the nodes that it made."""
        facts, read = facts_of(op), set[int]()
        for each in tensors_in((args, kwargs)):
            source = self._sources.setdefault(each, id(each))
            if source:  # 0 is the region itself
                read.add(source)
        for source in read:
            self._readers[source] += nodes
        self._written |= {self._sources[each] for each in facts.written(args, kwargs)}
        of_view = next(iter(read), 0) if facts.is_view or facts.bookkeeping else 0
        for each in tensors_in(out):
            self._sources.setdefault(each, of_view)

    def read_and_written(self) -> list[torch.fx.Node]:
        """Return the nodes that read a tensor from outside to which the region writes."""
        return [node for source in self._written - {0} for node in self._readers[source]]


def _newest(graph: torch.fx.Graph, count: int) -> list[torch.fx.Node]:
    newest = iter(reversed(graph.nodes))
    return [next(newest) for _ in range(count)]


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return alias(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_detached(each) for each in value)
    return value

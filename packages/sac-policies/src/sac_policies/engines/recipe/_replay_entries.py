"""Which nodes the recipe engine replays under one policy, worked out once per policy."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any, Protocol

import torch

from ..._torch_compat import is_fake, lies_in_storage
from ..._torch_compat._function_nodes import function_of
from ...policies._decisions import Decision
from ...policies._policies import DEPENDS, Constant, Policy
from ...policies._views import Operator
from ._own_rules import is_own, rule_of, when_changed
from ._replay import Node, Rule
from ._views import VIEWS


class Why(Enum):
    """For what reason the engine keeps a tensor, as a sentence about its producer."""

    LEAF = "a parameter, an input, or made without a gradient"
    CALLERS = "the caller made it"
    OTHER_HOOKS = "made under other saved-tensor hooks"
    NO_RULE = "no replay rule for {node}"
    FUNCTION = "no replay rule for {node}, and its forward is not run again: it {reason}"
    POLICY = "the policy saves {op}"
    NAMED = "the policy saves it by name"
    PLAN = "the plan keeps it"
    UNPLANNED = "the plan does not know it"
    OTHER_OUTPUT = "output {output} of {op}, whose rule rebuilds the first"
    WRITTEN = "written to since it was made"
    FREED = "{node} reads a parameter whose memory was freed since, as FSDP does"
    NOT_SAVED = "{node} did not save all that its rule reads"
    OPERAND = "{node} reads {operand}"
    FORMAT = "{node} does not know how its output lies in memory"
    UNFIT = "{node} {reason}"
    TOO_FAR = "too many operators lie between it and what is kept"
    RESULT = "{node} saves it for itself, and this torch does not tell which node runs"
    UNSEEN = "the region writes to values where autograd does not see it, or did when profiled"
    CALLS = "the policy decides single calls of {op}, but hooks see no order of calls"
    OPAQUE = "sparse, nested or of oneDNN: its elements do not lie in memory by strides"
    SUBCLASS = "a tensor subclass, of which no rule rebuilds {op}"
    RULE_IS_OFF = "the rule of {op} is off for {dtype} on {device}: it {reason}"


STUCK = frozenset(Why) - {
    Why.LEAF,
    Why.CALLERS,
    Why.OTHER_HOOKS,
    Why.POLICY,
    Why.PLAN,
    Why.UNPLANNED,
    Why.NAMED,
}
"""Reasons for which a value of the region is kept against the policy."""


class ReplayEntry:
    """One replay rule under one policy.

    Attributes:
        policy: what decided that it is replayed; None where a plan decides.
        works: (dtype, device, tensor type) to the device type, or why the rule is not used there.
        is_own: whether the rule is a user's.
    """

    __slots__ = ("_saves_all", "_simple", "_works_for", "is_own", "policy", "rule", "works")

    def __init__(self, rule: Rule, policy: Policy | None) -> None:
        self.rule = rule
        self._simple, self._saves_all = rule.simple, rule.rebuild is not None
        self.is_own = is_own(rule)
        self.policy = policy
        self.works: dict[Any, str | Why] = {}
        self._works_for: dict[Any, bool] = {}

    def device(self, tensor: torch.Tensor, node: Node) -> str | Why:
        """Device type to replay on, or why this output of the node must be kept."""
        if not lies_in_storage(tensor):
            return Why.OPAQUE
        key = (tensor.dtype, tensor.device, type(tensor))
        device = self.works.get(key)
        if device is None:
            device = self.works[key] = _device(self.rule, tensor)
        ready = self._simple or (self._saves_all and self.rule.ready(node))
        return device if ready or device is Why.SUBCLASS else Why.NOT_SAVED

    def is_ready(self, node: Node) -> bool:
        """Whether this node saved all that its rule reads."""
        return self._simple or (self._saves_all and self.rule.ready(node))

    def works_for(self, facts: Any, fake: bool, through: bool) -> bool:
        """Whether the rule is used for an output of which no tensor is at hand."""
        if facts is None:
            return False
        dtype, device = facts.dtype, facts.device
        key = (dtype, device, through, fake)
        works = self._works_for.get(key)
        if works is None:
            test = self.rule.works_through if through else self.rule.works
            # A fake tensor's device need not exist here: the CPU speaks for it.
            works = self._works_for[key] = test(dtype, "cpu" if fake else str(device))
        return works


def _device(rule: Rule, tensor: torch.Tensor) -> str | Why:
    fake = is_fake(tensor)
    if not (fake or type(tensor) in (torch.Tensor, torch.nn.Parameter)):
        return Why.SUBCLASS
    # A fake tensor's device need not exist here: the CPU speaks for it.
    works = rule.works(tensor.dtype, "cpu" if fake else str(tensor.device))
    return runs_on(tensor) if works else Why.RULE_IS_OFF


def runs_on(tensor: torch.Tensor) -> str:
    """Type of the device whose rules and autocast a replay of a value takes."""
    return "cpu" if tensor.is_meta else tensor.device.type


VIEW: Any = object()
"""The entry of nodes whose output is a view of their input."""


class Decides(Protocol):
    """What says of the nodes of a region what becomes of their outputs.

    Attributes:
        compares: whether what is rebuilt is held against what it was.
    """

    compares: bool

    def entry(self, node: Node, number: int) -> Any:
        """`VIEW`, the entry of the node's rule, or why its output is kept."""


_tables: weakref.WeakSet[ReplayTable] = weakref.WeakSet()


@when_changed
def _forget(kind: type) -> None:
    """Look a class's rule up again."""
    for table in tuple(_tables):
        table.pop(kind, None)


class ReplayTable(dict[type, Any]):
    """Node type to `VIEW`, to the entry of a rule that replays it, or to why it is kept.

    Attributes:
        policy: whose they are; None for those of every rule.
        module: path of the module that the nodes are made in; None where no path decides, or not
            here (`_marked`).
        compares: whether what is rebuilt is held against what it was.
    """

    def __init__(
        self, policy: Policy | None, module: str | None = None, compares: bool = True
    ) -> None:
        super().__init__()
        self.policy = policy
        self.module = module
        self.compares = compares
        _tables.add(self)

    def entry(self, node: Node, number: int) -> Any:
        """The entry of a node with this number."""
        del number
        return self[type(node)]

    def past_views(self, node: Node, output: int = 0) -> tuple[Node, int]:
        """What made that of which an output is a view, and which of its outputs that is.

        Regions and those that follow steps ask each node on the way themselves: it is faster.
        """
        while self[type(node)] is VIEW:
            node, output = node.next_functions[0]
        return node, output

    # Two tables are never equal: each is known by itself.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __missing__(self, kind: type) -> Any:
        found = self._look_up(kind)
        self[kind] = found
        return found

    def _look_up(self, kind: type) -> Any:
        name = kind.__name__
        if name in VIEWS:
            return VIEW
        if name in _LEAVES:
            return Why.LEAF
        rule = rule_of(kind)
        if rule is None:
            return Why.NO_RULE if function_of(kind) is None else Why.FUNCTION
        if self.policy is not None:
            decisions = {self._decision(self.policy, op) for op in (rule.op, *rule.runs)}
            if DEPENDS in decisions:
                return Why.CALLS
            if Decision.SAVE in decisions:
                return Why.POLICY
        return ReplayEntry(rule, self.policy)

    def _decision(self, policy: Policy, op: Operator) -> Constant:
        if self.module is not None:
            return policy.constant_in(op, self.module)
        decision = policy.constant(op)
        return None if decision is DEPENDS and policy.reads_modules else decision


_LEAVES = frozenset({"NoneType", "AccumulateGrad"})

every_rule, unchecked_rules = ReplayTable(None), ReplayTable(None, compares=False)
"""Every rule that works, whatever a policy says."""

"""Which nodes the recipe engine replays under one policy, worked out once per policy."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch_compat import is_fake
from ...policies._decisions import Decision
from ...policies._policies import Policy
from ._replay import Node, Rule
from ._replay_table import RULES, VIEWS


class ReplayEntry:
    """One replay rule under one policy.

    Attributes:
        policy: what decided that it is replayed; None where a plan decides.
        works: (dtype, device, tensor type) to the device type if the rule is used there, or "".
    """

    __slots__ = ("policy", "rule", "works")

    def __init__(self, rule: Rule, policy: Policy | None) -> None:
        self.rule = rule
        self.policy = policy
        self.works: dict[Any, str] = {}

    def device(self, tensor: torch.Tensor, node: Node) -> str:
        """Device type to replay on; "" where this output of the node must be kept."""
        key = (tensor.dtype, tensor.device, type(tensor))
        device = self.works.get(key)
        if device is None:
            device = self.works[key] = _device(self.rule, tensor)
        return device if self.rule.simple or self.rule.ready(node) else ""


def _device(rule: Rule, tensor: torch.Tensor) -> str:
    fake = is_fake(tensor)
    known = fake or type(tensor) in (torch.Tensor, torch.nn.Parameter)
    # A fake tensor's device need not exist here: the CPU speaks for it.
    works = known and rule.works(tensor.dtype, "cpu" if fake else str(tensor.device))
    return tensor.device.type if works else ""


VIEW: Any = object()
"""The entry of nodes whose output is a view of their input."""


class ReplayTable(dict[type, Any]):
    """Node type to `VIEW`, to the entry of a rule that replays it, or to None: it is kept.

    Attributes:
        policy: whose they are; None for those of every rule.
    """

    def __init__(self, policy: Policy | None) -> None:
        super().__init__()
        self.policy = policy

    def __missing__(self, kind: type) -> Any:
        found = self._look_up(kind.__name__)
        self[kind] = found
        return found

    def _look_up(self, name: str) -> Any:
        if name in VIEWS:
            return VIEW
        rule = RULES.get(name)
        if rule is None:
            return None
        kept = self.policy is not None and self.policy.constant(rule.op) is Decision.SAVE
        return None if kept else ReplayEntry(rule, self.policy)


every_rule = ReplayTable(None)
"""Every rule that works, whatever a policy says."""

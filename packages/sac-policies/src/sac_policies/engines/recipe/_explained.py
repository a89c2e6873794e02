"""What the recipe engine does with each tensor that autograd saves, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..._torch_compat import node_number
from ...policies._budget_plan import BudgetPlan
from ...policies._policies import Policy
from ._recipes import Recipe
from ._region import PlannedRegion, Region
from ._replay_entries import VIEW, ReplayTable
from ._replay_table import RULES


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd saved in a region under the recipe engine.

    Attributes:
        shape: its shape.
        storage_bytes: bytes of the storage it lies in.
        made_by: autograd node that made it, past views; "" for leaves and untracked tensors.
        replayed: whether backward rebuilds it; otherwise it is kept.
        why: for what reason it is kept; "" where it is replayed.
    """

    shape: tuple[int, ...]
    storage_bytes: int
    made_by: str
    replayed: bool
    why: str


class _Explained(Region):
    """Packs as the region beside it does, and writes down what became of each tensor."""

    saved: list[SavedTensor]

    def pack(self, tensor: torch.Tensor) -> Any:
        """Note the tensor, then pack it."""
        held = super().pack(tensor)
        replayed = isinstance(held, Recipe)
        node, number = self._maker(tensor)
        self.saved.append(
            SavedTensor(
                shape=tuple(tensor.shape),
                storage_bytes=tensor.untyped_storage().nbytes(),
                made_by="" if _is_leaf(node) else type(node).__name__,
                replayed=replayed,
                why="" if replayed else self._why_kept(tensor, node, number),
            )
        )
        return held

    def _maker(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """Return the node behind a tensor's views, and which of its outputs that is."""
        node: Any = tensor.grad_fn
        number = tensor.output_nr
        while self._entries[type(node)] is VIEW:
            node, number = node.next_functions[0]
        return node, number

    def _why_kept(self, tensor: torch.Tensor, node: Any, number: int) -> str:
        if _is_leaf(node):
            return "a parameter, an input, or made without a gradient"
        if node_number(node) < self._first:
            return "the caller made it"
        name = type(node).__name__
        if name not in RULES:
            return f"no replay rule for {name}"
        rule = RULES[name]
        if self._entries[type(node)] is None:
            return f"the policy saves {rule.op}"
        if not self.owns(node):
            return "made under other saved-tensor hooks"
        if number != 0:
            return f"output {number} of {rule.op}, whose rule rebuilds the first"
        if tensor._version:
            return "written to since it was made"
        if not rule.ready(node):
            return f"{name} did not save all that its rule reads"
        if not rule.works(tensor.dtype, str(tensor.device)):
            return f"the rule of {rule.op} is off for {tensor.dtype} on {tensor.device}"
        return "the plan keeps it"


class _ExplainedPlan(_Explained, PlannedRegion):
    """The same for a region that follows a plan."""


def _is_leaf(node: Any) -> bool:
    return node is None or hasattr(node, "variable")


def explain(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> tuple[SavedTensor, ...]:
    """Run a forward of `function` under the recipe engine and tell what autograd saved.

    Args:
        function: what would be checkpointed.
        args: its positional arguments.
        kwargs: its keyword arguments.
        policy: one that the engine can follow.
    """
    region = (
        _ExplainedPlan(policy)
        if isinstance(policy, BudgetPlan)
        else _Explained(ReplayTable(policy))
    )
    region.saved = []
    with saved_tensors_hooks(region.pack, region.read):
        function(*args, **kwargs)
    return tuple(region.saved)


def unobserved(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> Any:
    """Run a forward under the recipe engine as `run` does, and warn of nothing."""
    region = (
        PlannedRegion(policy) if isinstance(policy, BudgetPlan) else Region(ReplayTable(policy))
    )
    with saved_tensors_hooks(region.pack, region.read):
        return function(*args, **kwargs)

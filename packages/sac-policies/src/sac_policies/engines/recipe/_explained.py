"""What the recipe engine does with each tensor that autograd saves, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..._torch_compat import node_number, storage_bytes
from ..._torch_compat._nested import shape_of
from ...policies._budget_plan import BudgetPlan
from ...policies._modules import root_of
from ...policies._policies import Policy
from ...policies._unmatched import Watch
from ._own_rules import rule_of, why_not_again
from ._recipes import Recipe, Reconsidered
from ._replay import Node, Rule, output_facts
from ._replay_entries import ReplayTable, Why
from ._spans import SpanValue
from ._writes import Habit, habits_of
from .regions._marked import MarkedRegion, Tables
from .regions._planned import PlannedRegion
from .regions._region import Region
from .untracked._seen_calls import Remade

R = TypeVar("R", bound=Region)
_REBUILT = (Recipe, SpanValue, Remade)


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd saved in a region under the recipe engine.

    Attributes:
        shape: its shape.
        storage_bytes: bytes of its storage.
        made_by: autograd node that made it, past views; "" for leaves and untracked tensors.
        replayed: whether backward rebuilds it; otherwise it is kept.
        why: why it is kept; "" if it is replayed.
    """

    shape: tuple[int, ...]
    storage_bytes: int
    made_by: str
    replayed: bool
    why: str


class _Explained(Region):
    """Packs as the region beside it does, and writes down what became of each tensor."""

    _why = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.saved: list[SavedTensor] = []
        self.reasons: list[str] = []
        self._reconsidered_at: list[tuple[int, Reconsidered]] = []
        self._follow.keep = self._given

    def _given(self, tensor: torch.Tensor, node: Node) -> Any:
        """Keep what the region was given, for replays."""
        self.reasons.append("a replay reads what the region was given")
        return self.keep(tensor, node)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack the tensor, then note what became of it."""
        self._why = ""
        held = super().pack(tensor)
        made_by, _ = self._maker(tensor)
        self.saved.append(
            SavedTensor(
                shape=shape_of(tensor),
                storage_bytes=storage_bytes(tensor),
                made_by=""
                if made_by is None or hasattr(made_by, "variable")
                else type(made_by).__name__,
                replayed=isinstance(held, _REBUILT),
                why=self._why,
            )
        )
        return held

    def hold(self, tensor: torch.Tensor, node: Node, number: int, why: Why) -> Any:
        """Keep the tensor, and note the reason where it is."""
        held = super().hold(tensor, node, number, why)
        if isinstance(held, (SpanValue, Remade)):
            self._why = ""
            return held
        made_by, output = self._maker(tensor)
        name = type(made_by).__name__
        rule = rule_of(type(made_by))
        self._why = why.value.format(
            node=name,
            op="" if rule is None else rule.op,
            output=output,
            dtype=tensor.dtype,
            device=tensor.device,
            operand=self._operand_of(made_by) if why is Why.OPERAND else "",
            reason=_reason(why, rule, tensor, made_by),
        )
        self.reasons.append(self._why)
        if isinstance(held, Reconsidered):
            self._reconsidered_at.append((len(self.saved), held))
        return held

    def close(self) -> None:
        """Note what is replayed after all."""
        super().close()
        for at, kept in self._reconsidered_at:
            if isinstance(kept.held, Recipe) and at < len(self.saved):
                self.saved[at] = replace(self.saved[at], replayed=True, why="")

    def forget(self) -> None:
        """Let go of tensors, too: who is given this region's own method is a cycle with it."""
        super().forget()
        self._reconsidered_at.clear()

    def _operand_of(self, made_by: Node) -> str:
        """Say which operand of a node cannot be had, and why."""
        node, output, why = self._follow.blocker(made_by)
        if node is None or why is Why.OPERAND:
            return "something that needs no gradient and was not saved"
        name = type(node).__name__
        rule = rule_of(type(node))
        facts = output_facts(node, output)
        reason = why.value.format(
            node=name,
            op="" if rule is None else rule.op,
            output=output,
            dtype=None if facts is None else facts.dtype,
            device=None if facts is None else facts.device,
            reason="" if facts is None else _reason(why, rule, facts, node),
        )
        return f"what cannot be had again: {reason}"

    def _maker(self, tensor: torch.Tensor) -> tuple[Node, int]:
        """Return the node behind a tensor's views, and which of its outputs that is."""
        return self._entries.past_views(tensor.grad_fn, tensor.output_nr)


def _reason(why: Why, rule: Rule | None, made: Any, node: Node) -> str:
    """What is to be said of an output besides: what keeps its rule from being used."""
    if why is Why.UNFIT:
        assert rule is not None
        assert rule.unfit is not None
        return rule.unfit(node)
    return why_not_again(node) if why is Why.FUNCTION else _why_off(rule, made)


def _why_off(rule: Rule | None, made: Any) -> str:
    """For what reason a rule is not used for an output of this `dtype` and `device`."""
    if rule is None:
        return ""
    given = made.dtype, str(made.device)
    reason = "" if rule.rebuild is None else rule.why_off(*given)
    return reason or (rule.why_off_through(*given) if rule.through is not None else "")


class _ExplainedMarks(_Explained, MarkedRegion):
    """The same for a region that reads names or modules."""

    def _given(self, tensor: torch.Tensor, node: Node) -> Any:
        if node is None or node_number(node) not in self._marks.named:
            return super()._given(tensor, node)
        self.reasons.append(Why.NAMED.value)
        return self.keep(tensor, node)


class _ExplainedPlan(_Explained, PlannedRegion):
    """The same for a region that follows a plan."""


def _region(
    function: object,
    policy: Policy,
    given: tuple[Any, ...],
    plain: type[R],
    marked: Callable[..., R],
    planned: Callable[..., R],
) -> R:
    if isinstance(policy, BudgetPlan):
        return planned(policy, given)
    if policy.reads_names or policy.reads_modules:
        # Names that are missing are no error here.
        return marked(Tables(policy), Watch(policy), root_of(function), given)
    return plain(ReplayTable(policy), given)


def explain(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    ended: Callable[[], object],
) -> tuple[tuple[SavedTensor, ...], list[str]]:
    """Run a forward of `function` under the recipe engine and tell what autograd saved.

    Also for what reasons each tensor is kept that is, in the order they are.

    Args:
        function: what would be checkpointed.
        args: its positional arguments.
        kwargs: its keyword arguments.
        policy: one that the engine can follow.
        ended: called when the forward has, while its output is alive.
    """
    region = _region(function, policy, (args, kwargs), _Explained, _ExplainedMarks, _ExplainedPlan)
    region.mind(habits_of(function) | Habit.FORGETS)
    with region.watched(function):
        out = region.run(function, args, kwargs)
    ended()
    del out
    return tuple(region.saved), region.reasons


def unobserved(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> Any:
    """Run a forward under the recipe engine as `run` does, and warn of nothing."""
    region = _region(function, policy, (args, kwargs), Region, MarkedRegion, PlannedRegion)
    region.mind(habits_of(function) | Habit.FORGETS)
    return region.run(function, args, kwargs)

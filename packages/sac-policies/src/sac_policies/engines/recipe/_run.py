"""Runs a function as a region of the recipe engine: which policies it follows, who is watched.

Rule 1. The first forward of a function is watched, for what its graph does not show (`_writes`);
        later ones mind what was found.
Rule 2. Not so inside of others' hooks, which may be a checkpoint's: the forward may run again in
        backward and has to save the same then, when more is known of the function. There, what is
        known is found again: whoever has a habit is watched in every forward. What operators were
        given and forget is not asked for.
Rule 3. Outside of others' hooks and modes later forwards do what those before them did, under
        policies that decide by operators (`regions._repeats`) and under plans
        (`regions._planned_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..._errors import EngineError
from ..._torch_compat import modes_entered, saved_tensor_hooks
from ...policies._budget_plan import BudgetPlan
from ...policies._modules import root_of
from ...policies._policies import DEPENDS, Policy
from ...policies._unmatched import Watch, subject_of, watch_of
from ...policies._views import Operator, RegionSummary
from ._replay_entries import every_rule, unchecked_rules
from ._writes import Habit, habits_behind, habits_of, remember
from .regions._marked import MarkedRegion, Tables
from .regions._planned import PlannedRegion
from .regions._planned_steps import repeats_of
from .regions._region import Region
from .regions._repeats import Repeats
from .tables._replay_table import DIRECT


def refusal(policy: Policy) -> str:
    """Say why this engine cannot follow `policy`; "" where it can.

    It follows plans of `solve`, and policies that decide by operators, names of tensors and paths
    of modules.

    Example:
        >>> from sac_policies import save_every_nth
        >>> refusal(save_every_nth("aten.mm", n=2))
        'decides single calls of aten.mm.default, but saved-tensor hooks see no order of calls'
    """
    # A plan is long to hash and to remember.
    if not isinstance(policy, BudgetPlan):
        return _reason(policy)
    if policy.engine == "recipe":
        return ""
    return f"was solved for {policy.engine!r}, but this engine follows plans of saved tensors"


@lru_cache
def _reason(policy: Policy) -> str:
    if policy.offloads:
        return "offloads, but saved-tensor hooks only keep or replay"
    single = [rule.op for rule in DIRECT if _decides_calls(policy, rule.op)]
    if single:
        # A policy by size or a function says nothing of operators: to name one would mislead.
        which = "every operator" if len(single) == len(DIRECT) else single[0]
        return f"decides single calls of {which}, but saved-tensor hooks see no order of calls"
    return ""


def _decides_calls(policy: Policy, op: Operator) -> bool:
    """Whether an answer depends on the call, and not on the module alone."""
    if policy.constant(op) is not DEPENDS:
        return False
    parts = policy.parts if policy.reads_modules else ()
    return not parts or any(_decides_calls(part, op) for part in parts)


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    compares: bool = True,
) -> Any:
    """Call `function` so that backward finds what `policy` keeps and replays the rest.

    Args:
        function: called once; backward calls only single operators again.
        args: its positional arguments.
        kwargs: its keyword arguments.
        policy: one that `refusal` does not refuse.
        compares: whether what is rebuilt is held against what it was.

    Returns:
        What `function` returns.

    Raises:
        EngineError: the policy is refused, with the reason.
        RecomputeError: the function does not save what the plan was made for.
    """
    # A plan is long to hash and to remember.
    known = None if type(policy) is BudgetPlan else _known(policy, compares)
    if reason := refusal(policy) if known is None else known.refusal:
        raise EngineError(
            f"sac_policies.checkpoint: policy {policy!r} {reason}. "
            'Use engine="contexts", or "auto" to let it be chosen.'
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # A module stands for itself: most regions are modules.
    subject = function if isinstance(function, torch.nn.Module) else subject_of(function)
    if known is None:
        assert isinstance(policy, BudgetPlan)
        rules = every_rule if compares else unchecked_rules
        if not modes_entered() and saved_tensor_hooks() is None:
            repeats = repeats_of(policy, rules)
            return repeats.run(function, subject, args, kwargs, habits_behind(subject))
        planned = PlannedRegion(policy, (args, kwargs), rules)
        return _run(function, args, kwargs, planned, False)[0]
    tables, watch = known.tables, known.watch
    is_new = not watch.knows(subject)
    if not known.reads_places:
        habits = habits_behind(subject)
        # Under a mode torch may make other nodes than without, and a forward that leaves its steps
        # keeps more than others.
        if not is_new and not modes_entered() and saved_tensor_hooks() is None:
            return known.repeats.run(function, subject, args, kwargs, habits)
        out, ops = _run(function, args, kwargs, Region(tables.anywhere, (args, kwargs)), is_new)
        if is_new:
            watch.forward_ended(RegionSummary(ops), function)
        return out
    marked = MarkedRegion(tables, watch, root_of(function), (args, kwargs))
    out, ops = _run(function, args, kwargs, marked, is_new)
    if is_new or watch.open:
        watch.forward_ended(marked.seen(ops), function)
    return out


class Known(NamedTuple):
    """What is worked out once for a policy.

    Attributes:
        refusal: why the engine cannot follow it; "" where it can.
        tables: which nodes it replays.
        watch: what its regions have had so far.
        reads_places: whether it reads names of tensors or paths of modules.
        repeats: forwards that do what those before them did.
    """

    refusal: str
    tables: Tables
    watch: Watch
    reads_places: bool
    repeats: Repeats


@lru_cache
def known_of(policy: Policy, compares: bool = True) -> Known:
    """Work it out: to hash a policy once for each region is enough."""
    reads_places = policy.reads_names or policy.reads_modules
    tables = Tables(policy, compares)
    return Known(_reason(policy), tables, watch_of(policy), reads_places, Repeats(tables.anywhere))


def _known(policy: Policy, compares: bool) -> Known:
    """The same. Most regions have the policy of the one before, and to hash one takes long."""
    global _last
    last = _last
    if last[0] is not policy or last[1] is not compares:
        known = known_of(policy) if compares else known_of(policy, compares=False)
        last = _last = policy, compares, known
    return last[2]


_last: tuple[Any, Any, Any] = None, None, None


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    region: Region,
    is_new: bool,
) -> tuple[Any, Mapping[Operator, int]]:
    """Run the function in the region; return also which operators ran, where it was watched."""
    habits = habits_of(function)
    if region.is_in_hooks:
        habits &= ~Habit.FORGETS
    else:
        region.mind(habits)
        habits = Habit.NONE
        if is_new:
            region.try_calls()
    if not (is_new or habits):
        return region.run(function, args, kwargs), {}
    with region.watched(function) as observer:
        out = region.run(function, args, kwargs)
    if region.learned:
        remember(function, region.learned)
    return out, observer.ops

"""Runs a region once, forward and backward, and tells what its policy did and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ._checkpoint import check_call, check_recipe, not_recipe
from ._errors import nested_refused
from ._frames import user_line
from ._holdings import (
    Call,
    Holding,
    Makers,
    Unwatched,
    guards_of_contexts,
    of_contexts,
    of_recipe,
    run_backward,
)
from ._options import split
from ._tensors import needing_gradients, tensors_in
from ._torch_compat._checkpoint_ends import checkpoint as torch_checkpoint
from ._torch_compat._nested import any_nested
from .eager import _run as _tape
from .eager._observed import Observed
from .engines.contexts._contexts import contexts, ended_if_left
from .engines.recipe._explained import SavedTensor
from .engines.recipe._run import refusal
from .policies._budget_plan import BudgetPlan
from .policies._decisions import Decision
from .policies._flops import flops_of
from .policies._functions import PolicyLike, as_policy
from .policies._modules import root_of
from .policies._policies import DEPENDS, Answer, Constant, Policy
from .policies._views import Operator, OpView


@dataclass(frozen=True)
class Row:
    """One operator call and what was decided for it.

    Attributes:
        op: operator name.
        index: number among the calls of the operator.
        decision: what happens to its output.
        rule: the rule that decided, as its repr; "" if none did.
        out_bytes: bytes of its output.
        flops: floating point operations of the call.
        module: path of the module that ran it; "" outside of policies that name modules.
        label: name given to the tensor, for the rows of `name`.
        line: the user's line that ran it.
        read: whether backward needs the value that the policy keeps; None where it keeps none,
            and where nested tensors do not let the function be run again to tell.
        held_bytes: bytes that the engine holds of what the call made, shared storage counted
            with the first call that holds it.
        why: why the engine holds them although the policy recomputes; "" where it follows the
            policy.
    """

    op: str
    index: int
    decision: Decision
    rule: str
    out_bytes: int
    flops: int
    module: str
    label: str | None
    line: str
    read: bool | None = None
    held_bytes: int = 0
    why: str = ""


@dataclass(frozen=True)
class Report:
    """What a policy does to one region.

    Attributes:
        rows: operator calls in forward order.
        held_bytes: bytes that `engine` holds between forward and backward of what the region
            made, shared storage counted once; neither parameters and inputs, nor the state of
            random generators, nor what other checkpoints inside the region hold.
        saved: what autograd saves under the recipe engine, in order, and why it is kept where
            it is; empty where that engine cannot follow the policy.
        engine: the one that runs, "recipe" or "contexts".
        why: why `engine="auto"` uses it; "" if the caller named it.
        guard_bytes: further bytes, of copies and fingerprints by which the engine
            sees changes of parameters and inputs that no version counter shows.
    """

    rows: tuple[Row, ...]
    held_bytes: int
    saved: tuple[SavedTensor, ...] = ()
    engine: str = "contexts"
    why: str = ""
    guard_bytes: int = 0

    @property
    def kept(self) -> tuple[Row, ...]:
        """Rows whose output the policy saves or offloads."""
        return tuple(row for row in self.rows if row.decision.keeps)

    @property
    def kept_anyway(self) -> tuple[Row, ...]:
        """Rows that the policy recomputes but the engine still holds: see their `why`.

        The recipe engine keeps what it cannot rebuild; the contexts engine has no such rows.
        """
        return tuple(row for row in self.rows if row.why)

    @property
    def unread(self) -> tuple[Row, ...]:
        """Rows that the policy keeps and backward does not need.

        The contexts engine holds their output in vain; the recipe engine does not hold it.
        """
        return tuple(row for row in self.rows if row.read is False)

    @property
    def recomputed_flops(self) -> int:
        """Floating point operations of everything that the policy does not keep.

        The contexts engine repeats them up to the last one that backward needs, the recipe
        engine only those needed to rebuild a saved tensor.
        """
        return sum(row.flops for row in self.rows if not row.decision.keeps)

    @property
    def decisions(self) -> tuple[tuple[str, int, Decision], ...]:
        """(operator, number, decision) of every call, in order; comparable between engines."""
        return tuple((row.op, row.index, row.decision) for row in self.rows)

    def differs_from(self, other: Report) -> tuple[tuple[Row, Row | None], ...]:
        """Rows that `other` decides differently, with their counterparts there."""
        theirs = {(row.op, row.index): row for row in other.rows}
        pairs = ((row, theirs.get((row.op, row.index))) for row in self.rows)
        return tuple(
            (row, twin) for row, twin in pairs if twin is None or twin.decision != row.decision
        )

    def __str__(self) -> str:
        lines = [_line(row) for row in self.rows]
        held = f"{self.held_bytes:,} bytes held by the {self.engine} engine"
        lines.append(f"{held}, {len(self.unread)} unread")
        if self.guard_bytes:
            lines.append(f"{self.guard_bytes:,} bytes of copies and fingerprints beside them")
        if self.why:
            lines.append(f"auto takes the {self.engine} engine: {self.why}")
        return "\n".join([*lines, *_recipe_lines(self.saved)])


def _line(row: Row) -> str:
    name = f"{row.op}[{row.index}]" + (f" {row.label!r}" if row.label else "")
    unread = " UNREAD" if row.read is False else ""
    kept = f" KEPT: {row.why}" if row.why else ""
    return f"{row.decision.value:9} {row.out_bytes:>12,} B  {name:40} {row.rule}{unread}{kept}"


def _recipe_lines(saved: tuple[SavedTensor, ...]) -> Iterator[str]:
    """Yield a line for what the recipe engine replays, and one for each reason to keep."""
    if not saved:
        return
    replayed = sum(each.replayed for each in saved)
    yield f"recipe engine: {replayed} of {len(saved)} saved tensors replayed"
    for why, count in Counter(each.why for each in saved if each.why).items():
        yield f"  {count} kept: {why}"


@dataclass(frozen=True, eq=False)
class _Recorded(Unwatched):
    """Another policy, with everything it is asked and answers written down."""

    rows: list[Row] = field(default_factory=list)

    def decide(self, view: OpView) -> Answer:
        answer = self.inner.decide(view)
        self.rows.append(_row(self.inner, view, answer))
        return answer

    def constant(self, op: Operator) -> Constant:
        """None, so that it is asked of every call."""
        del op
        return DEPENDS

    def counts(self, op: Operator) -> bool:
        del op
        return True

    @property
    def reads_names(self) -> bool:
        """Always, so that namings have rows whatever the policy reads."""
        return True


def _row(policy: Policy, view: OpView, answer: Answer) -> Row:
    return Row(
        op=str(view.op),
        index=view.index,
        decision=answer or Decision.RECOMPUTE,
        rule="" if answer is None else repr(_speaker(policy, view, answer)),
        out_bytes=view.out_bytes,
        flops=flops_of(view.op, view.args, view.kwargs, view.output),
        module=view.module,
        label=view.label,
        line=user_line(),
    )


def _speaker(policy: Policy, view: OpView, answer: Answer) -> Policy:
    """Return the innermost rule that gives the answer by itself."""
    for part in policy.parts:
        if part.decide(view) is answer:
            return _speaker(part, view, answer)
    return policy


def report(
    function: Callable[..., Any],
    *args: Any,
    policy: PolicyLike,
    engine: str = "auto",
    **kwargs: Any,
) -> Report:
    """Run `function`, forward and backward, and report what `policy` keeps, where and why.

    Bytes are those of the engine that `checkpoint` would take. Runs the forward two to four times,
    once to measure the copies that detect changes of parameters. Leaves gradients and the random
    state as they were. Module buffers change as in any forward.

    Args:
        function: what would be checkpointed.
        args: its positional arguments.
        policy: as for `checkpoint`.
        engine: "auto", "recipe" or "contexts", as for `checkpoint`.
        kwargs: torch's options and keyword arguments of `function`, as for `checkpoint`.

    Raises:
        PolicyError: `policy` cannot be read, or names modules where there are none.
        EngineError: the engine is unknown, cannot follow the policy, or cannot run here.
        RecomputeError: a plan is for another function, and its engine was named.

    Example:
        >>> from sac_policies import save_ops
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> result = report(lambda a: (a @ a).sin(), x, policy=save_ops("aten.mm"))
        >>> [row.op for row in result.kept], result.engine, result.held_bytes
        (['aten.mm.default'], 'recipe', 16)
    """
    given = as_policy(policy)
    check_call(function, kwargs, engine, where="report")
    own, options = split(kwargs)
    if engine == "tape":
        return _of_tape(function, args, own, given)
    not_taken = not_recipe(function, given, args, own, options)
    chosen = ("contexts" if not_taken else "recipe") if engine == "auto" else engine
    if chosen == "recipe":
        check_recipe(given, where="report")
    makers = Makers()
    try:
        rows, holdings = _under_contexts(function, args, own, options, given, makers)
    except Exception as error:
        if not (makers.saw_nested or any_nested(tensors_in((args, own)))):
            raise
        rows, holdings = _under_contexts(function, args, own, _UNCOMPARED, given)
        if chosen == "contexts":
            raise nested_refused("report") from error
    saved: tuple[SavedTensor, ...] = ()
    guard_bytes = 0
    if chosen == "recipe" or not (refusal(given) or _is_misfit(given, args, own)):
        with torch.random.fork_rng(devices=[]):
            saved, of_it, guards = of_recipe(function, args, own, given)
        holdings, guard_bytes = (of_it, guards) if chosen == "recipe" else (holdings, 0)
    if chosen == "contexts":
        guard_bytes = _guards_of_contexts(function, args, own, options, given)
    why = (not_taken or _RECIPE_WHY) if engine == "auto" else ""
    held_bytes = sum(each.size_bytes for each in holdings.values())
    held_rows = tuple(_recipes(row, holdings) for row in rows)
    return Report(held_rows, held_bytes, saved, chosen, why, guard_bytes)


def _of_tape(
    function: Callable[..., Any], args: tuple[Any, ...], own: dict[str, Any], policy: Policy
) -> Report:
    """Run a forward under the tape engine, and read the report off the tape."""
    recorded, observed = _Recorded(policy), Observed()
    with torch.random.fork_rng(devices=[]):
        out = _tape.run(function, args, own, recorded, "none", observed)
    held = observed.held()
    del out
    rows = []
    for row in recorded.rows:
        size_bytes, why = held.get((row.op, row.index), (0, ""))
        keeps = row.decision.keeps
        read = size_bytes > 0 if keeps else None
        rows.append(replace(row, read=read, held_bytes=size_bytes, why="" if keeps else why))
    return Report(tuple(rows), sum(size for size, _ in held.values()), engine="tape")


_UNCOMPARED = {"determinism_check": "none"}
_RECIPE_WHY = "it can follow the policy, and costs least"


def _under_contexts(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    own: dict[str, Any],
    options: dict[str, Any],
    policy: Policy,
    makers: Makers | None = None,
) -> tuple[list[Row], dict[Call, Holding]]:
    """Run forward and, with `makers`, backward; what was decided for calls, and what was held."""
    recorded = _Recorded(policy)
    forward, recompute = contexts(recorded, root=root_of(function))
    region = forward.region
    with torch.random.fork_rng(devices=[]):
        with makers or Makers() as made:
            out = _run(function, args, own, options, lambda: (forward, recompute))
        holdings = of_contexts(region, made)
        kept = set(region.kept) if makers else set()
        if makers:
            run_backward(out)
    read = {(str(op), index): (op, index) not in region.unread for op, index in kept}
    rows = [replace(row, read=read.get((row.op, row.index))) for row in recorded.rows]
    return rows, holdings


def _guards_of_contexts(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    own: dict[str, Any],
    options: dict[str, Any],
    policy: Policy,
) -> int:
    def run(given: Policy) -> Any:
        make = partial(contexts, given, root=root_of(function))
        return _run(function, args, own, options, make)

    with torch.random.fork_rng(devices=[]):
        return guards_of_contexts(run, policy)


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    own: dict[str, Any],
    options: dict[str, Any],
    make: Callable[[], tuple[Any, Any]],
) -> Any:
    """Run a forward in torch's checkpoint; `make` makes its two contexts."""
    torchs = {name: value for name, value in options.items() if name != "debug"}
    torchs["use_reentrant"] = False
    with ended_if_left(make) as context_fn:
        return torch_checkpoint(function, *args, **torchs, context_fn=context_fn, **own)


def _recipes(row: Row, holdings: dict[Call, Holding]) -> Row:
    holding = holdings.get((row.op, row.index))
    if holding is None:
        return row
    why = "" if row.decision.keeps else holding.why
    return replace(row, held_bytes=holding.size_bytes, why=why)


def _is_misfit(policy: Policy, args: tuple[Any, ...], own: dict[str, Any]) -> bool:
    needed = needing_gradients((args, own))
    return isinstance(policy, BudgetPlan) and not policy.is_for(needed)

"""Make the trace of a function from a recorded forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch

from .._errors import BudgetError, shown
from .._tensors import tensors_in
from .._torch_compat import is_fake
from ..policies._operators import facts_of
from ..policies._plans import Unit
from ..policies._rules import is_count
from ._rehearsal import made_again
from ._run import Recorder, Run
from ._trace import Held, Trace, TracedOp, TracedPack


def profile(
    function: Callable[..., Any],
    *args: Any,
    unit: Unit | None = None,
    repeats: int = 1,
    **kwargs: Any,
) -> Trace:
    """Record one forward of a region: operators, bytes, work, and tensors that autograd saves.

    Runs `function` with its side effects, on CPU, CUDA or fake tensors. Not collective.

    Args:
        function: the function for `checkpoint`.
        args: its positional arguments.
        unit: "ns" times every operator, "flops" counts its arithmetic (one per element if
            torch has no formula). By default "flops" for fake tensors, else "ns".
        repeats: forwards to run; the shortest time of each operator counts.
        kwargs: keyword arguments of `function`.

    Returns:
        The trace.

    Raises:
        BudgetError: gradients are off, or two forwards run different operators.

    Example:
        >>> x = torch.ones(4, 4, requires_grad=True)
        >>> [op.name for op in profile(lambda a: (a @ a).sin(), x).ops]
        ['aten.mm.default', 'aten.sin.default']
    """
    check_unit(unit, where="profile")
    if not callable(function):
        raise BudgetError(
            f"sac_policies.profile: function {shown(function)} is a {type(function).__name__}, but "
            "a region is a module or another callable. Pass it first, then its arguments."
        )
    if not (is_count(repeats) and repeats != 0):
        raise BudgetError(
            f"sac_policies.profile: repeats {shown(repeats)} runs no forward, but a trace is of "
            "one. Use at least 1."
        )
    if not torch.is_grad_enabled():
        raise BudgetError(
            "sac_policies.profile: gradients are off, but without them nothing is saved. "
            "Call it outside of torch.no_grad()."
        )
    chosen = unit or unit_of((args, kwargs))
    call = partial(function, *args, **kwargs)
    runs = [recorded_forward(call, chosen) for _ in range(repeats)]
    return trace_of(runs[-1], runs, chosen, where="profile")


def check_unit(unit: object, *, where: str) -> None:
    """Refuse an unknown unit; None is accepted.

    Raises:
        BudgetError: with the units.
    """
    if not (unit is None or (isinstance(unit, str) and unit in get_args(Unit))):
        raise BudgetError(
            f"sac_policies.{where}: unit {shown(unit)} is unknown, but work is measured in one of "
            f"{get_args(Unit)}. Leave it out."
        )


def unit_of(values: Any) -> Unit:
    """Return the default unit for work on these tensors."""
    return "flops" if any(map(is_fake, tensors_in(values))) else "ns"


def recorded_forward(call: Callable[[], Any], unit: Unit) -> Run:
    """Record one forward, and the work of each of its calls."""
    recorder = Recorder(unit)
    return recorder.record(partial(recorder.forward, call))


def trace_of(run: Run, timed: Sequence[Run], unit: Unit, *, where: str) -> Trace:
    """Return the trace of a recorded forward.

    Args:
        run: the forward, or a step that begins with it.
        timed: forwards with measured work; the minimum of each call counts.
        unit: unit of the work.
        where: the public function, for messages.

    Raises:
        BudgetError: the forwards ran different operators.
    """
    calls = list(run.forward())
    costs = [[call.cost for call in calls]] if not timed else []
    for each in timed:
        others = list(each.forward())
        if [call.op for call in others] != [call.op for call in calls]:
            raise BudgetError(
                f"sac_policies.{where}: forwards ran {len(others)} and {len(calls)} operators that "
                "differ, but a plan is for one sequence. Fix what changes between calls."
            )
        costs.append([call.cost for call in others])
    makers: dict[int, tuple[int, int]] = {}
    ops: list[TracedOp] = []
    counts: Counter[str] = Counter()
    for at, (call, *cost) in enumerate(zip(calls, *costs, strict=True)):
        for storage in call.written:
            if storage in makers:
                maker = makers[storage][0]
                ops[maker] = replace(ops[maker], overwritten=True)
        read = {run.layouts[number].storage for number in call.inputs}
        name = str(call.op)
        ops.append(
            TracedOp(
                name=name,
                call=counts[name],
                out_bytes=sum(run.sizes[storage] for storage in call.made),
                cost=min(cost),
                inputs=tuple(sorted({makers[each][0] for each in read if each in makers})),
                draws=facts_of(call.op).draws(call.args),
            )
        )
        counts[name] += 1
        makers.update((storage, (at, number)) for number, storage in enumerate(call.made))
    return Trace(unit, tuple(ops), tuple(_packs(run, makers)))


def _packs(run: Run, makers: dict[int, tuple[int, int]]) -> list[TracedPack]:
    others: dict[tuple[int, int], int] = {}  # storages allocated before the calls, numbered from 1
    found = []
    for each in made_again(run):
        reads = []
        for key, size in each.reads.items():
            if size:
                made = makers.get(key[0]) or (-1, others.setdefault(key, len(others) + 1))
                reads.append(Held(*made, size))
        made_by, output = makers.get(each.storage, (-1, 0))
        size = run.sizes[each.storage] if each.storage >= 0 else 0
        kept = size if each.held is None else each.held
        found.append(TracedPack(each.producer, made_by, output, kept, tuple(sorted(reads))))
    return found

"""Make the trace of a function: run its forward on a tape that keeps nothing, and read the tape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import torch

from .._errors import BudgetError, shown
from .._tensors import is_accelerator, tensors_in
from .._torch_compat import is_fake, storage_key
from .._watching_mode import WatchingMode
from ..eager._masks import UNPACK
from ..eager._reading import Reading, ReadTape
from ..eager._values import OpCall, Value
from ..policies._decisions import Answer
from ..policies._flops import flops_of
from ..policies._plans import Unit
from ..policies._rules import RECOMPUTE_ALL, is_count
from ..policies._views import OpView
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
    if not (unit is None or (isinstance(unit, str) and unit in get_args(Unit))):
        raise BudgetError(
            f"sac_policies.profile: unit {shown(unit)} is unknown, but work is measured in one of "
            f"{get_args(Unit)}. Leave it out."
        )
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
    chosen: Unit = unit or ("flops" if any(map(is_fake, tensors_in((args, kwargs)))) else "ns")
    traces = [_traced(function, args, kwargs, chosen) for _ in range(repeats)]
    last = traces[-1]
    for each in traces:
        if [op.name for op in each.ops] != [op.name for op in last.ops]:
            raise BudgetError(
                f"sac_policies.profile: forwards ran {len(each.ops)} and {len(last.ops)} operators "
                "that differ, but a plan is for one sequence. Fix what changes between calls."
            )
    runs = zip(*(each.ops for each in traces), strict=True)
    ops = (replace(same[-1], cost=min(op.cost for op in same)) for same in runs)
    return replace(last, ops=tuple(ops))


def _traced(function: Callable[..., Any], args: Any, kwargs: Any, unit: Unit) -> Trace:
    """Run one forward, and return its trace."""
    clock = _Clock() if unit == "ns" else None

    def cost(view: OpView, _: Answer) -> int:
        if clock is not None:
            return clock.spent(view.op)
        flops = flops_of(view.op, view.args, view.kwargs, view.output)
        return flops or sum(each.numel() for each in tensors_in(view.output))

    reading = Reading(RECOMPUTE_ALL, cost, names=False)
    with clock or nullcontext():
        tape, out = reading.read(function, args, kwargs)
    ops = tuple(
        TracedOp(
            str(each.op),
            each.index,
            each.made_bytes,
            each.said,
            each.inputs,
            overwritten=each.overwritten,
            draws=each.draws,
        )
        for each in reading.calls
    )
    found = Trace(unit, ops, tuple(_packs(tape, reading)))
    del out  # until here autograd holds what it saved
    return found


class _Clock(WatchingMode):
    """Times operators below the tape, by operator, until they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._spent: dict[Any, int] = {}

    def spent(self, op: Any) -> int:
        """Return the nanoseconds of the last call of an operator."""
        return self._spent.pop(op, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = _now((args, kwargs))
        out = func(*args, **(kwargs or {}))
        self._spent[func] = _now(out) - began
        return out


def _now(values: Any) -> int:
    for device in filter(is_accelerator, {tensor.device for tensor in tensors_in(values)}):
        getattr(torch, device.type).synchronize(device)
    return time.perf_counter_ns()


def _packs(tape: ReadTape, reading: Reading[int]) -> Iterator[TracedPack]:
    """Yield what autograd holds, in the order in which it was saved."""
    live = [value for value in (each() for each in tape.saves) if value is not None]
    replayed = {id(each.held) for each in live if tape.storages[each].again}
    others: dict[int, int] = {}  # storages that the tape made, numbered from 1
    for value in live:
        storage = tape.storages[value]
        call = value.made_by if value.held is None else None
        if storage.again and value.held is not None:  # not made if the original is kept
            producer, behind = storage.again, [value.held]
        elif call is None or call.recorder is UNPACK:
            held = value.held if call is None else call.inputs[0].held
            size = 0 if held is None else reading.held(held).size
            yield TracedPack("", storage.made_by, storage.output, size)
            continue
        else:
            producer = str(call.recorder.op)
            behind = [each for each in _held_behind(call, set(live)) if id(each) not in replayed]
        reads = set()
        for each in behind:
            own = reading.held(each)
            if own.size and (own.again or own.is_copy):
                key = storage_key(each)
                reads.add(Held(-1, others.setdefault(key, len(others) + 1), own.size))
            elif own.size:
                reads.add(Held(own.made_by, own.output, own.size))
        place = storage.made_by, storage.output
        yield TracedPack(producer, *place, storage.size, tuple(sorted(reads)))


def _held_behind(call: OpCall, saved: set[Value]) -> Iterator[torch.Tensor]:
    """Yield the held tensors that a call reads, directly or through unsaved calls."""
    seen: set[Value] = set()
    stack = [call]
    while stack:
        for each in stack.pop().inputs:
            if each in seen:
                continue
            seen.add(each)
            if each.held is not None:
                yield each.held
            elif each not in saved and each.made_by is not None:
                stack.append(each.made_by)

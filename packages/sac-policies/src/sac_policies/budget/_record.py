"""Runs a function under a dispatch mode and saved-tensor hooks, and tells what it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._errors import BudgetError, shown
from .._tensors import is_accelerator, tensors_in
from .._torch_compat import FAKE_TENSOR, in_fake_mode, is_fake, storage_under
from .._watching_mode import WatchingMode
from ..eager._fsdp import RANGE_OPS, Ranges
from ..policies._checked import is_count
from ..policies._flops import flops_of
from ..policies._operators import facts_of
from ..policies._plans import Unit
from ._saved import Made, SavedTensors
from ._trace import Trace, TracedOp


def profile(
    function: Callable[..., Any],
    *args: Any,
    unit: Unit | None = None,
    repeats: int = 1,
    **kwargs: Any,
) -> Trace:
    """Record one forward of a region: operators, bytes, work, and what autograd saves.

    Runs `function` as it is, side effects included, on whatever its arguments are: CPU, CUDA
    or fake tensors. Not collective.

    Args:
        function: what `checkpoint` will be given.
        args: its positional arguments.
        unit: "ns" times every operator, "flops" counts its arithmetic (one per element where
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
    if problem := _wrong(function, unit, repeats):
        raise BudgetError(f"sac_policies.profile: {problem}")
    if not torch.is_grad_enabled():
        raise BudgetError(
            "sac_policies.profile: gradients are off, but without them nothing is saved. "
            "Call it outside of torch.no_grad()."
        )
    chosen = unit or _unit_of((args, kwargs))
    trace = _record(function, args, kwargs, chosen)
    for _ in range(repeats - 1):
        trace = _faster(trace, _record(function, args, kwargs, chosen))
    return trace


def _wrong(function: object, unit: object, repeats: object) -> str:
    if not callable(function):
        return (
            f"function {shown(function)} is a {type(function).__name__}, but a region is a module "
            "or another callable. Pass it first, then its arguments."
        )
    if not (unit is None or (isinstance(unit, str) and unit in get_args(Unit))):
        return (
            f"unit {shown(unit)} is unknown, but work is measured in one of {get_args(Unit)}. "
            "Leave it out."
        )
    if not (is_count(repeats) and repeats != 0):
        return f"repeats {shown(repeats)} runs no forward, but a trace is of one. Use at least 1."
    return ""


def _unit_of(values: Any) -> Unit:
    return "flops" if any(map(is_fake, tensors_in(values))) else "ns"


def _record(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unit: Unit) -> Trace:
    recorder = Recorder(unit)
    tape = SavedTensors(recorder.made)
    with recorder:  # it sees what the tape runs
        out = tape.run(function, args, kwargs)
    packs, constants = tape.listed()
    del out
    return Trace(unit, tuple(recorder.ops), packs, constants)


def _faster(one: Trace, other: Trace) -> Trace:
    if one.digest != other.digest:
        raise BudgetError(
            f"sac_policies.profile: repeated forwards ran {len(one.ops)} and {len(other.ops)} "
            "operators that differ, but a plan is for one sequence. Fix what changes between "
            "calls, or use repeats=1."
        )
    pairs = zip(one.ops, other.ops, strict=True)
    return replace(one, ops=tuple(replace(a, cost=min(a.cost, b.cost)) for a, b in pairs))


def is_taken_apart(types: Sequence[type]) -> bool:
    """Whether a call is one of a subclass, which has its parts come back to the mode."""
    plain = (torch.Tensor, torch.nn.Parameter, FAKE_TENSOR)
    return any(kind not in plain for kind in types)


def is_propagation(types: Sequence[type]) -> bool:
    """Whether a call is one by which DTensor finds shardings, on fake tensors."""
    return FAKE_TENSOR in types and not in_fake_mode()


class Recorder(WatchingMode):
    """Writes down every operator that runs.

    Attributes:
        ops: what ran.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.ops: list[TracedOp] = []
        self._unit = unit
        self._calls: Counter[str] = Counter()
        self._made = WeakIdKeyDictionary()
        self._random = -1
        self._ranges = Ranges()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if is_taken_apart(types):
            return NotImplemented
        if is_propagation(types):
            return func(*args, **given)
        facts = facts_of(func)
        if func in RANGE_OPS:
            self._ranges.follow(func, args)
        if facts.bookkeeping or self._ranges.inside:
            return func(*args, **given)
        began = self._clock(args)
        out = func(*args, **given)
        elapsed = self._clock(out) - began
        cost = elapsed if self._unit == "ns" else _work(func, args, given, out)
        for tensor in facts.written(args, given):
            self._overwrite(tensor)
        self._add(func, cost, _storages((args, given)), _storages(out), facts.draws(args))
        return out

    def made(self, storage: torch.UntypedStorage) -> Made | None:
        """Who made a storage; None for what the function was given."""
        found: Made | None = self._made.get(storage)
        return found

    def _overwrite(self, tensor: torch.Tensor) -> None:
        storage = storage_under(tensor)
        made = None if storage is None else self.made(storage)
        if made is not None:
            self.ops[made.call] = replace(self.ops[made.call], overwritten=True)

    def _add(self, func: Any, cost: int, inputs: _Found, outputs: _Found, draws: bool) -> None:
        at = len(self.ops)
        new = [outputs[key] for key in outputs if key not in inputs]
        makers = {made.call for each in inputs.values() if (made := self.made(each)) is not None}
        for number, storage in enumerate(new):
            self._made[storage] = Made(at, number)
        if draws and self._random < 0:
            self._random = at
        name = str(func)
        self.ops.append(
            TracedOp(
                name=name,
                call=self._calls[name],
                out_bytes=sum(storage.nbytes() for storage in new),
                cost=cost,
                inputs=tuple(sorted(makers)),
                group=self._random if draws else at,
                draws=draws,
            )
        )
        self._calls[name] += 1

    def _clock(self, values: Any) -> int:
        if self._unit == "flops":
            return 0
        _wait(values)
        return time.perf_counter_ns()


_Found = dict[int, torch.UntypedStorage]


def _storages(values: Any) -> _Found:
    """Storages of all tensors in `values` that have one, each once, in order."""
    found = map(storage_under, tensors_in(values))
    return {id(storage): storage for storage in found if storage is not None}


def _work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    return flops_of(func, args, kwargs, out) or sum(t.numel() for t in tensors_in(out))


def _wait(values: Any) -> None:
    """Wait for the accelerators that hold `values`."""
    for device in filter(is_accelerator, {tensor.device for tensor in tensors_in(values)}):
        getattr(torch, device.type).synchronize(device)

"""Floating-point operations per module, through a dispatch mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from .._attribution import Attribution
from .._torch_compat import is_composite, is_higher_order, run_parts
from .._tracker import tracking
from ._mode import MeasuringMode, has_own_way
from ._phase_totals import PhaseTotals
from ._report import PhaseRow, Report, phase_rows

Formula = Callable[..., int]

# What is known of an operator: how to count it, or one of those below.
UNCOUNTED = "uncounted"
COMPOSITE = "composite"
BRANCHES = "branches"  # torch.cond: one of its functions is counted
INSIDE = "inside"  # a higher-order operator: what its functions do is counted


class FlopReport(Report[PhaseRow]):
    """Floating-point operations per module; a multiplication and an addition are two.

    Attributes:
        uncounted: how often each operator without a formula ran. Views and element-wise
            operators have none in torch; look here for a matrix product of your own, and for
            products of nested tensors with the layout `torch.strided`.
        by_operator: floating-point operations of each operator that has a formula.
    """

    unit = "FLOP"

    def __init__(self) -> None:
        super().__init__()
        self.uncounted: dict[str, int] = {}
        self.by_operator: dict[str, int] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        extra = {"by_operator": self.by_operator, "uncounted": self.uncounted}
        return {**super().to_dict(), **extra}


class Counts:
    """What was counted.

    Attributes:
        totals: by module and phase.
        uncounted: how often each operator without a formula ran.
        by_operator: amounts of those with one.
    """

    def __init__(self) -> None:
        self.totals = PhaseTotals()
        self.uncounted: Counter = Counter()
        self.by_operator: Counter = Counter()

    def add(self, other: Counts) -> None:
        """Add what was counted apart."""
        self.totals.add_all(other.totals)
        self.uncounted.update(other.uncounted)
        self.by_operator.update(other.by_operator)


class FlopMode(MeasuringMode):
    """Counts every operator that is dispatched to it.

    Formulas take shapes, so a result is kept per operator and shapes: a formula runs once for
    each, and what is left per operation is a dictionary lookup.
    """

    def __init__(self, attribution: Attribution, formulas: Mapping[Any, Formula]) -> None:
        super().__init__(attribution)
        self.counts = Counts()
        self._formulas = formulas
        self._known: dict[Any, Any] = {}
        self._amounts: dict[Any, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = self._classify(func)
        if types and has_own_way(types) and (type(known) is str or _is_ragged(args)):
            return NotImplemented
        call, phase = self.attribution.attribute_op()
        if known is COMPOSITE and not _is_ragged(args):
            with self:
                return run_parts(func, args, kwargs)
        if known is BRANCHES:
            return self._branches(func, args, kwargs)
        output = self.call_inside(func, args, kwargs) if known is INSIDE else func(*args, **kwargs)
        amount = None if type(known) is str else self._amount(func, known, args, kwargs, output)
        if amount is None:
            self.counts.uncounted[func] += 1
            return output
        self.counts.by_operator[func] += amount
        self.counts.totals.add(call[0], phase, amount)
        return output

    def _classify(self, func: Any) -> Any:
        packet = getattr(func, "overloadpacket", func)
        formula = self._formulas.get(func) or self._formulas.get(packet)
        if formula is not None:
            return formula
        if is_higher_order(func):
            return BRANCHES if func is torch.ops.higher_order.cond else INSIDE
        return COMPOSITE if is_composite(func) else UNCOUNTED

    def _branches(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Count the branch of `torch.cond` that runs; without data both do: the larger one."""
        outer, counted = self.counts, []

        def counted_apart(branch: Callable[..., Any]) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                self.counts = Counts()
                counted.append(self.counts)
                try:
                    return branch(*operands)
                finally:
                    self.counts = outer

            return run

        predicate, first, second, *operands = args
        try:
            return self.call_inside(
                func, (predicate, counted_apart(first), counted_apart(second), *operands), kwargs
            )
        finally:
            if counted:
                outer.add(max(counted, key=lambda counts: counts.totals.total))

    def _amount(
        self, func: Any, formula: Formula, args: Any, kwargs: Any, output: Any
    ) -> int | None:
        try:
            key = _shape_key(func, args, kwargs)
        except RuntimeError:
            return None  # a nested tensor of torch's older kind has no shape
        if key is None:
            return int(formula(*args, **kwargs, out_val=output))
        amount = self._amounts.get(key)
        if amount is None:
            amount = self._amounts[key] = int(formula(*args, **kwargs, out_val=output))
        return amount


def _is_ragged(args: tuple) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_nested for arg in args)


def _shape_key(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Sequences may hold tensors, and symbolic sizes cannot be keys: no key for those.
    key: list[Any] = [func]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            key.append(value.shape)
        elif value is None or isinstance(value, (bool, int, float)):
            key.append(value)
        elif isinstance(value, (list, tuple)) and all(type(item) in (int, bool) for item in value):
            key.append(tuple(value))
        else:
            return None
    shapes = (*key, *kwargs)
    return shapes if _is_hashable(shapes) else None


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _with_shapes(formula: Formula) -> Formula:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        shapes = [_shape(value) for value in args]
        named = {name: _shape(value) for name, value in kwargs.items()}
        return formula(*shapes, out_shape=_shape(out_val), **named)

    return count


def _shape(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_shape(item) for item in value])
    return value.shape if isinstance(value, torch.Tensor) else value


@contextmanager
def profile_flops(
    *roots: nn.Module, formulas: Mapping[Any, Formula] | None = None
) -> Iterator[FlopReport]:
    """Count the floating-point operations of each module in forward, recompute and backward.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        formulas: formulas for operators of your own, or instead of torch's. The key is an
            operator such as `torch.ops.mylib.attention`; the value is called with the operator's
            arguments, shapes in place of tensors, and with `out_shape`, and returns a number.
            Formulas registered with `torch.utils.flop_counter.register_flop_formula` are known.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with profile_flops() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> report["Sequential.1"].forward, report.total == report.sum("self_total")
        (32, True)
    """
    report = FlopReport()
    own = {operator: _with_shapes(formula) for operator, formula in (formulas or {}).items()}
    with tracking(*roots) as tracker:
        mode = FlopMode(tracker._attribution, {**flop_registry, **own})
        with mode:
            yield report
    counts = mode.counts
    report.by_operator = {str(func): amount for func, amount in counts.by_operator.items()}
    report.uncounted = {str(func): times for func, times in counts.uncounted.most_common()}
    report.fill(phase_rows(counts.totals), counts.totals.total)

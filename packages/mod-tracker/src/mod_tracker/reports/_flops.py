"""Floating-point operations per module, through a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from .._compile_backend import listening
from .._errors import OptionError
from .._torch_compat import (
    is_composite,
    is_dispatched,
    is_higher_order,
    is_stand_in,
    run_parts,
    top_mode,
    views_are_noted,
)
from .._tracker import tracking
from ._compiled import GraphFlops, compiled_notes
from ._flop_counter import (
    MENDED_FORMULAS,
    MORE_FORMULAS,
    Counts,
    FlopCounter,
    Formula,
    with_shapes,
)
from ._mode import MeasuringMode, has_own_way
from ._operator_watch import watch
from ._report import PhaseRow, Report, phase_rows
from ._steps import Look, Steps, by_root, closed_twice

# What is known of an operator: how to count it, or one of those below.
UNCOUNTED = "uncounted"
COMPOSITE = "composite"
BRANCHES = "branches"  # torch.cond: one of its functions is counted
INSIDE = "inside"  # a higher-order operator: what its functions do is counted


class FlopReport(Report[PhaseRow]):
    """Floating-point operations per module; a multiplication and an addition are two.

    Attributes:
        uncounted: how often each operator without a formula ran, in the steps in which they were
            listed; see `profile_flops`. Views and element-wise operators have none in torch; look
            here for a kernel of your own. Products that such an operator has torch carry out are
            counted nevertheless.
        by_operator: floating-point operations of each operator that has a formula.
    """

    unit = "FLOP"
    title = "Floating-point operations"
    scalar_unit: ClassVar[tuple[str, int]] = ("flops", 1)

    def __init__(self) -> None:
        super().__init__()
        self.uncounted: dict[str, int] = {}
        self.by_operator: dict[str, int] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        extra = {"by_operator": self.by_operator, "uncounted": self.uncounted}
        return {**super().to_dict(), **extra}


class FlopMode(MeasuringMode):
    """Looks at every operator: lists those without a formula, and counts what is not watched.

    Attributes:
        watched: whether operators with a formula are counted where they are watched. Only what
            has no data, and so does not run, is counted here then.
    """

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__(counter._attribution)
        self.watched = False
        self._counter = counter
        self._known: dict[Any, Any] = {}

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
            with self, views_are_noted(func):
                return run_parts(func, args, kwargs)
        if known is BRANCHES:
            return self._branches(func, args, kwargs)
        if type(known) is str:
            inside = known is INSIDE
            output = self.call_inside(func, args, kwargs) if inside else func(*args, **kwargs)
            self._counter.counts.uncounted[func] += 1
            return output
        if self.watched and not any(is_stand_in(kind) for kind in types or ()):
            if is_higher_order(func):
                return self.call_inside(func, args, kwargs)
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        self._counter.count(call, phase, func, known, args, kwargs, output)
        return output

    def _classify(self, func: Any) -> Any:
        packet = getattr(func, "overloadpacket", func)
        formulas = self._counter.formulas
        formula = formulas.get(func) or formulas.get(packet)
        if formula is not None:
            return formula
        if is_higher_order(func):
            return BRANCHES if func is torch.ops.higher_order.cond else INSIDE
        return COMPOSITE if is_composite(func) else UNCOUNTED

    def _branches(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Count the branch of `torch.cond` that runs; without data both do: the larger one."""
        counter = self._counter
        outer, counted = counter.counts, []

        def counted_apart(branch: Callable[..., Any]) -> Callable[..., Any]:
            def run(*operands: Any) -> Any:
                counter.counts = Counts()
                counted.append(counter.counts)
                try:
                    return branch(*operands)
                finally:
                    counter.counts = outer

            return run

        predicate, first, second, *operands = args
        try:
            return self.call_inside(
                func, (predicate, counted_apart(first), counted_apart(second), *operands), kwargs
            )
        finally:
            if counted:
                outer.add(max(counted, key=lambda counts: counts.total))


def _is_ragged(args: tuple) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_nested for arg in args)


def _watchable(formulas: Mapping[Any, Formula]) -> dict[Any, Formula]:
    found: dict[Any, Formula] = {}
    for operator, formula in formulas.items():
        if isinstance(operator, torch._ops.OpOverloadPacket):
            for overload in operator.overloads():
                each = getattr(operator, overload)
                if is_dispatched(each):
                    found.setdefault(each, formula)
        elif isinstance(operator, torch._ops.OpOverload):
            found[operator] = formula
    return found


def _check(key: Any, formula: Any) -> None:
    operators = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    if not isinstance(key, operators) and not is_higher_order(key):
        name = getattr(key, "__name__", "")
        known = isinstance(name, str) and hasattr(torch.ops.aten, name)
        raise OptionError(
            f"mod_tracker.profile_flops: the key {key!r} of `formulas` is not an operator, and "
            "only operators are seen. Use "
            f"torch.ops.{f'aten.{name}' if known else 'LIBRARY.NAME'}."
        )
    if not callable(formula):
        raise OptionError(
            f"mod_tracker.profile_flops: the formula of {key} is {formula!r}, but it must be a "
            "function of shapes that returns a number. For a constant use lambda *args, **more: n."
        )


@contextmanager
def profile_flops(
    *roots: nn.Module,
    formulas: Mapping[Any, Formula] | None = None,
    every_step: bool = False,
) -> Iterator[FlopReport]:
    """Count the floating-point operations of each module in forward, recompute and backward.

    Every operator with a formula is counted, each time it runs. Begin and end the block while no
    other thread runs a model.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        formulas: formulas for operators of your own, or instead of torch's. The key is an
            operator such as `torch.ops.mylib.attention`; the value is called with the operator's
            arguments, shapes in place of tensors, and with `out_shape`, and returns a number.
            Formulas registered with `torch.utils.flop_counter.register_flop_formula` are known.
            What one raises does not reach the model: the operator is uncounted then, and
            `FlopReport.notes` says why.
        every_step: list operators without a formula in every step. By default this is done in
            some steps only, and more and more seldom: the 1st, 2nd, 3rd, 4th, 8th, 16th and so on
            of those that call the same model first. It does not change what is counted.

    Raises:
        OptionError: a key of `formulas` is no operator, or its formula no function.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with profile_flops() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> report["Sequential.1"].forward, report.total == report.sum("self_total")
        (32, True)
    """
    from torch.utils.flop_counter import flop_registry  # brings Triton, where that is installed

    report = FlopReport()
    for key, formula in (formulas or {}).items():
        _check(key, formula)
    own = {operator: with_shapes(formula) for operator, formula in (formulas or {}).items()}
    known = {**MORE_FORMULAS, **flop_registry, **MENDED_FORMULAS, **own}
    watchable = _watchable(known)
    with ExitStack() as stack:
        tracker = stack.enter_context(tracking(*roots))
        counter = FlopCounter(tracker._attribution, {**known, **watchable})
        mode = FlopMode(counter)
        end = watch(watchable, counter) if top_mode() is None else None
        if end is not None:
            stack.enter_context(closed_twice(end))
            mode.watched = True
        look = Look(mode)
        every = every_step or end is None
        steps = Steps(look, kind=by_root, every=lambda: every or counter.stand_ins > 0)
        stack.enter_context(closed_twice(partial(look.close, anyway=True)))
        look.start()
        stack.enter_context(steps.listen(tracker))
        graphs = GraphFlops(counter, tracker._attribution)
        stack.enter_context(listening(graphs.run))
        yield report
    counts = counter.counts
    report.by_operator = dict(counts.by_operator())
    report.uncounted = {str(func): times for func, times in counts.uncounted.most_common()}
    report.notes = steps.notes("operators without a formula were listed")
    report.notes += compiled_notes(tracker._attribution, apart=graphs.all_apart)
    report.notes += graphs.notes()
    report.notes += tuple(
        f"the formula of {func} raised {type(error).__name__}: {error}; calls of it are uncounted"
        for func, error in counter.errors.items()
    )
    if counter.stand_ins and steps.looked_at < steps.begun:
        report.notes += (
            "tensors without data came after the first steps and may be missing: use every_step",
        )
    totals = counts.totals()
    report.fill(phase_rows(totals), counts.total, {"total": totals.by_stack()})

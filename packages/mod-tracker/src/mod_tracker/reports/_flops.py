"""Floating-point operations per module, through a dispatch mode."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import nn

from .._attribution import FORWARD, RECOMPUTE, Attribution
from .._errors import OptionError, StateError
from .._record import Path
from .._torch_compat import (
    is_composite,
    is_higher_order,
    makes_stand_ins,
    run_inside,
    run_parts,
    views_are_noted,
)
from .._tracker import ModTracker
from ._formulas import FLEX, OWN, Amount, Count, Formula, of_shapes, of_torch
from ._free_operators import is_free
from ._mode import MeasuringMode, has_own_way, is_sharded, measuring
from ._peaks import peak_of
from ._report import Report, compiled_paths, notes_on_compiled, ran_compiled, reporting
from ._rows import PhaseRow, PhaseTotals, phase_rows

SHOWN = 8
"""Operators that a note shows."""


class FlopReport(Report[PhaseRow]):
    """Floating-point operations per module; a multiplication and an addition are two.

    Matrix products, convolutions and attention are counted. Attention counts every pair of a query
    and a key, also masked pairs.

    Attributes:
        by_operator: floating-point operations of each operator that has a formula.
        uncounted: number of calls of each operator without a formula.
        unknown: the operators of `uncounted` that may multiply; `notes` name them. Give them a
            formula by the option `formulas`.
        compiled: modules that ran compiled. FLOPs of compiled code are not counted.
        model_flops: without recomputation by checkpoints, and without the product that the
            backward of fused attention repeats.
    """

    unit = "FLOP"
    title = "Floating-point operations"
    scalar_unit: ClassVar[tuple[str, int]] = ("flops", 1)

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: dict[str, int] = {}
        self.uncounted: dict[str, int] = {}
        self.unknown: dict[str, int] = {}
        self.compiled: tuple[str, ...] = ()
        self.model_flops = 0
        self._masked = self._model_masked = 0

    def mfu(self, peak_flops: float | str, seconds: float, *, skip_masked: bool = False) -> float:
        """Return the model FLOPs utilization: the model's FLOPs as a share of the device's peak.

        Recomputation does not count (PaLM, arXiv:2204.02311, appendix B). As in that paper,
        attention counts in full under a causal mask.

        Args:
            peak_flops: peak FLOPs per second of one device, in the dtype of the model, such as
                989e12; or the name of a device, such as "H100" or
                `torch.cuda.get_device_name()`, for its peak in dense bfloat16. Also with several
                ranks, since a report counts the work of this rank only.
            seconds: time of the measured block without a report.
            skip_masked: leave out pairs of queries and keys that `is_causal=True`, or a window, of
                an attention kernel hides.

        Raises:
            OptionError: `peak_flops` or `seconds` is not a number above zero, or the device is
                not known.
            StateError: compiled code ran, whose FLOPs are missing, or the report is a difference.
        """
        work = self.model_flops - (self._model_masked if skip_masked else 0)
        return self._share("mfu", work, peak_flops, seconds)

    def hfu(self, peak_flops: float | str, seconds: float, *, skip_masked: bool = False) -> float:
        """Return the hardware FLOPs utilization: like `mfu`, with recomputation."""
        work = self.total - (self._masked if skip_masked else 0)
        return self._share("hfu", work, peak_flops, seconds)

    def _share(self, name: str, work: int, peak_flops: float | str, seconds: float) -> float:
        self._refuse_difference(name, "utilization")
        peak_flops = peak_of(peak_flops) if isinstance(peak_flops, str) else peak_flops
        for what, value in (("peak_flops", peak_flops), ("seconds", seconds)):
            if not isinstance(value, Real) or not value > 0:
                raise OptionError(
                    f"mod_tracker.{name}: {what} must be a number above zero; got {value!r}. Pass "
                    "the device's FLOPs per second or its name, such as 989e12 or 'H100', and the "
                    "seconds of a step."
                )
        if self.compiled:
            raise StateError(
                f"mod_tracker.{name}: FLOPs of compiled code are not counted, and "
                f"{', '.join(self.compiled[:3])} ran compiled. Count a step before compiling, or "
                "under torch.compiler.set_stance('force_eager')."
            )
        return work / (peak_flops * seconds)

    def _figures(self) -> dict[str, Any]:
        return {
            "model_flops": self.model_flops,
            "by_operator": self.by_operator,
            "uncounted": self.uncounted,
            "unknown": self.unknown,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**super().to_dict(), **self._figures()}


FREE, UNKNOWN = "free", "unknown"
COMPOSITE = "composite"  # decomposed; its parts are counted
INSIDE = "inside"  # a higher-order operator: its functions are counted

Rule = Count | str
"""How an operator is counted: a formula, or one of the names above."""


class Operator:
    """How an operator is counted, and how often.

    Attributes:
        uncounted: number of calls without a formula.
        unknown: those of them that may have multiplied.
    """

    __slots__ = ("rule", "uncounted", "unknown")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.uncounted = self.unknown = 0


class Counts:
    """FLOPs by path, phase and operator."""

    def __init__(self) -> None:
        self.amounts: defaultdict[tuple[Path, str, Any], list[int]] = defaultdict(
            lambda: [0] * len(Amount._fields)
        )

    def add(self, place: tuple[Path, str, Any], amounts: Any) -> None:
        """Add the numbers of an `Amount`."""
        sums = self.amounts[place]
        for at, amount in enumerate(amounts):
            sums[at] += amount

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(amounts[0] for amounts in self.amounts.values())


class FlopMode(MeasuringMode):
    """Counts every operator.

    Attributes:
        operators: all operators so far.
        errors: the last exception of a formula, by operator. Calls of the operator are then
            uncounted; the model continues.
    """

    def __init__(self, attribution: Attribution, formulas: Mapping[Any, Count]) -> None:
        super().__init__(attribution)
        self.counts = Counts()
        self.errors: dict[Any, Exception] = {}
        self._formulas = formulas
        self.operators: dict[Any, Operator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # One lookup: the hash of an operator is computed in Python.
        known = self.operators.get(func)
        if known is None:
            known = self.operators[func] = Operator(self._rule_of(func))
        rule = known.rule
        # A subclass with a formula is counted as a whole; without one, its inner operators are
        # counted. A rank of a sharded tensor computes a part of the whole.
        if types and has_own_way(types) and (isinstance(rule, str) or _not_whole(types, args)):
            return self.pass_on(func, types, args, kwargs)
        if types and self.is_tried_out(types):
            return func(*args, **kwargs)
        call, phase = self.attribution.attribute_op()
        if rule is FREE:
            known.uncounted += 1
            return func(*args, **kwargs)
        if isinstance(rule, str) or _is_ragged(args):
            return self._without_formula(known, func, args, kwargs)
        output = func(*args, **kwargs)
        try:
            amount = rule(func, args, kwargs, output)
        except Exception as error:
            self.errors[func] = error
            known.uncounted += 1
        else:
            self.counts.add((call[0], phase, func), amount)
        return output

    def _rule_of(self, func: Any) -> Rule:
        packet = getattr(func, "overloadpacket", func)
        formula = self._formulas.get(func) or self._formulas.get(packet)
        if formula is not None:
            return formula
        if is_higher_order(func):
            return FLEX.get(str(func), INSIDE)
        if is_composite(func):
            return COMPOSITE
        return FREE if is_free(func) else UNKNOWN

    def _without_formula(
        self, known: Operator, func: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        if known.rule is COMPOSITE and not _is_ragged(args):
            with self, views_are_noted(func):
                return run_parts(func, args, kwargs)
        known.uncounted += 1
        if known.rule is INSIDE:
            if func is torch.ops.higher_order.cond and makes_stand_ins():
                known.unknown += 1  # without data both branches run
            return self.call_inside(func, args, kwargs)
        # If the kernel calls operators with products, they are counted. Otherwise it may multiply.
        products = sum(map(len, self.counts.amounts.values())), self.counts.total
        ran = run_inside(self, func, args, kwargs)
        output = func(*args, **kwargs) if ran is None else ran[0]
        if products == (sum(map(len, self.counts.amounts.values())), self.counts.total):
            known.unknown += 1
        return output


def _is_ragged(args: tuple) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_nested for arg in args)


def _not_whole(types: Any, args: tuple) -> bool:
    return _is_ragged(args) or any(map(is_sharded, types))


def _check(key: Any, formula: Any) -> None:
    operators = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    if not isinstance(key, operators) and not is_higher_order(key):
        name = str(getattr(key, "__name__", key)).removeprefix("aten.")
        known = hasattr(torch.ops.aten, name)
        raise OptionError(
            f"mod_tracker.profile_flops: a key of formulas must be an operator; got {key!r}. Use "
            f"torch.ops.{f'aten.{name}' if known else 'LIBRARY.NAME'}."
        )
    if not callable(formula):
        raise OptionError(
            f"mod_tracker.profile_flops: the formula of {key} must be a function of shapes that "
            f"returns a number; got {formula!r}. For a constant use lambda *args, **more: n."
        )


@reporting
def profile_flops(
    *roots: nn.Module, formulas: Mapping[Any, Formula] | None = None
) -> Iterator[FlopReport]:
    """Count the floating-point operations of each module in forward, recompute and backward.

    On an accelerator a double backward, as of a gradient penalty, may be counted in other modules;
    totals are right.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        formulas: formulas for your own operators, or to replace known ones. A key is an operator
            such as `torch.ops.mylib.attention`. The formula is called with the operator's
            arguments, with shapes in place of tensors, and with `out_shape`, and returns a number.
            If it raises, the operator is uncounted, and `FlopReport.notes` has the error. Formulas
            registered with `torch.utils.flop_counter.register_flop_formula` are used, too.

    Raises:
        OptionError: `formulas` is not a dict of operators and functions.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with profile_flops() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> report["1"].forward, report.total == report.sum("self_total")
        (32, True)
    """
    from torch.utils.flop_counter import flop_registry  # imports Triton if it is installed

    report = FlopReport()
    if formulas is not None and not isinstance(formulas, Mapping):
        raise OptionError(
            f"mod_tracker.profile_flops: formulas must be a dict from operators to functions; got "
            f"{type(formulas).__name__}."
        )
    for key, formula in (formulas or {}).items():
        _check(key, formula)
    torchs = {
        operator: of_torch(formula)
        for operator, formula in flop_registry.items()
        if str(operator) not in FLEX
    }
    users = {operator: of_shapes(formula) for operator, formula in (formulas or {}).items()}
    with ModTracker(*roots) as tracker:
        mode = FlopMode(tracker._attribution, {**torchs, **OWN, **users})
        with measuring(mode):
            yield report
    _fill(report, mode, tracker._attribution)


def _fill(report: FlopReport, mode: FlopMode, attribution: Attribution) -> None:
    counts, totals = mode.counts, PhaseTotals()
    by_operator: Counter[str] = Counter()
    assumed: Counter[str] = Counter()
    for (path, phase, func), amounts in counts.amounts.items():
        total, again, masked, masked_again, times = amounts
        if ran_compiled(path):
            continue
        totals.add(path.stack, phase, total)
        by_operator[str(func)] += total
        assumed[str(func)] += times
        report._masked += masked
        if phase != RECOMPUTE:
            report.model_flops += total - again
            report._model_masked += masked - masked_again
    for path in compiled_paths(attribution):  # a row without FLOPs
        totals.add(path.stack, FORWARD, 0)
    report.by_operator = dict(by_operator)
    operators = mode.operators.items()
    uncounted = Counter({str(func): each.uncounted for func, each in operators if each.uncounted})
    unknown = Counter({str(func): each.unknown for func, each in operators if each.unknown})
    report.uncounted, report.unknown = dict(uncounted.most_common()), dict(unknown.most_common())
    compiled = dict.fromkeys(path.name for path in compiled_paths(attribution))
    report.compiled = (*compiled, *mode.compiled_in)
    missing = "FLOPs in compiled code are not counted"
    report.notes = notes_on_compiled(attribution, missing, mode.compiled_in)
    report.notes += _unknown_note(report.unknown)
    if +assumed:
        names = ", ".join(f"{name} ({times})" for name, times in (+assumed).items())
        report.notes += (f"without data the longest groups or sequences were assumed: {names}",)
    report.notes += tuple(
        f"the formula of {func} raised {type(error).__name__}: {error}; calls of it are uncounted"
        for func, error in mode.errors.items()
    )
    anything = bool(counts.amounts or uncounted)
    report._fill(
        phase_rows(totals, attribution), totals.total, {"total": totals.stacks}, ran=anything
    )


def _unknown_note(unknown: Mapping[str, int]) -> tuple[str, ...]:
    if not unknown:
        return ()
    shown = ", ".join(f"{name} ({times})" for name, times in list(unknown.items())[:SHOWN])
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    return (f"without a formula, and may multiply: {shown}{more}; give one in formulas=",)

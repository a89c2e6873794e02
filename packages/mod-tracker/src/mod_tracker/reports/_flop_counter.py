"""Counts floating-point operations from shapes, by module and phase."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from threading import get_ident as this_thread
from typing import Any

import torch

from .._attribution import Attribution
from .._record import Call, Path
from .._torch_compat import NO_TASK, graph_task
from ._notes import Known, Notes, noting
from ._operator_watch import Kernel, Place
from ._phase_totals import PhaseTotals

Formula = Callable[..., int]

TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({type(None), bool, int, float})

Begun = tuple[Call, str, Any, Formula]
"""An operator whose shapes are new: call, phase, key of the amount, and how to count."""


class Counts:
    """What was counted.

    Attributes:
        amounts: by path, phase and name of the operator, whose hash costs less than its own.
        total: sum of all amounts, kept on its own, as a check on the sums.
        uncounted: how often each operator without a formula ran.
    """

    def __init__(self) -> None:
        self.amounts: defaultdict[tuple[Path, str, str], int] = defaultdict(int)
        self.total = 0
        self.uncounted: Counter = Counter()

    def add(self, other: Counts) -> None:
        """Add what was counted apart."""
        self.total += other.total
        for place, amount in other.amounts.items():
            self.amounts[place] += amount
        self.uncounted.update(other.uncounted)

    def by_operator(self) -> Counter:
        """Return amounts by the name of the operator."""
        found: Counter = Counter()
        for (_, _, name), amount in self.amounts.items():
            found[name] += amount
        return found

    def totals(self) -> PhaseTotals:
        """Return amounts by module and phase."""
        found = PhaseTotals()
        for (path, phase, _), amount in self.amounts.items():
            found.add(path, phase, amount)
        return found


class FlopCounter:
    """Counts operators that are watched, in this thread and in the backwards torch runs for it.

    Formulas take shapes, so a result is kept per operator and shapes, and a formula runs once for
    each. Of an operator that is known, only its amount and the place where it ran are noted: see
    `Notes`.

    Attributes:
        counts: what was counted so far.
        formulas: by operator.
        stand_ins: how many operators were given tensors without data where they are watched.
        errors: what a formula last raised, by operator. Its calls are among the uncounted: the
            model is not stopped by who measures it.
    """

    def __init__(self, attribution: Attribution, formulas: Mapping[Any, Formula]) -> None:
        self._counts = Counts()
        self.formulas = formulas
        self._attribution = attribution
        self._known: defaultdict[Any, dict[Any, Known]] = defaultdict(dict)
        self._notes = Notes(attribution, self._add)
        self.stand_ins = 0
        self.errors: dict[Any, Exception] = {}
        self._thread = this_thread()

    @property
    def counts(self) -> Counts:
        """What was counted so far; others take their place where something is counted apart."""
        self._notes.add_up()
        return self._counts

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self._notes.add_up()
        self._counts = counts

    def stood_in(self) -> None:
        """Note that there are tensors without data."""
        self.stand_ins += 1

    def shortcut(self, operator: Any, place: Place) -> Kernel:
        """Return what counts an operator whose shapes were seen before."""
        return noting(self._notes, self._known[operator], place)

    def counts_here(self) -> bool:
        """Whether operators of this thread are counted: it is ours, or runs a backward of ours."""
        if this_thread() == self._thread:
            return True
        state = self._attribution.state()
        return graph_task() != NO_TASK and (state is None or state.inner)

    def begins(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Begun | None:
        """Count an operator, if this can be done before it runs."""
        if not self.counts_here():
            return None
        self._note_here()
        call, phase = self._attribution.attribute_op()
        key = shape_key(args, kwargs)
        known = self._known[operator].get(key)
        if known is None:
            return call, phase, key, self.formulas[operator]
        self._add(known, call[0], phase)
        return None

    def ends(
        self, begun: Begun, operator: Any, args: tuple, kwargs: dict[str, Any], out: Any
    ) -> None:
        """Count an operator by its result, too."""
        call, phase, key, formula = begun
        try:
            amount = int(formula(*args, **kwargs, out_val=out))
        except Exception as error:
            self.errors[operator] = error
            self._counts.uncounted[operator] += 1
            return
        name = str(operator)
        if key is not None:
            self._known[operator][key] = amount, name
        self._add((amount, name), call[0], phase)

    def count(self, call: Call, phase: str, operator: Any, formula: Formula, *values: Any) -> None:
        """Count an operator that has run, from its arguments, keyword arguments and result."""
        args, kwargs, out = values
        try:
            key = shape_key(args, kwargs)
        except RuntimeError:
            # A nested tensor of torch's older kind has no shape.
            self._counts.uncounted[operator] += 1
            return
        known = self._known[operator].get(key)
        if known is None:
            self.ends((call, phase, key, formula), operator, args, kwargs, out)
        else:
            self._add(known, call[0], phase)

    def _note_here(self) -> None:
        # Modules must have run in this thread, and only the thread that is counted notes.
        state = self._attribution.state()
        if state is not None and this_thread() == self._thread:
            self._notes.follow(state)

    def _add(self, known: Known, path: Path, phase: str, times: int = 1) -> None:
        amount, name = known
        self._counts.total += times * amount
        self._counts.amounts[path, phase, name] += times * amount


def shape_key(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return what a formula's result depends on; None if that may be more than can be a key."""
    # Sequences may hold tensors, and symbolic sizes cannot be keys: no key for those.
    key: list[Any] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in TENSORS or isinstance(value, torch.Tensor):
            key.append(value.shape)
        elif kind in _NUMBERS:
            key.append(value)
        elif isinstance(value, (list, tuple)) and all(type(item) in _NUMBERS for item in value):
            key.append(tuple(value))
        else:
            return None
    shapes = (*key, *kwargs)
    try:
        hash(shapes)
    except TypeError:
        return None
    return shapes


def with_shapes(formula: Formula) -> Formula:
    """Return the formula for tensors, with `out_val` for `out_shape`."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        shapes = [_shape(value) for value in args]
        named = {name: _shape(value) for name, value in kwargs.items()}
        return formula(*shapes, out_shape=_shape(out_val), **named)

    return count


def grouped_products(*shapes: Any, out_shape: Any = None, **options: Any) -> int:
    """Operations of products of groups, as in a mixture of experts: `torch.ops.aten._grouped_mm`.

    Two matrices of three dimensions are multiplied in pairs. Otherwise groups divide a dimension
    of a matrix of two, and are taken to fill it: how large they are is not known from shapes.
    """
    first, second = shapes[:2]
    rows = first[1:] if len(first) > len(second) else first
    return 2 * math.prod(rows) * second[-1]


def attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    """Operations of attention: one product of queries and keys, one of its result and values.

    Shapes are (batch, heads, tokens, channels); several heads of queries may share one of keys,
    which formulas of torch before 2.13 refuse.
    """
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    """Operations of attention's backward: queries and keys once more, and two for either product.

    Shapes are (batch, heads, tokens, channels), and `grad` is of the result.
    """
    return 2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def convolution_backward(grad: Any, given: Any, weight: Any, *rest: Any, **more: Any) -> int:
    """Operations of a convolution's backward: as many as forward for each gradient asked for.

    Shapes are (batch, channels, *places), and of the weight (channels, those of a group, *places).
    torch's formula takes the weight's gradient for one of a convolution without groups.
    """
    transposed, wanted = rest[4], rest[7]
    places = (given if transposed else grad)[2:]
    return 2 * given[0] * math.prod(places) * math.prod(weight) * sum(wanted[:2])


_SDPA = "_scaled_dot_product_"


def _known(*formulas: tuple[str, Callable[..., int]]) -> dict[Any, Formula]:
    aten = torch.ops.aten
    return {getattr(aten, at): with_shapes(each) for at, each in formulas if hasattr(aten, at)}


def _attentions(*kernels: str) -> list[tuple[str, Callable[..., int]]]:
    names = [_SDPA + kernel for kernel in kernels]
    backwards = [(f"{name}_backward", attention_backward) for name in names]
    return [*((name, attention) for name in names), *backwards]


MORE_FORMULAS: dict[Any, Formula] = _known(
    ("_grouped_mm", grouped_products),
    ("_scaled_grouped_mm", grouped_products),
    *_attentions("flash_attention_for_cpu", "fused_attention_overrideable"),
)
"""Formulas for operators that torch's counter has none for."""

MENDED_FORMULAS: dict[Any, Formula] = _known(
    ("convolution_backward", convolution_backward),
    *_attentions("flash_attention", "efficient_attention", "cudnn_attention"),
)
"""Formulas in place of torch's."""


def _shape(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_shape(item) for item in value])
    return value.shape if isinstance(value, torch.Tensor) else value

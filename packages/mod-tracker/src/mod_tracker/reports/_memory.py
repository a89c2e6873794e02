"""Memory per module - allocated, kept for backward, parameters, gradients, optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from .._attribution import Attribution
from .._edges import tensors_in
from .._names import walk
from .._record import Call
from .._torch_compat import SavedHooks, buffers_of, parameters_of
from .._tracker import tracking
from ._allocations import AllocationMode, KeptTensor, check_optimizer, storages_of
from ._compiled import compiled_notes
from ._phase_totals import PhaseTotals
from ._report import OUTSIDE_NAME, Report
from ._steps import Look, Steps, by_shapes, closed_twice
from .charts import Amounts, Stack


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one module; `self_...` leaves out the modules inside it.

    Attributes:
        peak: most bytes alive at once, of all modules, while this one ran, in any phase.
        allocated: bytes that operators allocated.
        freed: bytes freed while the module ran, whoever had allocated them.
        saved: bytes kept for backward: distinct storages other than parameters and buffers,
            charged to the module that saved them first.
        parameters: bytes of the parameters; a storage that several share counts where the first
            of them is registered.
        gradients: bytes of their gradients at the end, each storage once likewise.
        optimizer: bytes of the optimizer's state for them at the end, each storage once likewise.
    """

    name: str
    peak: int = 0
    self_allocated: int = 0
    self_freed: int = 0
    self_saved: int = 0
    self_parameters: int = 0
    self_gradients: int = 0
    self_optimizer: int = 0
    allocated: int = 0
    freed: int = 0
    saved: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def delta(self) -> int:
        """Bytes allocated and not freed while the module ran."""
        return self.allocated - self.freed


class MemoryReport(Report[MemoryRow]):
    """Bytes per module.

    Attributes:
        peak: most bytes alive at once that were allocated in the block. Parameters that existed
            before come on top.
        totals: for each kind of bytes, their sum, counted independently of the rows.
    """

    unit = "B"
    columns: ClassVar[tuple[str, ...]] = (
        *("peak", "allocated", "delta", "saved"),
        *("parameters", "gradients", "optimizer"),
    )
    sort_by = "peak"
    own_columns: ClassVar[tuple[str, ...]] = (
        *("peak", "self_allocated", "self_freed", "self_saved"),
        *("self_parameters", "self_gradients", "self_optimizer"),
    )
    explained: ClassVar[Mapping[str, str]] = {
        "peak": "most bytes alive at once, of all modules, while this one ran",
        "allocated": "by its operators",
        "freed": "while it ran",
        "delta": "allocated less freed",
        "saved": "kept for backward",
        "parameters": "bytes of its parameters",
        "gradients": "of their gradients",
        "optimizer": "of the optimizer's state for them",
    }
    title = "Memory"
    scalar_unit: ClassVar[tuple[str, int]] = ("bytes", 1)

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.totals: dict[str, int] = {}

    def _sums(self) -> dict[str, int]:
        return {"peak": self.outside.peak, "allocated": self.total}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**super().to_dict(), "peak": self.peak, "totals": self.totals}


class _Saved:
    """Bytes kept for backward, each storage once for as long as it is kept."""

    def __init__(self, attribution: Attribution) -> None:
        self._attribution = attribution
        self._uses: dict[int, int] = {}
        self._first: list[tuple[weakref.ref, Call, str, int]] = []

    def pack(self, tensor: torch.Tensor) -> KeptTensor:
        """Note that a tensor is kept."""
        keys = []
        for _, storage in storages_of([tensor]):
            key = id(storage)
            uses = self._uses.get(key, 0)
            if uses == 0:
                call, phase = self._attribution.locate()
                self._first.append((weakref.ref(storage), call, phase, storage.nbytes()))
            self._uses[key] = uses + 1
            keys.append(key)
        return KeptTensor(tensor, keys, self.release)

    def release(self, key: int) -> None:
        """Note that one keeping has ended."""
        left = self._uses.pop(key, 1) - 1
        if left:
            self._uses[key] = left

    def totals(self, permanent: set[int]) -> PhaseTotals:
        """Return the bytes kept, without storages that live anyway, by `id`."""
        totals = PhaseTotals()
        for ref, call, phase, size in self._first:
            if id(ref()) not in permanent:
                totals.add(call[0], phase, size)
        return totals


def _unpack(kept: KeptTensor) -> torch.Tensor:
    return kept.given_back("profile_memory")


@dataclass(frozen=True)
class _Static:
    """Bytes that belong to modules whether they run or not."""

    parameters: PhaseTotals
    gradients: PhaseTotals
    optimizer: PhaseTotals
    storages: set[int]


def _static(roots: dict[str, nn.Module], optimizer: torch.optim.Optimizer | None) -> _Static:
    found = _Static(PhaseTotals(), PhaseTotals(), PhaseTotals(), set())
    state: Any = {} if optimizer is None else optimizer.state
    counted: set[int] = set()

    def fresh(tensors: Iterable[torch.Tensor | None]) -> int:
        stored = _sizes(tensors)
        new = stored.keys() - counted
        counted.update(new)
        return sum(stored[key] for key in new)

    for label, root in roots.items():
        for name, module in walk(root, label):
            found.storages.update(_sizes(buffers_of(module).values()))
            for parameter in parameters_of(module).values():
                if parameter is None:
                    continue
                found.storages.update(_sizes([parameter]))
                stack = _stack(name)
                found.parameters.add_at(stack, "forward", fresh([parameter]))
                found.gradients.add_at(stack, "forward", fresh([parameter.grad]))
                held = state.get(parameter, {})
                found.optimizer.add_at(stack, "forward", fresh(tensors_in(held)))
    return found


def _made_by_steps(
    roots: dict[str, nn.Module], optimizer: torch.optim.Optimizer | None
) -> Iterator[torch.Tensor]:
    for root in roots.values():
        for _, module in walk(root):
            for parameter in parameters_of(module).values():
                if parameter is not None and parameter.grad is not None:
                    yield parameter.grad
    if optimizer is not None:
        yield from tensors_in(dict(optimizer.state))


def _sizes(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    stored = storages_of(tensor for tensor in tensors if tensor is not None)
    return {id(storage): storage.nbytes() for _, storage in stored}


def _stack(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    return tuple(".".join(parts[: end + 1]) for end in range(len(parts)))


def _rows(totals_by_kind: dict[str, PhaseTotals], peaks: dict[str, int]) -> dict[str, MemoryRow]:
    columns: dict[str, dict[str, int]] = {"": {}}
    for kind, totals in totals_by_kind.items():
        for prefix, inside in (("self_", False), ("", True)):
            for name, phases in totals.by_module(inside=inside).items():
                columns.setdefault(name, {})[prefix + kind] = sum(phases.values())
    return {
        name: MemoryRow(name or OUTSIDE_NAME, peak=peaks.get(name, 0), **numbers)
        for name, numbers in columns.items()
    }


def _stacks(totals_by_kind: dict[str, PhaseTotals]) -> dict[str, dict[Stack, Amounts]]:
    found = {kind: totals.by_stack() for kind, totals in totals_by_kind.items()}
    for kind in ("parameters", "gradients", "optimizer"):  # of no phase
        found[kind] = {stack: {"": sum(of.values())} for stack, of in found[kind].items()}
    return found


@contextmanager
def profile_memory(
    *roots: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    every_step: bool = False,
) -> Iterator[MemoryReport]:
    """Measure each module's memory in forward, recompute and backward.

    Works under `FakeTensorMode`, entered first: then nothing is allocated, and a model that fits
    nowhere can be measured.

    Looking at every allocation makes a step of small operators take about five times as long. So
    not every step is looked at: of those that call the same model first, with the same shapes and
    in the same mode, the 1st, 2nd, 3rd, 4th, 8th, 16th and so on are. The amounts are those of
    the steps that were looked at, and `MemoryReport.notes` says how many these are.

    Args:
        roots: models to name before they are called, and whose parameters count even if they are
            not called; see `ModTracker`.
        optimizer: whose state to count.
        every_step: look at every step.

    Raises:
        OptionError: `optimizer` has no state to read.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with profile_memory() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> report["Sequential.0"].parameters, report["Sequential.0"].gradients
        (160, 160)
    """
    check_optimizer(optimizer, "profile_memory")
    report = MemoryReport()
    with ExitStack() as stack:
        tracker = stack.enter_context(tracking(*roots))
        attribution = tracker._attribution
        mode, saved = AllocationMode(attribution), _Saved(attribution)

        def adopt() -> None:
            # Made by the step before, which nobody looked at, and alive in this one.
            mode.adopt(_made_by_steps(tracker.roots, optimizer))

        look = Look(mode, partial(SavedHooks, saved.pack, _unpack), saved.pack)
        steps = Steps(look, kind=by_shapes, every=lambda: every_step, opened=adopt)
        stack.enter_context(closed_twice(partial(look.close, anyway=True)))
        look.start()
        stack.enter_context(steps.listen(tracker))
        yield report
    static = _static(tracker.roots, optimizer)
    totals_by_kind = {
        "allocated": mode.allocated,
        "freed": mode.freed,
        "saved": saved.totals(static.storages),
        "parameters": static.parameters,
        "gradients": static.gradients,
        "optimizer": static.optimizer,
    }
    report.peak = mode.peak
    report.totals = {kind: totals.total for kind, totals in totals_by_kind.items()}
    report.notes = steps.notes("allocations were looked at")
    report.notes += compiled_notes(tracker._attribution, bytes_missing=True)
    rows = _rows(totals_by_kind, {**mode.peaks, "": mode.peak})
    report.fill(rows, mode.allocated.total, _stacks(totals_by_kind))

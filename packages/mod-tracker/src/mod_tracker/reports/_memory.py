"""Memory per module - allocated, kept for backward, parameters, gradients, optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .._attribution import Attribution
from .._edges import tensors_in
from .._names import walk
from .._record import Call
from .._torch_compat import SavedHooks, buffers_of, parameters_of
from .._tracker import tracking
from ._allocations import (
    AllocationMode,
    KeptTensor,
    check_optimizer,
    measuring_storages,
    storages_of,
)
from ._causes import CAUSES, GRADIENTS, OPTIMIZER, PARAMETERS
from ._compiled import compiled_note
from ._flame_page import Amounts, Stack
from ._phase_totals import PhaseTotals
from ._report import OUTSIDE_NAME, Report


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
        causes: what was alive at the peak, with what existed before: bytes of "parameters" (and
            buffers), "gradients", "optimizer" (its state, and what its step needs), "activations"
            (all else), and "logits and loss" (what the last layer with a weight matrix makes, and
            what comes after it until the backward has gone through it). The largest comes first.
    """

    unit = "B"
    columns: ClassVar[tuple[str, ...]] = (
        *("peak", "allocated", "saved"),
        *("parameters", "gradients", "optimizer"),
    )
    sort_by = "peak"
    explained: ClassVar[str] = (
        "A module counts with the modules inside it. peak: most bytes alive at once, of all "
        "modules, while it ran; saved: kept for backward."
    )
    title = "Memory"
    scalar_unit: ClassVar[tuple[str, int]] = ("bytes", 1)

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.totals: dict[str, int] = {}
        self.causes: dict[str, int] = dict.fromkeys(CAUSES, 0)

    def _footer(self) -> tuple[str, ...]:
        if not any(self.causes.values()):
            return ()
        parts = ", ".join(f"{name} {self.show(size)}" for name, size in self.causes.items())
        return (f"at the peak {self.show(sum(self.causes.values()))} are alive: {parts}",)

    def _sums(self) -> dict[str, int]:
        return {"peak": self.outside.peak, "allocated": self.total}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        extra = {"peak": self.peak, "totals": self.totals, "causes": self.causes}
        return {**super().to_dict(), **extra}


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
    *roots: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[MemoryReport]:
    """Measure each module's memory in forward, recompute and backward.

    Works under `FakeTensorMode`, entered first: then nothing is allocated, and a model that fits
    nowhere can be measured.

    Args:
        roots: models to name before they are called, and whose parameters count even if they are
            not called; see `ModTracker`.
        optimizer: whose state to count.

    Raises:
        OptionError: `optimizer` has no state to read.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with profile_memory() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> report["0"].parameters, report["0"].gradients
        (160, 160)
    """
    check_optimizer(optimizer, "profile_memory")
    report = MemoryReport()
    with tracking(*roots) as tracker:
        attribution = tracker._attribution
        mode, saved = AllocationMode(attribution), _Saved(attribution)
        hooks = SavedHooks(saved.pack, _unpack)
        with mode.following_optimizers(), measuring_storages(mode, hooks):
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
    report.causes = _causes(mode, tracker.roots, optimizer)
    report.notes = compiled_note(attribution, "bytes that compiled code allocates are missing")
    rows = _rows(totals_by_kind, {**mode.peaks, "": mode.peak})
    ran = mode.saw_any or bool(static.storages)
    report._fill(rows, mode.allocated.total, _stacks(totals_by_kind), ran=ran)


def _causes(
    mode: AllocationMode, roots: dict[str, nn.Module], optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    """Bytes at the peak by cause, the largest first."""
    before: dict[str, dict[int, int]] = {PARAMETERS: {}, GRADIENTS: {}, OPTIMIZER: {}}
    held: dict[str, list[torch.Tensor | None]] = {kind: [] for kind in before}
    for root in roots.values():
        for _, module in walk(root):
            own = [each for each in parameters_of(module).values() if each is not None]
            held[PARAMETERS] += [*own, *buffers_of(module).values()]
            held[GRADIENTS] += [each.grad for each in own]
    for each in (*mode.optimizers, *([] if optimizer is None else [optimizer])):
        held[OPTIMIZER] += tensors_in(dict(each.state))
    counted: set[int] = set()
    for kind, tensors in held.items():
        new = mode.mark(tensors, kind)
        before[kind] = {key: size for key, size in new.items() if key not in counted}
        counted |= new.keys()
    causes = mode.at_peak()
    for kind, sizes in before.items():
        causes[kind] += sum(sizes.values())
    return dict(sorted(((kind, causes[kind]) for kind in CAUSES), key=lambda item: -item[1]))

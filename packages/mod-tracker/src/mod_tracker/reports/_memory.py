"""Memory per module and device: allocated, saved for backward, parameters, gradients, optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .._edges import tensors_in
from .._errors import OptionError
from .._torch_compat import SHOWS_SAVED
from .._tracker import ModTracker
from ._allocations import (
    CAUSES,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    AllocationMode,
    DeviceMemory,
    check_optimizer,
    device_of,
    measuring_storages,
    registered,
    storages_of,
)
from ._flame_page import Amounts, Stack
from ._report import UNSEEN_BYTES, Report, notes_on_compiled, reporting
from ._rows import (
    OUTSIDE_NAME,
    PhaseTotals,
    by_module,
    calls_of,
    stack_of,
)
from ._saved import SavedBytes


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one module on one device; `self_...` leaves out the modules inside it.

    Attributes:
        calls: number of calls in forward.
        peak: largest number of live bytes, of all modules, while this module ran, in any phase.
        allocated: bytes that operators allocated.
        saved: bytes that graphs keep alive when their backward begins: distinct storages other than
            parameters and buffers, counted in the module that saved them first.
        parameters: bytes of the parameters; a shared storage counts where it is first registered.
        gradients: bytes of their gradients at the end; shared storages as for `parameters`.
        optimizer: bytes of their optimizer state at the end; shared storages as for `parameters`.
    """

    name: str
    calls: int = 0
    peak: int = 0
    self_allocated: int = 0
    self_saved: int = 0
    self_parameters: int = 0
    self_gradients: int = 0
    self_optimizer: int = 0
    allocated: int = 0
    saved: int = 0
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


class MemoryReport(Report[MemoryRow]):
    """Bytes per module on one device: the accelerator with the highest peak, or else the host.

    Attributes:
        device: the device, such as "cuda:0" or "cpu".
        devices: all devices that hold memory; `on` returns the report of another one.
        peak: largest number of live bytes that were allocated in the block. Parameters and inputs
            that existed before do not count.
        totals: sum of each kind of bytes, added up separately from the rows.
        causes: bytes alive at the peak, including those from before the block, by cause, largest
            first. "parameters" includes buffers; "gradients"; "optimizer" includes temporaries of
            its step; "logits and loss" is everything from the last layer with a weight matrix until
            backward has passed that layer; "activations" is the rest.
    """

    unit = "B"
    columns: ClassVar[tuple[str, ...]] = (
        *("calls", "peak", "allocated", "saved"),
        *("parameters", "gradients", "optimizer"),
    )
    sort_by = "peak"
    explained: ClassVar[str] = (
        "A module counts with the modules inside it. peak: most bytes alive at once, of all "
        "modules, while it ran; saved: for backward."
    )
    title = "Memory"
    scalar_unit: ClassVar[tuple[str, int]] = ("bytes", 1)

    def __init__(self) -> None:
        super().__init__()
        self.device = "cpu"
        self._by_device: dict[str, MemoryReport] = {}
        self.peak = 0
        self.totals: dict[str, int] = {}
        self.causes: dict[str, int] = dict.fromkeys(CAUSES, 0)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that hold memory, this report's first."""
        others = (name for name in self._by_device if name != self.device)
        return (self.device, *others)

    def on(self, device: str | torch.device) -> MemoryReport:
        """Return the report of another device.

        Raises:
            OptionError: nothing is on that device.
        """
        self._complete()
        if str(device) not in self._by_device:
            raise OptionError(
                f"mod_tracker.on: no memory is on {device!s}; got the device {device!r}. Choose "
                f"one of {', '.join(self.devices)}."
            )
        return self._by_device[str(device)]

    def _footer(self) -> tuple[str, ...]:
        lines = []
        if any(self.causes.values()):
            parts = ", ".join(f"{name} {self.show(size)}" for name, size in self.causes.items())
            alive = self.show(sum(self.causes.values()))
            lines.append(f"at the peak {alive} are alive on {self.device}: {parts}")
        for name in self.devices[1:]:
            peak = self.show(self._by_device[name].peak)
            lines.append(f"peak on {name}: {peak}; on({name!r}) is its report")
        return tuple(lines)

    def _sums(self) -> dict[str, int]:
        return {"peak": self.peak, "allocated": self.total}

    def _figures(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "peak": self.peak,
            "totals": self.totals,
            "causes": self.causes,
        }

    def diff(self, other: Report[MemoryRow]) -> MemoryReport:
        """Return this report minus `other` on each device of both; see `Report.diff`.

        Raises:
            OptionError: the reports are of different kinds, or have no device in common.
        """
        if not isinstance(other, MemoryReport):
            super().diff(other)  # raises
        assert isinstance(other, MemoryReport)
        common = [name for name in self.devices if name in other._by_device]
        if not common:
            raise OptionError(
                f"mod_tracker.diff: the reports are of different devices: "
                f"{', '.join(self.devices)}, and {', '.join(other.devices)}. Measure both on one."
            )
        found: dict[str, MemoryReport] = {}
        for name in common:
            found[name] = Report.diff(self.on(name), other.on(name))  # type: ignore[assignment]
            found[name]._by_device = found
        return found[common[0]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values; `other_devices` has those of the other devices."""
        others = {name: self._by_device[name]._of_device() for name in self.devices[1:]}
        return {**self._of_device(), "other_devices": others}

    def _of_device(self) -> dict[str, Any]:
        return {**super().to_dict(), **self._figures()}


def _rows(
    totals_by_kind: dict[str, PhaseTotals], peaks: dict[str, int], calls: Counter[str]
) -> dict[str, MemoryRow]:
    columns: dict[str, dict[str, int]] = {"": {}, **{name: {} for name in calls}}
    for kind, totals in totals_by_kind.items():
        for prefix, amounts in zip(("self_", ""), by_module(totals.stacks), strict=True):
            for name, phases in amounts.items():
                columns.setdefault(name, {})[prefix + kind] = sum(phases.values())
    return {
        name: MemoryRow(name or OUTSIDE_NAME, calls=calls[name], peak=peaks.get(name, 0), **numbers)
        for name, numbers in columns.items()
    }


def _stacks(totals_by_kind: dict[str, PhaseTotals]) -> dict[str, dict[Stack, Amounts]]:
    found = {kind: totals.stacks for kind, totals in totals_by_kind.items()}
    for kind in ("parameters", "gradients", "optimizer"):  # they have no phase
        found[kind] = {stack: {"": sum(of.values())} for stack, of in found[kind].items()}
    return found


@reporting
def profile_memory(
    *roots: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[MemoryReport]:
    """Measure each module's memory in forward, recompute and backward, on each device.

    Under `FakeTensorMode`, entered first, nothing is allocated, so models of any size can be
    measured. On torch 2.9, which does not show what graphs save,
    `saved` is missing.

    Args:
        roots: models to name before they are called; see `ModTracker`. Parameters and gradients
            are those of these models and of the models that this thread calls.
        optimizer: optimizer whose state to count.

    Raises:
        OptionError: `optimizer` is not an optimizer.

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
    with ModTracker(*roots) as tracker:
        attribution = tracker._attribution
        saved = SavedBytes(attribution, lambda key: key in mode.known)
        mode = AllocationMode(attribution, began=saved.read)
        with mode.following_optimizers(), measuring_storages(mode):
            yield report
        saved.read_rest()
    models = _models_of_this_thread(tracker, roots)
    optimizers = [] if optimizer is None else [optimizer]
    held: dict[str, dict[str, PhaseTotals]] = {}
    permanent, counted = set[int](), set[int]()
    for kind, name, tensor in registered(models, optimizers):
        for part, storage in storages_of([tensor]):
            key = id(storage)
            if kind in ("buffers", PARAMETERS):
                permanent.add(key)
            if kind in _HELD:
                size = 0 if key in counted else storage.nbytes()
                on = held.setdefault(device_of(part), {each: PhaseTotals() for each in _HELD})
                on[kind].add(stack_of(name), "forward", size)
                counted.add(key)
    causes = _causes(mode, models, optimizers)
    state = attribution.state()
    calls = calls_of(attribution, [] if state is None else [state])
    notes = notes_on_compiled(attribution, UNSEEN_BYTES, mode.compiled_in)
    if not SHOWS_SAVED:
        notes += ("saved is missing: torch 2.9 does not show what a graph saves",)
    by_device: dict[str, MemoryReport] = {}
    for name in _in_order(mode, causes):
        memory = mode.devices.get(name) or DeviceMemory(name)
        totals_by_kind = {
            "allocated": memory.allocated,
            "saved": saved.totals(name, permanent),
            **(held.get(name) or {each: PhaseTotals() for each in _HELD}),
        }
        one = by_device[name] = report if not by_device else MemoryReport()
        one.device, one._by_device, one.notes = name, by_device, notes
        one.peak = memory.peak
        one.totals = {kind: totals.total for kind, totals in totals_by_kind.items()}
        one.causes = causes.get(name) or dict.fromkeys(CAUSES, 0)
        rows = _rows(totals_by_kind, {**memory.peaks, "": memory.peak}, calls)
        ran = mode.saw_any or bool(permanent)
        one._fill(rows, memory.allocated.total, _stacks(totals_by_kind), ran=ran)


_HELD = (PARAMETERS, GRADIENTS, OPTIMIZER)


def _in_order(mode: AllocationMode, causes: dict[str, dict[str, int]]) -> list[str]:
    """Return the devices that hold memory: accelerators by their peaks, then the host."""
    peaks = {name: memory.peak for name, memory in mode.devices.items()}
    used = [name for name in causes if peaks.get(name) or any(causes[name].values())]
    return sorted(used or ["cpu"], key=lambda name: (name == "cpu", -peaks.get(name, 0)))


def _models_of_this_thread(tracker: ModTracker, roots: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the roots, and the models that were called in this thread, by label.

    A model of another thread may be in a backward; reading its gradients would be a race.
    """
    state = tracker._attribution.state()
    names = {path.name for path in state.walk()} if state is not None else set()
    names |= {tracker.get_known_fqn(root) or "" for root in roots}
    labels = {name.partition(".")[0] for name in names}
    return {label: model for label, model in tracker.roots.items() if label in labels}


def _causes(
    mode: AllocationMode,
    roots: dict[str, nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
) -> dict[str, dict[str, int]]:
    """Return the bytes that were alive at each device's peak, by cause."""
    held: dict[str, list[torch.Tensor]] = {PARAMETERS: [], GRADIENTS: [], OPTIMIZER: []}
    for kind, _, tensor in registered(roots, ()):
        held[PARAMETERS if kind == "buffers" else kind].append(tensor)
    for each in (*mode.optimizers, *optimizers):
        held[OPTIMIZER] += tensors_in(dict(each.state))
    before: dict[int, tuple[str, str, int]] = {}
    for kind, tensors in held.items():
        for key, (device, size) in mode.mark(tensors, kind).items():
            before.setdefault(key, (device, kind, size))
    found = {name: mode.at_peak(memory) for name, memory in mode.devices.items()}
    for device, kind, size in before.values():
        found.setdefault(device, Counter())[kind] += size
    return {
        device: dict(sorted(((c, causes[c]) for c in CAUSES), key=lambda item: -item[1]))
        for device, causes in found.items()
    }

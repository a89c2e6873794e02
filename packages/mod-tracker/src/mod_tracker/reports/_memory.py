"""Memory per module: allocated, saved for backward, parameters, gradients, optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .._attribution import Attribution
from .._edges import tensors_in
from .._errors import StateError
from .._record import Call
from .._tracker import ModTracker
from ._allocations import (
    AllocationMode,
    check_optimizer,
    measuring_storages,
    registered,
    storages_of,
)
from ._causes import CAUSES, GRADIENTS, OPTIMIZER, PARAMETERS
from ._compiled import compiled_note
from ._flame_page import Amounts, Stack
from ._phase_totals import PhaseTotals, by_module, stack_of
from ._report import OUTSIDE_NAME, Report, reporting


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one module; `self_...` leaves out the modules inside it.

    Attributes:
        peak: largest number of live bytes, of all modules, while this module ran, in any phase.
        allocated: bytes that operators allocated.
        saved: bytes saved for backward: distinct storages other than parameters and buffers,
            counted in the module that saved them first.
        parameters: bytes of the parameters; a shared storage counts where it is first registered.
        gradients: bytes of their gradients at the end; shared storages as for `parameters`.
        optimizer: bytes of their optimizer state at the end; shared storages as for `parameters`.
    """

    name: str
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
    """Bytes per module.

    Attributes:
        peak: largest number of live bytes that were allocated in the block. Parameters that
            existed before do not count.
        totals: sum of each kind of bytes, added up separately from the rows.
        causes: bytes alive at the peak, including those from before the block, by cause, largest
            first. "parameters" includes buffers; "gradients"; "optimizer" includes temporaries of
            its step; "logits and loss" is everything from the last layer with a weight matrix until
            backward has passed that layer; "activations" is the rest.
    """

    unit = "B"
    columns: ClassVar[tuple[str, ...]] = (
        *("peak", "allocated", "saved"),
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


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a saved tensor without its node.

    A node may save its own result. With the node, the tensor would be in a reference cycle, and
    the graph of a forward without backward would wait for the garbage collector. torch restores
    the node when it unpacks the tensor.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


class KeptTensor:
    """A tensor that a report's hooks saved for backward; freed with the node that saved it.

    Attributes:
        keys: `id` of its storages.
        tensor: the tensor without its node.
    """

    __slots__ = ("_released", "_version", "keys", "tensor")

    def __init__(
        self, tensor: torch.Tensor, keys: list[int], released: Callable[[int], None]
    ) -> None:
        self.keys: list[int] = keys
        self._released, self._version = released, tensor._version
        self.tensor: torch.Tensor = apart(tensor)

    def __del__(self) -> None:
        for key in self.keys:
            self._released(key)

    def given_back(self) -> torch.Tensor:
        """Return the tensor. Checks its version, since torch does not for packed tensors.

        Raises:
            StateError: it was changed in place.
        """
        tensor, version = self.tensor, self._version
        if tensor._version != version:
            raise StateError(
                f"mod_tracker.profile_memory: a tensor {tensor.dtype} {list(tensor.shape)} was "
                f"saved for backward at version {version} and changed in place since; it is at "
                f"version {tensor._version}. Change a copy of it."
            )
        return tensor


class _Saved:
    """Bytes saved for backward; a storage counts once for as long as it stays saved."""

    def __init__(self, attribution: Attribution) -> None:
        self._attribution = attribution
        self._uses: dict[int, int] = {}
        self._first: list[tuple[weakref.ref, Call, str, int]] = []

    def pack(self, tensor: torch.Tensor) -> KeptTensor:
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
        left = self._uses.pop(key, 1) - 1
        if left:
            self._uses[key] = left

    def totals(self, permanent: set[int]) -> PhaseTotals:
        """Return the saved bytes without `permanent` storages, which are given by `id`."""
        totals = PhaseTotals()
        for ref, call, phase, size in self._first:
            if id(ref()) not in permanent:
                totals.add(call[0].stack, phase, size)
        return totals


def _rows(totals_by_kind: dict[str, PhaseTotals], peaks: dict[str, int]) -> dict[str, MemoryRow]:
    columns: dict[str, dict[str, int]] = {"": {}}
    for kind, totals in totals_by_kind.items():
        for prefix, amounts in zip(("self_", ""), by_module(totals.stacks), strict=True):
            for name, phases in amounts.items():
                columns.setdefault(name, {})[prefix + kind] = sum(phases.values())
    return {
        name: MemoryRow(name or OUTSIDE_NAME, peak=peaks.get(name, 0), **numbers)
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
    """Measure each module's memory in forward, recompute and backward.

    Under `FakeTensorMode`, entered first, nothing is allocated, so models of any size can be
    measured. Saved bytes are counted by saved-tensor hooks, which `torch.func` does not support;
    use `watch_memory` with `torch.func`. Sparse tensors are not counted.

    Args:
        roots: models to name before they are called; see `ModTracker`. Parameters and gradients
            are those of these models and of the models that this thread calls.
        optimizer: optimizer whose state to count.

    Raises:
        OptionError: `optimizer` is not an optimizer.
        StateError: the model uses `torch.func.grad` or a transform built on it.

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
        mode, saved = AllocationMode(attribution), _Saved(attribution)
        hooks = saved_tensors_hooks(saved.pack, KeptTensor.given_back)
        try:
            with mode.following_optimizers(), measuring_storages(mode, hooks):
                yield report
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise StateError(
                "mod_tracker.profile_memory: torch.func does not support the saved-tensor "
                "hooks that count bytes saved for backward. Use watch_memory or "
                "trace(memory=True) for this model."
            ) from error
    models = _models_of_this_thread(tracker, roots)
    held = {kind: PhaseTotals() for kind in (PARAMETERS, GRADIENTS, OPTIMIZER)}
    permanent, counted = set[int](), set[int]()
    for kind, name, tensor in registered(models, [] if optimizer is None else [optimizer]):
        for _, storage in storages_of([tensor]):
            key = id(storage)
            if kind in ("buffers", PARAMETERS):
                permanent.add(key)
            if kind in held:
                size = 0 if key in counted else storage.nbytes()
                held[kind].add(stack_of(name), "forward", size)
                counted.add(key)
    totals_by_kind = {
        "allocated": mode.allocated,
        "saved": saved.totals(permanent),
        **held,
    }
    report.peak = mode.peak
    report.totals = {kind: totals.total for kind, totals in totals_by_kind.items()}
    report.causes = _causes(mode, models, optimizer)
    report.notes = compiled_note(attribution, "bytes that compiled code allocates are missing")
    rows = _rows(totals_by_kind, {**mode.peaks, "": mode.peak})
    ran = mode.saw_any or bool(permanent)
    report._fill(rows, mode.allocated.total, _stacks(totals_by_kind), ran=ran)


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
    mode: AllocationMode, roots: dict[str, nn.Module], optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    held: dict[str, list[torch.Tensor]] = {PARAMETERS: [], GRADIENTS: [], OPTIMIZER: []}
    for kind, _, tensor in registered(roots, ()):
        held[PARAMETERS if kind == "buffers" else kind].append(tensor)
    for each in (*mode.optimizers, *([] if optimizer is None else [optimizer])):
        held[OPTIMIZER] += tensors_in(dict(each.state))
    before: dict[int, tuple[str, int]] = {}
    for kind, tensors in held.items():
        for key, size in mode.mark(tensors, kind).items():
            before.setdefault(key, (kind, size))
    causes = mode.at_peak()
    for kind, size in before.values():
        causes[kind] += size
    return dict(sorted(((kind, causes[kind]) for kind in CAUSES), key=lambda item: -item[1]))

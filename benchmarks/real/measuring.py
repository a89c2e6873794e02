"""Measure training steps of one model in many ways: time, memory and gradients.

All ways stay built at the same time and share one set of parameters, so a round can run one step
of each in turn. They may also share an optimizer: with a learning rate of 0 it takes its time and
memory and leaves parameters bit-identical. A way that changes parameters (by its own optimizer or
by sharding) gets its own copy in each round, which is freed after its step.

Memory of a way is the sum of two parts:
- held: allocated by building and warming up, still allocated between steps;
- the growth within one step over the memory allocated before it.
Neither includes memory that other ways hold.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function

WARM_UP_STEPS = 3
# Longer steps are timed without an untimed step before them.
LONG_STEP_SECONDS = 0.5
# Leaks below this fraction of the parameters are in the JSON only.
LEAK_FRACTION = 0.05
MIB = 1 << 20
_BACKWARD = "benchmarks.real: backward begins"


class Unavailable(Exception):
    """Raised by a way that this machine or an installed version cannot run."""


@dataclass
class Case:
    """A model that a way may change, and how to run one step of it.

    Attributes:
        model: shares its parameters with other cases, unless the way needs its own.
        layers: the repeated blocks of `model`.
        batch: keyword arguments of a call.
        device: of the parameters.
        shape: what the model was built from.
        around: makes a context manager for each step.
        around_forward: makes a context manager for each forward.
        optimizer: stepped after backward, if there is one.
        note: a remark for the table.
    """

    model: nn.Module
    layers: nn.ModuleList
    batch: dict[str, torch.Tensor]
    device: torch.device
    shape: Any
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: torch.optim.Optimizer | None = None
    note: str = ""

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        with self.around_forward():
            output = self.model(**self.batch)
        return output if isinstance(output, torch.Tensor) else output.loss

    def step(
        self, between: Callable[[], object] = bool, after: Callable[[], object] = bool
    ) -> None:
        """Run forward, backward and the optimizer, then clear the gradients.

        Args:
            between: called between forward and backward.
            after: called after backward, with all gradients in place.
        """
        with self.around():
            loss = self.forward()
            between()
            loss.backward()
            del loss
            after()
            if self.optimizer is not None:
                self.optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Free the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        else:
            for parameter in self.model.parameters():
                parameter.grad = None


@dataclass
class Subject:
    """The model that all ways start from; it is never run or changed."""

    model: nn.Module
    layers_of: Callable[[nn.Module], nn.ModuleList]
    batch: dict[str, torch.Tensor]
    device: torch.device
    shape: Any
    optimizer: torch.optim.Optimizer | None = None
    """Stepped by all ways that share parameters; it must leave their bits as they are."""

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Return all parameters and buffers."""
        return chain(self.model.parameters(), self.model.buffers())

    @property
    def nbytes(self) -> int:
        """Return the bytes of parameters, buffers and the shared optimizer's state."""
        states = () if self.optimizer is None else self.optimizer.state.values()
        state = (value for one in states for value in one.values() if value.device == self.device)
        return sum(tensor.untyped_storage().nbytes() for tensor in chain(self.tensors, state))

    def case(self, *, shares_parameters: bool = True) -> Case:
        """Copy the modules, and the parameters too unless they are shared."""
        memo: dict[int, Any] = {}
        if shares_parameters:
            memo.update((id(tensor), tensor) for tensor in self.tensors)
        model = copy.deepcopy(self.model, memo)
        case = Case(model, self.layers_of(model), self.batch, self.device, self.shape)
        case.optimizer = self.optimizer if shares_parameters else None
        return case


class Way(Protocol):
    """One way to train.

    Attributes:
        name: for the table.
        group: ways that are compared with each other.
        exact: whether gradients should be bit-identical to plain's. If not, the way runs without
            deterministic algorithms, which would compile everything twice.
        prepare: changes a case.
    """

    name: str
    group: str
    exact: bool
    prepare: Callable[[Case], None]


@dataclass
class Row:
    """Results of one way; None until measured.

    Attributes:
        error: why the way did not run, or stopped; empty if it ran.
        gradients: "equal" to plain's bit for bit, or "off" by at most `gradients_off`.
        peak_bytes: peak memory during a step, including parameters and gradients.
        kept_bytes: growth during forward, read before backward begins.
        held_bytes: allocated between steps, without shared parameters.
        leaked_bytes: still allocated after the way was freed.
        optimizer_seconds: of the optimizer step alone.
    """

    name: str
    group: str
    seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    gradients: str | None = None
    gradients_off: float | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    held_bytes: int = 0
    leaked_bytes: int = 0
    note: str = ""
    error: str = ""

    @property
    def ms(self) -> float | None:
        """Return the median time of a step."""
        return statistics.median(self.seconds) * 1e3 if self.seconds else None


class Memory(Protocol):
    """Reads how much memory is allocated on one device."""

    def allocated(self) -> int:
        """Return the bytes allocated now."""

    def timed(self, step: Callable[[], None]) -> tuple[float, int]:
        """Return a step's seconds and its growth at the peak, or 0 if that was not measured."""

    def growth(self, case: Case) -> tuple[int, int]:
        """Return the growth of a step before backward and at its peak."""


class AcceleratorMemory:
    """Reads the caching allocator of an accelerator."""

    def allocated(self) -> int:
        """Return the bytes allocated now."""
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated()

    def timed(self, step: Callable[[], None]) -> tuple[float, int]:
        """Time a step until the device is idle; its peak costs nothing to read."""
        before = self.allocated()
        torch.accelerator.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
        return seconds, torch.accelerator.max_memory_allocated() - before

    def growth(self, case: Case) -> tuple[int, int]:
        """Return the growth before backward, once all copies have ended, and at the peak.

        These come from two steps: waiting for the device between forward and backward would let
        offloading catch up, which lowers the peak.
        """
        before, kept = self.allocated(), 0

        def read() -> None:
            nonlocal kept
            kept = self.allocated() - before

        case.step(between=read)
        _, peak = self.timed(case.step)
        return kept, peak


class HostMemory:
    """Reads the CPU allocator through the profiler.

    The profiler sees temporaries inside operators and inside compiled code. A dispatch mode would
    not, and some ways run differently under one.
    """

    def allocated(self) -> int:
        """Return the bytes of all tensors that Python can reach, each storage once.

        Tensors that existed at the last `gc.freeze` are excluded.
        """
        kinds = tensor_classes(torch.Tensor) - {FakeTensor}
        sizes: dict[int, int] = {}
        for tensor in [thing for thing in gc.get_objects() if type(thing) in kinds]:
            local = local_tensor(tensor)
            if local.device.type == "cpu" and local.layout is torch.strided:
                storage = local.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    def timed(self, step: Callable[[], None]) -> tuple[float, int]:
        """Time a step."""
        began = time.perf_counter()
        step()
        return time.perf_counter() - began, 0

    def growth(self, case: Case) -> tuple[int, int]:
        """Return the growth before backward and at the peak, in one profiled step."""

        def mark() -> None:
            with record_function(_BACKWARD):
                pass

        with profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as run:
            case.step(between=mark)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            run.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        backward = next(event["ts"] for event in events if event["name"] == _BACKWARD)
        changes = sorted(
            (event["ts"], event["args"]["Bytes"])
            for event in events
            if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
        )
        kept = allocated = peak = 0
        for at, nbytes in changes:
            allocated += nbytes
            peak = max(peak, allocated)
            if at < backward:
                kept = allocated
        return kept, peak


def tensor_classes(root: type) -> set[type]:
    """Return a class and all its subclasses."""
    return {root}.union(*map(tensor_classes, root.__subclasses__()))


def free() -> None:
    """Free unreachable objects and cached memory."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Use deterministic algorithms if torch has them."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled or before, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return each parameter's gradient as a vector; on one rank a shard is the whole."""
    found = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(f"parameter {name} has no gradient after backward")
        found.append(local_tensor(gradient).reshape(-1))
    return found


@torch.no_grad()
def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's part on this rank, or the tensor itself."""
    # Checking for the class would import torch.distributed.tensor, which takes seconds.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def largest_difference(
    found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> float | None:
    """Return None if all tensors are bit-identical, else the largest difference."""
    if [tensor.numel() for tensor in found] != [tensor.numel() for tensor in wanted]:
        raise RuntimeError("gradients have other shapes than those of the plain model")
    unequal = [
        (one.float() - other.float()).abs().max().item()
        for one, other in zip(found, wanted, strict=True)
        if not torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))
    ]
    return max(unequal) if unequal else None


def one_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    first = next(iter(str(error).strip().splitlines()), "")[:300]
    return first if isinstance(error, Unavailable) else f"{type(error).__name__}: {first}"


class Bench:
    """Runs steps of one model in many ways, interleaved.

    Args:
        subject: the model to train.
        seconds: time after which no round is started, and no way after three quarters of it.
        say: called with lines about progress.
        rebuilt: groups whose ways have their own parameters, built again in each round.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        seconds: float,
        say: Callable[[str], object],
        rebuilt: Sequence[str],
    ) -> None:
        self._subject, self._say = subject, say
        self._deadline = time.monotonic() + seconds
        self._building_deadline = time.monotonic() + 0.75 * seconds
        self._rebuilt = rebuilt
        self._memory: Memory = HostMemory() if subject.device.type == "cpu" else AcceleratorMemory()
        self._cases: dict[str, Case] = {}
        self._reference: list[torch.Tensor] = []

    def run(
        self, ways: Sequence[Way], rounds: int, after_round: Callable[[list[Row]], object]
    ) -> list[Row]:
        """Build, check and warm up every way; time one step of each in every round; free all.

        Args:
            ways: in the order of the rows.
            rounds: the timed steps of each way.
            after_round: called with the rows so far.
        """
        rows = [Row(way.name, way.group) for way in ways]
        try:
            self._reference = self._plain_gradients()
        except Exception as error:
            reason = f"the plain model does not run: {one_line(error)}"
            return [Row(way.name, way.group, error=reason) for way in ways]
        free()
        gc.freeze()
        start = self._memory.allocated()
        for way, row in zip(ways, rows, strict=True):
            if time.monotonic() > self._building_deadline:
                row.error = "not started: the time limit was reached"
                continue
            self._guarded(row, lambda way=way, row=row: self._build(way, row))
            self._say(f"built {row.name}: {row.error or f'gradients {row.gradients}'}")
        self._reference.clear()
        free()
        self._time(list(zip(ways, rows, strict=True)), rounds, lambda: after_round(rows))
        for row in rows:
            if row.name in self._cases:
                self._drop(row)
        free()
        left = self._memory.allocated() - start
        self._say(f"memory left when all ways were freed: {left / MIB:.1f} MiB")
        return rows

    def _plain_gradients(self) -> list[torch.Tensor]:
        case, found = self._subject.case(), []
        case.step()  # libraries allocate their workspaces in the first step
        with deterministic():
            case.step(after=lambda: found.extend(one.clone() for one in gradients(case.model)))
        return found

    def _guarded(self, row: Row, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            row.error = one_line(error)
            self._cases.pop(row.name, None)
        if row.error:
            for parameter in self._subject.model.parameters():
                parameter.grad = None
            free()

    def _build(self, way: Way, row: Row) -> None:
        """Build a way, compare its gradients in its first and a later step, measure memory."""
        free()
        before = self._memory.allocated()
        case = self._warmed_up(way, row)
        row.held_bytes = self._memory.allocated() - before
        kept, peak = self._memory.growth(case)
        row.kept_bytes = kept
        self._note_peak(row, peak)
        row.note = case.note
        self._cases[row.name] = case
        if row.group in self._rebuilt:
            del case
            self._drop(row)

    def _warmed_up(self, way: Way, row: Row) -> Case:
        case = self._subject.case(shares_parameters=way.group not in self._rebuilt)
        way.prepare(case)
        # An optimizer's first step changes the parameters, so only the first gradients equal
        # plain's.
        own = case.optimizer is not self._subject.optimizer
        compared = {0} if own else {0, WARM_UP_STEPS - 1}
        for step in range(WARM_UP_STEPS):
            if self._reference and step in compared:
                with deterministic(way.exact):
                    case.step(after=lambda: self._compare(case, row))
            else:
                case.step()
        return case

    def _compare(self, case: Case, row: Row) -> None:
        off = largest_difference(gradients(case.model), self._reference)
        if off is not None:
            row.gradients_off = max(off, row.gradients_off or 0.0)
        row.gradients = "equal" if row.gradients_off is None else "off"

    def _note_peak(self, row: Row, growth: int) -> None:
        shared = 0 if row.group in self._rebuilt else self._subject.nbytes
        row.peak_bytes = max(row.peak_bytes or 0, shared + row.held_bytes + growth)

    def _time(
        self, pairs: list[tuple[Way, Row]], rounds: int, after_round: Callable[[], object]
    ) -> None:
        for number in range(rounds):
            began = time.monotonic()
            for way, row in pairs:
                again = number == 0 or not self._leaks(row) or row.group not in self._rebuilt
                if again and not row.error:
                    self._guarded(row, lambda way=way, row=row: self._visit(way, row, rounds))
            after_round()
            took = time.monotonic() - began
            self._say(f"round {number + 1} of {rounds} took {took:.1f} s")
            if number + 1 < rounds and time.monotonic() + took > self._deadline:
                self._say("no further rounds: the time limit would be passed")
                break

    def _visit(self, way: Way, row: Row, rounds: int) -> None:
        """Time a step; all steps of the run if building the way again would leak again."""
        if row.group not in self._rebuilt:
            self._time_once(self._cases[row.name], row)
            return
        before = self._memory.allocated()
        case = self._cases[row.name] = self._warmed_up(way, row)
        row.held_bytes = self._memory.allocated() - before
        for _ in range(rounds if self._leaks(row) else 1):
            self._time_once(case, row)
        del case
        self._drop(row)

    def _time_once(self, case: Case, row: Row) -> None:
        """Time one step after an untimed one, which brings the allocator into this way's state."""
        if not row.seconds or row.seconds[-1] < LONG_STEP_SECONDS:
            case.step()
        seconds, peak = self._memory.timed(case.step)
        row.seconds.append(seconds)
        if peak:
            self._note_peak(row, peak)
        if case.optimizer is not None and case.optimizer is not self._subject.optimizer:
            case.forward().backward()
            row.optimizer_seconds.append(self._memory.timed(case.optimizer.step)[0])
            case.clear()

    def _leaks(self, row: Row) -> bool:
        return row.leaked_bytes > LEAK_FRACTION * self._subject.nbytes

    def _drop(self, row: Row) -> None:
        """Free a way; memory that it held and that stays allocated has leaked."""
        before = self._memory.allocated()
        del self._cases[row.name]
        free()
        freed = before - self._memory.allocated()
        row.leaked_bytes = max(row.leaked_bytes, row.held_bytes - freed)

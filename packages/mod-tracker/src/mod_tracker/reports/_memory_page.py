"""The page of `watch_memory`: memory by cause, kind and module, largest tensors, growth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from .._errors import OptionError
from ._allocations import CAUSES, Place, shape_of
from ._allocator import Allocator
from ._holders import KINDS, Held
from ._rows import bytes_shown

SHOWN = 8
"""Rows of each section."""


@dataclass(frozen=True)
class MemoryPage:
    """Memory of one device at one moment, and what holds it.

    Attributes:
        reason: why the page was written.
        everything: every storage that is alive, on all devices, largest first.
        grown: bytes by device, module and line that were allocated in the last step and stayed
            alive.
        steps: number of steps so far.
        inputs: input tensors of the current step, and of the one before.
        notes: limits of this measurement.
        running: phase and module in which the page was written; "" outside of all modules.
        allocators: the allocator of each CUDA device in use.
        device: the device that the page is about, by default the accelerator that holds most, or
            else the host; `on` returns the page of another one.
    """

    reason: str
    everything: Sequence[Held]
    grown: dict[Place, int]
    steps: int
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    running: str = ""
    allocators: tuple[Allocator, ...] = ()
    device: str = ""

    def __post_init__(self) -> None:
        if not self.device:
            object.__setattr__(self, "device", self.devices[0])

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that hold memory: accelerators by their bytes, then the host."""
        sizes: Counter[str] = Counter()
        for held in self.everything:
            sizes[held.device] += held.size
        return tuple(sorted(sizes or ["cpu"], key=lambda name: (name == "cpu", -sizes[name])))

    def on(self, device: str | torch.device) -> MemoryPage:
        """Return the page of another device.

        Raises:
            OptionError: nothing is on that device.
        """
        if str(device) not in self.devices:
            raise OptionError(
                f"mod_tracker.on: no memory is on {device!s}; got the device {device!r}. Choose "
                f"one of {', '.join(self.devices)}."
            )
        return replace(self, device=str(device))

    @property
    def held(self) -> list[Held]:
        """The storages of this device that are alive, largest first."""
        return [held for held in self.everything if held.device == self.device]

    @property
    def total(self) -> int:
        """Bytes of all storages of this device that are alive."""
        return sum(held.size for held in self.held)

    def by_kind(self) -> dict[str, int]:
        """Return bytes by kind."""
        found = Counter(dict.fromkeys(KINDS, 0))
        for held in self.held:
            found[held.kind] += held.size
        return dict(found)

    def by_cause(self) -> dict[str, int]:
        """Return bytes by the five causes of `MemoryReport.causes`, the largest first."""
        found = Counter(dict.fromkeys(CAUSES, 0))
        for held in self.held:
            found[held.cause] += held.size
        return dict(found.most_common())

    def by_module(self) -> dict[str, dict[str, int]]:
        """Return bytes of each module itself by kind, the largest first."""
        found: dict[str, Counter[str]] = {}
        for held in self.held:
            found.setdefault(held.module, Counter())[held.kind] += held.size
        order = sorted(found, key=lambda name: -found[name].total())
        return {name: dict(found[name]) for name in order}

    def inside(self, *kinds: str) -> dict[str, int]:
        """Return bytes of these kinds for each module with the modules inside it, largest first."""
        return _by_stack(held for held in self.held if held.kind in kinds)

    def __str__(self) -> str:
        lines = [f"Who holds the memory: {self.reason}"]
        others = [name for name in self.devices if name != self.device]
        for device in (self.device, *others):
            step = () if device in others else self._step_lines()
            lines += self.on(device)._device_lines(step)
        lines += [
            *(line for allocator in self.allocators for line in allocator.lines()),
            *self.notes,
        ]
        return "\n".join(lines)

    def _device_lines(self, step: Iterable[str]) -> list[str]:
        size, count = bytes_shown(self.total), len(self.held)
        return [
            f"{size} in {count} storages on {self.device}, in step {self.steps}",
            *step,
            *self._most_lines(),
            *_section("by cause", ((k, v) for k, v in self.by_cause().items() if v)),
            *_section("by kind", ((k, v) for k, v in self.by_kind().items() if v)),
            *_section("by module (itself)", self._module_lines()),
            *_section("largest tensors", self._tensor_lines()),
            *_section("grew in the last step", self._grown_lines()),
            *_section("kept for backward inside: to checkpoint or offload", self._leave("saved")),
            *_section(
                "parameters, gradients, optimizer inside: to shard or offload",
                self._leave("parameters", "gradients", "optimizer"),
            ),
        ]

    def _step_lines(self) -> Iterable[str]:
        # The most frequent reason is a larger batch, which the bytes alone do not show.
        if self.inputs:
            now, *before = self.inputs
            differ = f"; of the one before: {before[0]}" if before and before[0] != now else ""
            yield f"inputs of the last step: {now or 'no tensors'}{differ}"
        if self.running:
            yield f"written in {self.running}: what comes later in this step is not here"

    def _most_lines(self) -> Iterable[str]:
        # A summary of the sections below.
        cause, size = next(iter(self.by_cause().items()))
        if size:
            inside = _by_stack(held for held in self.held if held.cause == cause)
            name = next((name for name, part in inside.items() if part < size), "")
            where = f", {bytes_shown(inside[name])} of it inside {name}" if name else ""
            yield f"most of it is {cause}: {bytes_shown(size)}{where}"
        for place, most in self._grown_lines():
            grown = bytes_shown(sum(self._grown.values()))
            yield f"grew by {grown} in a step, {bytes_shown(most)} of it at {place}"
            return

    def _module_lines(self) -> Iterable[tuple[str, int]]:
        for name, kinds in list(self.by_module().items())[:SHOWN]:
            most = ", ".join(f"{k} {bytes_shown(v)}" for k, v in Counter(kinds).most_common(3))
            yield f"{name or '(outside)'}: {most}", sum(kinds.values())

    def _tensor_lines(self) -> Iterable[tuple[str, int]]:
        alike: Counter[str] = Counter()
        number: Counter[str] = Counter()
        for held in self.held:
            made = " ".join(part for part in (held.phase, held.line) if part) or "not seen made"
            text = (
                f"{held.dtype}{list(held.shape)} {held.kind}, {held.module or '(outside)'}, {made}"
            )
            alike[text] += held.size
            number[text] += 1
        for text, size in alike.most_common(SHOWN):
            yield text if number[text] == 1 else f"{number[text]} x {text}", size

    def _grown_lines(self) -> Iterable[tuple[str, int]]:
        for (module, line), size in self._grown.most_common(SHOWN):
            yield f"{module or '(outside)'}, {line}", size

    @property
    def _grown(self) -> Counter[tuple[str, str]]:
        return Counter(
            {place[1:]: size for place, size in self.grown.items() if place[0] == self.device}
        )

    def _leave(self, *kinds: str) -> Iterable[tuple[str, int]]:
        return list(self.inside(*kinds).items())[:SHOWN]


def _by_stack(held: Iterable[Held]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for each in held:
        found.update(dict.fromkeys(dict.fromkeys(each.stack), each.size))
    return dict(found.most_common())


def tensor_shown(tensor: torch.Tensor) -> str:
    """Format a tensor's type and shape.

    Example:
        >>> tensor_shown(torch.zeros(2, 3))
        'float32[2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(shape_of(tensor))}"


def _section(title: str, rows: Iterable[tuple[str, int]]) -> list[str]:
    shown = [f"  {bytes_shown(size):>10}  {text}" for text, size in rows]
    return ["", title, *shown] if shown else []

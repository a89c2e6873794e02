"""The page of `watch_memory`: memory by cause, kind and module, largest tensors, growth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .._numbers import bytes_shown
from ._allocations import shape_of
from ._allocator import Allocator
from ._causes import CAUSES
from ._holders import KINDS, Held

SHOWN = 8
"""Rows of each section."""


@dataclass(frozen=True)
class MemoryPage:
    """Memory at one moment, and what holds it.

    Attributes:
        reason: why the page was written.
        held: every storage that is alive, largest first.
        grown: bytes by module and line that were allocated in the last step and stayed alive.
        steps: number of steps so far.
        inputs: input tensors of the current step, and of the one before.
        notes: limits of this measurement.
        running: phase and module in which the page was written; "" outside of all modules.
        allocators: the allocator of each CUDA device in use.
    """

    reason: str
    held: Sequence[Held]
    grown: dict[tuple[str, str], int]
    steps: int
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    running: str = ""
    allocators: tuple[Allocator, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all storages that are alive."""
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
        lines = [
            f"Who holds the memory: {self.reason}",
            f"{bytes_shown(self.total)} in {len(self.held)} storages, in step {self.steps}",
            *self._step_lines(),
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
            *(line for allocator in self.allocators for line in allocator.lines()),
            *self.notes,
        ]
        return "\n".join(lines)

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
            grown = bytes_shown(sum(self.grown.values()))
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
        for (module, line), size in Counter(self.grown).most_common(SHOWN):
            yield f"{module or '(outside)'}, {line}", size

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

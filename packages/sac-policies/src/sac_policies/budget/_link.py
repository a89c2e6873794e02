"""How fast copies to host memory and back run beside a forward, and how much a forward hides.

Bandwidth depends on what else runs: copies share the device's memory with kernels, and kernels
slow down. So both are measured together, in each direction, with copies about half as long as the
work beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .._errors import BudgetError, shown
from .._tensors import is_accelerator

Direction = Literal["out", "back"]
_FIRST_BYTES = 1 << 26
_ROUNDS = 3
_SHARE = 0.5
"""Of the work's time, what the measured copy should take."""


class Timing(NamedTuple):
    """What one run of the work took, and the copy beside it."""

    work_seconds: float
    copy_seconds: float


Run = Callable[[int, Direction], Timing]
"""Runs the work beside one copy of that many bytes; 0 bytes: by itself."""


@dataclass(frozen=True)
class Link:
    """The way between a device and host memory, beside work.

    Attributes:
        out: bytes per second to host memory.
        back: bytes per second to the device.
        slows_out: time that work takes longer while copies go out, as a share of the copies' time.
        slows_back: the same for copies that come back.
    """

    out: float
    back: float
    slows_out: float = 0.0
    slows_back: float = 0.0

    def hidden_bytes(self, forward_seconds: float, backward_seconds: float) -> int:
        """Return how many bytes can leave during a forward and be back during its backward.

        Args:
            forward_seconds: from when the first value may leave to when forward ends.
            backward_seconds: from when backward begins to when the last of them is read.

        Example:
            >>> Link(out=100.0, back=50.0).hidden_bytes(1.0, 3.0)
            100
        """
        out, back = self.out * forward_seconds, self.back * backward_seconds
        return int(max(0.0, min(out, back)))

    def lead_seconds(self, copied_bytes: int) -> float:
        """Return how long before its reader a copy has to begin to be there in time."""
        return copied_bytes / self.back

    def cost_seconds(self, copied_bytes: int) -> float:
        """Return by how much hidden copies out and back slow down the work beside them.

        Example:
            >>> Link(out=100.0, back=50.0, slows_out=0.1, slows_back=0.05).cost_seconds(100)
            0.2
        """
        out, back = copied_bytes / self.out, copied_bytes / self.back
        return out * self.slows_out + back * self.slows_back


def measure_link(
    run: Run, *, most_bytes: int, first_bytes: int = _FIRST_BYTES, rounds: int = _ROUNDS
) -> Link:
    """Measure copies in both directions beside work.

    The fastest of a few rounds counts: other programs make copies slower, and never faster.

    Args:
        run: runs the work beside a copy, such as `beside_on(device, work)`.
        most_bytes: size of the largest copy, which needs that much on the device and on the host.
        first_bytes: size of the first copy; later ones take half of the work's time.
        rounds: runs of each kind.

    Raises:
        BudgetError: copies or the work take no time that can be measured.
    """
    alone = min(run(0, "out").work_seconds for _ in range(rounds))
    out, slows_out = _rate(run, "out", alone, first_bytes, most_bytes, rounds)
    back, slows_back = _rate(run, "back", alone, first_bytes, most_bytes, rounds)
    return Link(out, back, slows_out, slows_back)


def _rate(
    run: Run, direction: Direction, alone: float, first: int, most: int, rounds: int
) -> tuple[float, float]:
    """Return bytes per second, and the slowdown of the work as a share of the copies' time."""
    size, rate = max(1, min(first, most)), 0.0
    slows: list[float] = []
    for _ in range(rounds):
        found = run(size, direction)
        if found.copy_seconds <= 0 or found.work_seconds <= 0:
            raise BudgetError(
                f"sac_policies: a copy of {size} bytes took {found.copy_seconds} seconds beside "
                f"work of {found.work_seconds}, which is too short to measure. Pass longer work, "
                "such as a whole forward."
            )
        rate = max(rate, size / found.copy_seconds)
        slows.append(max(0.0, found.work_seconds - alone) / found.copy_seconds)
        size = max(1, min(most, int(_SHARE * alone * rate)))
    return rate, min(slows)


def beside_on(device: torch.device, work: Callable[[], object]) -> Run:
    """Return what runs `work` on a device beside copies on another stream.

    Args:
        device: an accelerator whose events have times.
        work: queues kernels on the current stream, such as a forward.

    Raises:
        BudgetError: the device is not an accelerator.
    """
    if not is_accelerator(device):
        raise BudgetError(
            f"sac_policies: device {shown(str(device))} is not an accelerator, so nothing is "
            "copied between it and host memory. Pass the device that the model trains on."
        )
    side = torch.Stream(device)

    def event() -> torch.Event:
        return torch.Event(device, enable_timing=True)

    def run(copied_bytes: int, direction: Direction) -> Timing:
        main = torch.accelerator.current_stream(device)
        host = torch.empty(copied_bytes, dtype=torch.uint8, pin_memory=copied_bytes > 0)
        there = torch.empty(copied_bytes, dtype=torch.uint8, device=device)
        source, target = (there, host) if direction == "out" else (host, there)
        begin, end, copy_begin, copy_end = (event() for _ in range(4))
        torch.accelerator.synchronize(device)
        begin.record(main)
        side.wait_event(begin)
        if copied_bytes:
            with side:
                copy_begin.record(side)
                target.copy_(source, non_blocking=True)
                copy_end.record(side)
        work()
        end.record(main)
        torch.accelerator.synchronize(device)
        copied = copy_begin.elapsed_time(copy_end) / 1e3 if copied_bytes else 0.0
        return Timing(begin.elapsed_time(end) / 1e3, copied)

    return run

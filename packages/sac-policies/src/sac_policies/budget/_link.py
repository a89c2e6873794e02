"""Speed of copies to and from host memory during a forward, and the values that fit behind it.

Bandwidth depends on concurrent work: copies share the device's memory with kernels. So copies are
measured during a block's forward, in each direction, for about half of its duration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch

from .._errors import BudgetError
from ..eager._parted import parted
from ..policies._decisions import Decision
from ..policies._plans import Plan
from ._checkpointed import inputs_among
from ._measure import bytes_of
from ._profile import profile
from ._trace import Item, Trace

Direction = Literal["out", "back"]
SECOND = 10**9
_FIRST_BYTES = 1 << 26
_ROUNDS = 3
_SHARE = 0.5
"""Of the work's time, what the measured copy should take."""
_BACKWARDS = 2
"""A backward takes at least that many forwards: each product has two gradients."""


class NotMeasuredError(BudgetError):
    """Copies cannot be measured, so none are planned; users do not see it."""


class Timing(NamedTuple):
    """Duration of one run of the work, and of the concurrent copy."""

    work_seconds: float
    copy_seconds: float


TimedRun = Callable[[int, Direction], Timing]
"""Runs the work beside one copy of that many bytes; 0 bytes: by itself."""


@dataclass(frozen=True)
class Link:
    """The link between a device and host memory, during other work.

    Attributes:
        out: bytes per second to host memory.
        back: bytes per second to the device.
        work_seconds: of the work without copies.
    """

    out: float
    back: float
    work_seconds: float

    def hidden(self, trace: Trace, input_bytes: int) -> list[Item]:
        """Return the values of a block that can leave during its forward and return in time.

        Copies out run one after another, inputs first; each starts after its value is computed.
        Copies back run during the backward of the following block. Values with the most work per
        byte come first.

        Args:
            trace: of the block's forward, in nanoseconds.
            input_bytes: bytes of the inputs, which are always copied.
        """
        done = list(accumulate(op.cost if op.out_bytes else 0 for op in trace.ops))
        work = self.work_seconds * SECOND
        made = [each * work / done[-1] for each in done]  # single operators are timed alone
        found: list[Item] = []
        items = [item for item in trace.items() if item.kept_bytes]
        for item in sorted(items, key=lambda item: -item.cost / item.kept_bytes):
            away = sorted([*found, item], key=lambda each: each.op)
            moved = input_bytes + sum(each.kept_bytes for each in away)
            returns = moved * SECOND <= self.back * _BACKWARDS * work
            if returns and self._leaves(away, made, input_bytes) <= work:
                found = away
        return found

    def _leaves(self, away: Sequence[Item], made: Sequence[float], input_bytes: int) -> float:
        """Return the end of the last copy out, in nanoseconds from the start of the forward."""
        end = input_bytes * SECOND / self.out
        for item in away:
            end = max(end, made[item.op]) + item.kept_bytes * SECOND / self.out
        return end


def measure_link(run: TimedRun, *, most_bytes: int) -> Link:
    """Measure copies in both directions during other work.

    The fastest of a few rounds counts, since other programs can only slow copies down. After the
    first round, a copy takes half of the work's time.

    Args:
        run: runs the work and a copy, such as `beside_on(device, work)`.
        most_bytes: size of the largest copy, which needs that much on the device and on the host.

    Raises:
        NotMeasuredError: copies or the work are too short.
    """
    alone = min(run(0, "out").work_seconds for _ in range(_ROUNDS))
    out, back = (_rate(run, direction, alone, most_bytes) for direction in get_args(Direction))
    return Link(out, back, alone)


def _rate(run: TimedRun, direction: Direction, alone: float, most: int) -> float:
    """Return bytes per second."""
    size, rate = max(1, min(_FIRST_BYTES, most)), 0.0
    for _ in range(_ROUNDS):
        found = run(size, direction)
        if found.copy_seconds <= 0 or found.work_seconds <= 0:
            raise NotMeasuredError
        rate = max(rate, size / found.copy_seconds)
        size = max(1, min(most, int(_SHARE * alone * rate)))
    return rate


def beside_on(device: torch.device, work: Callable[[], object]) -> TimedRun:
    """Return a function that runs `work` on a device, with a concurrent copy on another stream.

    Args:
        device: an accelerator whose events have times.
        work: queues kernels on the current stream, such as a forward.

    Raises:
        NotMeasuredError: host memory has no room for a copy; raised by the function.
    """
    side = torch.Stream(device)

    def event() -> torch.Event:
        return torch.Event(device, enable_timing=True)

    def run(copied_bytes: int, direction: Direction) -> Timing:
        main = torch.accelerator.current_stream(device)
        try:
            host = torch.empty(copied_bytes, dtype=torch.uint8, pin_memory=copied_bytes > 0)
        except RuntimeError as error:
            raise NotMeasuredError from error
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
        main.wait_stream(side)  # also if waiting fails, the copy ends before its memory is freed
        torch.accelerator.synchronize(device)
        copied = copy_begin.elapsed_time(copy_end) / 1e3 if copied_bytes else 0.0
        return Timing(begin.elapsed_time(end) / 1e3, copied)

    return run


Hidden = tuple[Plan | None, int]
"""Calls to offload, and their bytes with those of the inputs; None where they are not known."""
_LEAST_COPY = 1 << 20


def hidden_by(call: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Hidden:
    """Profile a block's forward, measure concurrent copies, and choose the values to copy.

    Args:
        call: the forward, which runs a few times; results are dropped.
        args: its positional arguments.
        kwargs: its keyword arguments. With a mutable argument, such as a cache, nothing is run.
        device: an accelerator.
    """
    input_bytes = bytes_of(inputs_among((args, kwargs)), device=device)
    if parted(call, args, kwargs) is None:
        return None, input_bytes
    try:
        trace = profile(call, *args, unit="ns", **kwargs)
        most = max(_LEAST_COPY, input_bytes + trace.total_bytes())
        with torch.no_grad():
            work = beside_on(device, lambda: call(*args, **kwargs))
            link = measure_link(work, most_bytes=most)
    except BudgetError:  # also of a forward without gradients
        return None, input_bytes
    away = link.hidden(trace, input_bytes)
    rows = sorted((trace.ops[item.op].key, Decision.OFFLOAD) for item in away)
    return Plan(tuple(rows)), input_bytes + sum(item.kept_bytes for item in away)

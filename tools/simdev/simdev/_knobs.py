"""Controls of the simulation: durations, failures, and recorded events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Row(NamedTuple):
    """One completed operation of the timeline; times in microseconds.

    Args:
        stream: number of its stream; default streams have the index of their device.
        queued: when the host queued it.
    """

    stream: int
    name: str
    queued: float
    start: float
    end: float


class Knobs:
    """Functions of `torch.simdev` that other device modules lack."""

    def __init__(self, extension: Any) -> None:
        self._C = extension

    def offered(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by name."""
        names = [name for name in vars(Knobs) if not name.startswith("_") and name != "offered"]
        return {name: getattr(self, name) for name in names}

    def simulate(
        self,
        *,
        kernel_us: float = 0,
        copy_us: float = 0,
        copy_gbps: float = 0,
        comm_us: float = 0,
        comm_gbps: float = 0,
        host_us: float = 0,
        jitter: bool = False,
        virtual: bool = False,
        log: bool = False,
        queue_limit: int = 0,
        check: bool = True,
        poison: bool = True,
    ) -> None:
        """Set durations from now on; without arguments everything is as fast as possible.

        Args:
            kernel_us: of each kernel and each copy within a device.
            copy_us: of each copy between the host and a device, or between devices.
            copy_gbps: bytes per nanosecond of such a copy; adds its size to the duration.
            comm_us: of each collective, from the time at which this rank's stream reaches it.
            comm_gbps: bytes of this rank's input per nanosecond of a collective.
            host_us: host time per queued operation; with `virtual` only.
            jitter: vary each duration randomly between zero and twice its value.
            virtual: compute times instead of waiting. Whether an event is done then depends only on
                the program and the costs. With `host_us=0` the host is as far ahead as possible:
                nothing is done before the host waits for it.
            log: record every operation for `timeline`.
            queue_limit: number of queued operations per stream at which the host waits; 0: no
                limit.
            check: whether races are reported.
            poison: whether memory is overwritten when it is freed.
        """
        self._C.set_costs(kernel_us, copy_us, copy_gbps, host_us, jitter, virtual, log, queue_limit)
        self._C.set_comm_costs(comm_us, comm_gbps)
        self._C.check_races(check)
        self._C.poison(poison)

    def races(self) -> list[str]:
        """Return the races since the last call, after all queued work is done."""
        self.synchronize_all()
        return self._C.races()

    def synchronize_all(self) -> None:
        """Wait for both devices."""
        for index in range(self._C.DEVICES):
            self._C.synchronize(index)

    def reset(self) -> None:
        """Release stalled streams, wait for everything, and clear limits, faults and reports."""
        self._C.open_gates()
        self.simulate()
        self._C.fail_later("", 0)
        with contextlib.suppress(RuntimeError):
            self.synchronize_all()
        for place in range(self._C.PINNED + 1):
            self._C.limit(place, -1)
        self.races()
        self._C.timeline()
        self._C.empty_cache()
        for place in range(self._C.PINNED + 1):
            self._C.reset_peaks(place)

    def timeline(self) -> list[Row]:
        """Return operations since the last call, in order of completion; needs `log=True`."""
        return [Row(*row) for row in self._C.timeline()]

    def host_us(self) -> float:
        """Return the host's virtual time; it advances by `host_us` and when the host waits."""
        return self._C.host_us()

    def memory(self, device: int = 0) -> dict[str, int]:
        """Return bytes of a device: allocated, active and reserved, with peaks; and three counts.

        Active memory is in use, or held until recorded streams are done with it. Reserved memory
        includes memory cached for later requests. `requests` counts blocks requested, `made` blocks
        newly allocated, and `held` blocks held back when they were freed.
        """
        return self._C.memory(device)

    def pinned_memory(self) -> dict[str, int]:
        """Return the same for pinned memory."""
        return self._C.memory(self._C.PINNED)

    def limit(self, nbytes: int | None, device: int = 0) -> None:
        """Limit the reserved bytes of a device; None: no limit."""
        self._C.limit(device, -1 if nbytes is None else nbytes)

    def limit_pinned(self, nbytes: int | None) -> None:
        """Limit the reserved bytes of pinned memory; None: no limit."""
        self._C.limit(self._C.PINNED, -1 if nbytes is None else nbytes)

    def fail_later(self, name: str, after: int = 1) -> None:
        """Make a queued operation fail when the device runs it.

        Args:
            name: beginning of its name, such as "copy to host", "copy to device" or "addmm".
            after: number of matching operations, queued from now on, before it.
        """
        self._C.fail_later(name, after)

    @contextlib.contextmanager
    def stalled(self, *streams: torch.Stream) -> Iterator[None]:
        """Stall streams until the end of the block; by default all current streams."""
        if not streams:
            streams = tuple(
                torch.accelerator.current_stream(torch.device("simdev", index))
                for index in range(self._C.DEVICES)
            )
        for each in streams:
            self._C.close_gate(each.stream_id, each.device.index)
        try:
            yield
        finally:
            self._C.open_gates()

    def waited_operators(self) -> set[str]:
        """Return operators without a shape function, for which the host waits."""
        return self._C.waited_operators()

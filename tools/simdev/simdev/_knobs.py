"""The simulation's own functions: how long things take, what fails, what was seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Row(NamedTuple):
    """One operation that ran, from the timeline; times in microseconds.

    Args:
        stream: number of its stream; those of devices' default streams are their indices.
        queued: when the host asked for it.
    """

    stream: int
    name: str
    queued: float
    start: float
    end: float


class Knobs:
    """Functions that `torch.simdev` offers besides what every device's module has."""

    def __init__(self, extension: Any) -> None:
        self._C = extension

    def offered(self) -> dict[str, Callable[..., Any]]:
        """By name."""
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
        """Set how long things take from now on; called with nothing, as short as they can.

        Args:
            kernel_us: of each kernel and each copy within a device.
            copy_us: of each copy between the host and a device, or between devices.
            copy_gbps: how many bytes such a copy moves in a nanosecond; its size adds to it then.
            comm_us: of each collective, from when this rank's stream comes to it.
            comm_gbps: how many bytes of this rank's input a collective moves in a nanosecond.
            host_us: how much later the host is after each operation that it queues; virtual only.
            jitter: let each operation take anything from nothing to twice as long.
            virtual: compute times instead of waiting for them. Whether an event is done then
                depends on the program and the costs alone. With `host_us=0` the host is as far
                ahead as it can be: nothing is done before the host waits for it.
            log: note every operation for `timeline`.
            queue_limit: the host waits while that many operations are queued on a stream; 0: never.
            check: whether races are reported.
            poison: whether memory is overwritten when it is freed.
        """
        self._C.set_costs(kernel_us, copy_us, copy_gbps, host_us, jitter, virtual, log, queue_limit)
        self._C.set_comm_costs(comm_us, comm_gbps)
        self._C.check_races(check)
        self._C.poison(poison)

    def races(self) -> list[str]:
        """What was reported since the last call, after all queued work is done."""
        self.synchronize_all()
        return self._C.races()

    def synchronize_all(self) -> None:
        """Wait for both devices."""
        for index in range(self._C.DEVICES):
            self._C.synchronize(index)

    def reset(self) -> None:
        """Open what is stalled, wait for everything, and forget limits, faults and reports."""
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
        """What ran since the last call, in the order in which it ended; needs `log=True`."""
        return [Row(*row) for row in self._C.timeline()]

    def host_us(self) -> float:
        """The host's virtual time; it moves with `host_us` and when the host waits."""
        return self._C.host_us()

    def memory(self, device: int = 0) -> dict[str, int]:
        """Bytes of a device: allocated, active and reserved, each with its peak; and three counts.

        Active is what is in use or held back until recorded streams are done with it; reserved
        counts also what is kept for later requests. `requests` are blocks asked for, `made` those
        that were not there yet, `held` those held back when they were freed.
        """
        return self._C.memory(device)

    def pinned_memory(self) -> dict[str, int]:
        """The same of pinned memory."""
        return self._C.memory(self._C.PINNED)

    def limit(self, nbytes: int | None, device: int = 0) -> None:
        """Let a device have that many bytes reserved and no more; None: any number."""
        self._C.limit(device, -1 if nbytes is None else nbytes)

    def limit_pinned(self, nbytes: int | None) -> None:
        """The same for pinned memory."""
        self._C.limit(self._C.PINNED, -1 if nbytes is None else nbytes)

    def fail_later(self, name: str, after: int = 1) -> None:
        """Let an operation fail when the device comes to it, long after it was queued.

        Args:
            name: how its name begins, such as "copy to host", "copy to device" or "addmm".
            after: which of those that are queued from now on.
        """
        self._C.fail_later(name, after)

    @contextlib.contextmanager
    def stalled(self, *streams: torch.Stream) -> Iterator[None]:
        """Let streams stand still until the end of the block; all current ones without any."""
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
        """Operators for which the host has waited, having no shapes ahead of the kernel."""
        return self._C.waited_operators()

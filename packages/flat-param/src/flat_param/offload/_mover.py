"""One thread that copies state between a tier and the device, while the optimizer computes.

Rule 1: copies are made in the order in which they are asked for, and each is done before the next
        begins. So if a bucket's state is asked for before that of the bucket before it is put away,
        the state of two buckets is in memory, never of three.
Rule 2: on an accelerator they run on a stream of their own. The thread waits for it, so nothing is
        freed or read that a copy still uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from ._tiers import Tier, packed_stride

T = TypeVar("T")


class Mover:
    """Copies for one step; a context that ends when all of them are done.

    Args:
        tier: where state lies between steps.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flat_param.offload")
        self._streams: dict[torch.device, torch.Stream] = {}
        self._last: Future[None] | None = None

    def __enter__(self) -> Mover:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=error is not None)

    def fetch(
        self, stored: Sequence[Tensor], devices: Sequence[torch.device]
    ) -> Future[list[Tensor]]:
        """Begin to copy state to the devices that it is needed on."""

        def copy() -> list[Tensor]:
            out = []
            for tensor, device in zip(stored, devices, strict=True):
                with self._on_stream(device):
                    near = torch.empty_strided(
                        tensor.shape, packed_stride(tensor), dtype=tensor.dtype, device=device
                    )
                    out.append(near.copy_(tensor, non_blocking=True))
            self._wait()
            self._tier.settle(stored)
            return out

        return self._thread.submit(_alone, copy)

    def store(
        self, near: Sequence[Tensor], stored: Sequence[Tensor], *, used: list[Tensor]
    ) -> None:
        """Begin to copy state to where it lies between steps, when what computes now is done.

        Args:
            near: what is copied.
            stored: where to.
            used: what was fetched for it, and may have been replaced: emptied when it is done, as
                what computes now may still read it (Rule 2).
        """
        devices = {each.device for each in (*near, *used) if each.device.type != "cpu"}
        done = {device: _computed(device) for device in devices}
        pairs = list(zip(near, stored, strict=True))

        def copy() -> None:
            while pairs:
                value, place = pairs.pop()
                with self._on_stream(value.device, done.get(value.device)):
                    place.copy_(value, non_blocking=True)
                self._wait()
            for event in done.values():
                event.synchronize()
            used.clear()
            self._tier.settle(stored)

        self.wait()
        self._last = self._thread.submit(_alone, copy)

    def wait(self) -> None:
        """Wait until everything that was to be stored is; what failed there fails here."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _on_stream(
        self, device: torch.device, after: torch.Event | None = None
    ) -> AbstractContextManager[object]:
        if device.type == "cpu":
            return nullcontext()
        stream = self._streams.setdefault(device, torch.Stream(device))
        if after is not None:
            stream.wait_event(after)
        return stream

    def _wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _alone(copy: Callable[[], T]) -> T:
    with torch.no_grad():
        return copy()


def _computed(device: torch.device) -> torch.Event:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event

"""The stream that a tensor's memory belongs to: the current one when it was allocated.

The allocator reuses freed memory on that stream at once, so work of other streams on it must be
over. There are two ways:
- `at_home` runs work on the home stream. It orders two streams, so it is for work that is done once
  for a backward or in case of an error.
- `SharedMemory` and `record_use` have the allocator wait before it reuses the memory. Units may
  compute on streams that were not current when they were prefetched, and those stay unordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

_HERE = nullcontext()


def home_stream(device: torch.device) -> torch.Stream | None:
    """The stream that tensors allocated now belong to; None on CPU, which has none."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def record_use(home: torch.Stream | None, *tensors: Tensor) -> None:
    """Keep memory of the stream `home` from reuse until the current stream has used it."""
    if home is not None:
        here = torch.accelerator.current_stream(home.device)
        for tensor in tensors if here != home else ():
            tensor.record_stream(here)


class SharedMemory:
    """Memory that is filled on one stream and may be used on others.

    Args:
        tensor: allocated on the current stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.home = home_stream(tensor.device)
        self._users: list[torch.Stream] = []

    def use(self) -> None:
        """Use the memory on the current stream; the first use is after its filling was waited for.

        Other streams wait for the first one.
        """
        if self.home is None:
            return
        here = torch.accelerator.current_stream(self.home.device)
        if here in self._users:
            return
        if self._users:
            here.wait_stream(self._users[0])
        self._users.append(here)
        record_use(self.home, self._tensor)


def at_home(stream: torch.Stream | None) -> AbstractContextManager[None]:
    """Run a block on a stream, after the work queued on the current one and before later work."""
    around = None if stream is None else torch.accelerator.current_stream(stream.device)
    if stream is None or around is None or around == stream:
        return _HERE
    return _switched(stream, around)


@contextmanager
def _switched(stream: torch.Stream, around: torch.Stream) -> Iterator[None]:
    device = torch.accelerator.current_device_index()
    stream.wait_stream(around)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(around)
        torch.accelerator.set_device_index(device)
        around.wait_stream(stream)

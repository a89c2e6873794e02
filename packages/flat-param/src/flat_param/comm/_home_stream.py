"""The stream that a tensor's memory belongs to: the current one when it was allocated.

The allocator reuses freed memory on that stream at once. That stream must wait for work of other
streams on the memory, so it is simplest to run the work on the home stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_HERE = nullcontext()


def home_stream(device: torch.device) -> torch.Stream | None:
    """The stream that tensors allocated now belong to; None on CPU, which has none."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


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

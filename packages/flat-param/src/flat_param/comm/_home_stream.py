"""The home stream of a tensor: the stream that was current when its memory was allocated.

Freed memory is reused on that stream at once, so work on another stream must be waited for there.
It is simplest to run the work on the home stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def home_stream(device: torch.device) -> torch.Stream | None:
    """The home stream of tensors that are made now; None on CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


@contextmanager
def at_home(stream: torch.Stream | None) -> Iterator[None]:
    """Run the block on a stream, between earlier and later work of the current one."""
    around = None if stream is None else torch.accelerator.current_stream(stream.device)
    if stream is None or around is None or around == stream:
        yield
        return
    device = torch.accelerator.current_device_index()
    stream.wait_stream(around)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(around)
        torch.accelerator.set_device_index(device)
        around.wait_stream(stream)

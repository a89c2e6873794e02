"""The stream that a tensor's memory belongs to: the one that was current when it was made.

Freed memory is handed out again on that stream at once. So whoever used it elsewhere must have had
that stream wait; it is simplest to do the work there, which costs nothing where it is current.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def home_stream(device: torch.device) -> torch.Stream | None:
    """The stream that tensors made now belong to; None on CPU, which has none."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


@contextmanager
def at_home(stream: torch.Stream | None) -> Iterator[None]:
    """Do what follows on a stream, after what is queued on the current one and before the rest.

    Args:
        stream: of `home_stream`; None changes nothing.
    """
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

"""What torch tells of an allocation that failed, at the moment in which it fails.

torch calls an observer before it raises: the frames of the call are all there, and so is what they
hold, also where the error is caught right above. It offers this for CUDA only, where an observer
cannot be taken out again; so one of ours is attached, once in a process, and tells who listens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ._look_up import look_up

_log = logging.getLogger("mod_tracker")

Listener = Callable[[int, int, int], None]
"""Called with the device's index, the bytes that were asked for, and the bytes that are free."""

_listeners: list[Listener] = []
_attached: set[int] = set()


def on_out_of_memory(listener: Listener) -> Callable[[], None]:
    """Tell `listener` of allocations on CUDA that fail, until what is returned is called.

    Where torch has no such observer nothing happens. What the listener raises is logged: torch
    would raise it in place of its own error.
    """
    _listeners.append(listener)
    attach = look_up("_C._cuda_attach_out_of_memory_observer")
    when_ready = look_up("cuda._lazy_call")  # before CUDA is used there is nothing to attach to
    if attach is not None and when_ready is not None and id(attach) not in _attached:
        _attached.add(id(attach))
        when_ready(lambda: attach(_tell))

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return end


def _tell(device: int, asked: int, total: int, free: int) -> None:
    for listener in list(_listeners):
        try:
            listener(device, asked, free)
        except Exception:
            _log.exception("mod_tracker: memory ran out, and its page could not be written")

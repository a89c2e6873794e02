"""Edge: ends a case that does not end by itself, where the system can interrupt it."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator


class OutOfTime(BaseException):
    """A case took too long; no `except Exception` of the code under test can swallow it."""


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread once the block has taken `limit_s` seconds.

    Interrupts Python code, and what Python code calls as soon as it returns. On a system without
    alarms, and in another thread, there is no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise OutOfTime(f"took more than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    # An alarm that somebody else has set goes on afterwards, later by what the block took.
    alarm = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *alarm)
        signal.signal(signal.SIGALRM, before)

"""End a case that takes too long, and the whole process if that does not help."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
import types
from collections.abc import Iterator

# Additional time, as a factor of the limit, before the whole process is ended.
PATIENCE = 0.2


class OutOfTime(BaseException):
    """A case took too long. Not an Exception, so that the code under test does not catch it."""


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread after `limit_s` seconds in the block.

    It interrupts Python code, and C code when that returns. If it is caught or never raised, the
    process is ended later. On systems without alarms, and in other threads, only the latter
    happens.
    """
    patience_s = limit_s + max(1.0, PATIENCE * limit_s)
    stderr = sys.__stderr__ or sys.stderr
    faulthandler.dump_traceback_later(patience_s, exit=True, file=stderr)
    try:
        with _alarm(limit_s):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise OutOfTime(f"took more than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    others = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
        signal.signal(signal.SIGALRM, before)

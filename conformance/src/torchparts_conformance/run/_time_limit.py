"""Ends a case that does not end by itself, and the process where that does not help."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import threading
import types
from collections.abc import Iterator

# How much longer, of its limit, a case may take until the whole process is ended.
PATIENCE = 0.2


class OutOfTime(BaseException):
    """A case took too long; no `except Exception` of the code under test can swallow it."""


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread once the block has taken `limit_s` seconds.

    Interrupts Python code, and what Python code calls as soon as it returns. What swallows that, or
    does not return, is ended a while later together with the process, which then has no report. On
    a system without alarms, and in another thread, only the second limit holds.
    """
    with _process_limit(limit_s + max(1.0, PATIENCE * limit_s)), _interruption(limit_s):
        yield


@contextlib.contextmanager
def _process_limit(limit_s: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _interruption(limit_s: float) -> Iterator[None]:
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

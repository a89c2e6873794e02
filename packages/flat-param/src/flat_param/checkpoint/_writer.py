"""The thread in which an asynchronous save goes on while its caller trains.

Rule 1: one save of a process is under way. The next one, asynchronous or not, waits for it before
        it looks at its module: there is one snapshot at a time, and ranks meet in the order in
        which they have called.
Rule 2: an error of the thread is what its future raises. Where nobody has asked that, the next
        save raises it and saves nothing, and the end of the interpreter writes it to stderr.
Rule 3: the end of the interpreter waits for the thread, as it does for every one of
        `threading`. A child that was forked has no such thread, and nothing under way.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from .._errors import CheckpointError


class SaveFuture(Future[None]):
    """The outcome of an asynchronous save; remembers whether somebody has asked for its error."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.asked = False
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the path holds the state; see `async_save_sharded`."""
        self.exception(timeout)
        super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the save has raised, or None."""
        error = super().exception(timeout)
        self.asked = True
        return error

    @property
    def here(self) -> bool:
        """Whether the save goes on in this process (Rule 3)."""
        return self._process == os.getpid()

    def unasked(self) -> BaseException | None:
        """The error of a save that is over, where nobody has asked for it (Rule 2)."""
        return None if self.asked or not self.done() else super().exception()


_last: SaveFuture | None = None


def start(call: Callable[[], None], path: str) -> SaveFuture:
    """Carry out a save in a thread; `wait_for_last` must have returned before."""
    global _last
    if _last is None:
        atexit.register(_tell_at_exit)
    future = _last = SaveFuture(path)
    future.set_running_or_notify_cancel()
    threading.Thread(target=_carry_out, args=(call, future), name=f"save to {path}").start()
    return future


def _carry_out(call: Callable[[], None], future: SaveFuture) -> None:
    try:
        call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def wait_for_last() -> None:
    """Wait until no save is under way (Rule 1).

    Raises:
        CheckpointError: it has failed, and its future was never asked for the result.
    """
    if _last is None or not _last.here:
        return
    wait([_last])
    error = _last.unasked()
    if error is not None:
        _last.asked = True
        raise CheckpointError(
            f"flat_param.save_sharded: the asynchronous save to '{_last.path}' before this one "
            "has failed, but its future was never asked for the result. Nothing is saved by this "
            f"call; correct the error and save again: {error}"
        ) from error


def _tell_at_exit() -> None:
    error = _last.unasked() if _last is not None and _last.here else None
    if error is not None and _last is not None:
        sys.stderr.write(
            f"flat_param.async_save_sharded: the save to '{_last.path}' has failed, and its "
            f"future was never asked for the result: {error}\n"
        )

"""A block is interrupted at its limit, and its process ended a while later."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time

import pytest

from torchparts_conformance.run import _time_limit


@pytest.mark.parametrize(("limit_s", "end_s"), [(0.5, 1.5), (5.0, 6.0), (100.0, 120.0)])
def test_process_has_a_fifth_of_the_limit_more_and_at_least_a_second(monkeypatch, limit_s, end_s):
    """Short limits leave the interruption time to be seen, long ones in proportion."""
    asked = []
    later = lambda seconds, **options: asked.append((seconds, options["exit"]))  # noqa: E731
    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    with _time_limit.time_limit(limit_s):
        pass
    assert asked == [(pytest.approx(end_s), True)]


def test_block_is_interrupted_and_everything_is_as_before():
    """The error names the limit; the alarm and whoever waited for it are put back."""
    before, alarm = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    too_long = pytest.raises(_time_limit.OutOfTime, match=r"took more than 0\.05 s")
    with too_long, _time_limit.time_limit(0.05):
        end = time.monotonic() + 30
        while time.monotonic() < end:
            pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is alarm  # of whoever runs this test


def test_other_thread_is_not_interrupted():
    """Only the main thread can be; elsewhere the block just runs."""
    done, before = [], signal.getsignal(signal.SIGALRM)

    def run():
        with _time_limit.time_limit(60.0):
            done.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [before]

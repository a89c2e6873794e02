"""Broken reports beside other work; each fails exactly what it declares."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from unittest.mock import patch

from torch.nn import functional as F

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"
ENDS_S = 0.02
_LEAVE = "mod_tracker.reports._mode.leave_mode"


def _ends_slowly(part, name, other):
    """The part whose report of that name takes a while to end, in which `other` is called in the
    place of what another thread computes."""
    report, linear = getattr(part, name), F.linear

    @contextmanager
    def ends_slowly(*args, **options):
        mine = threading.get_ident()

        def changed(*given):
            there = linear(*given)
            return there if threading.get_ident() == mine else other(there)

        with report(*args, **options) as found:
            yield found
        F.linear = changed
        try:
            time.sleep(ENDS_S)
        finally:
            F.linear = linear

    return overlay(part, **{name: ends_slowly})


def _fail(there):
    raise RuntimeError("the kernel is gone")


@mutant(area=AREA, kills={"MT-430"})
def other_threads_fail_while_memory_is_summed_up(part):
    """Takes out what another thread is about to call."""
    return _ends_slowly(part, "profile_memory", _fail)


@mutant(area=AREA, kills={"MT-430"})
def other_threads_are_changed_while_pages_end(part):
    """Gives another thread values of its own."""
    return _ends_slowly(part, "watch_memory", lambda there: there * 2)


@mutant(area=AREA, kills={"MT-432"})
def other_threads_are_changed_while_flops_are_summed_up(part):
    """Gives another thread values of its own."""
    return _ends_slowly(part, "profile_flops", lambda there: there * 2)


@mutant(area=AREA, kills={"MT-432"})
def other_threads_fail_while_flops_are_summed_up(part):
    """Takes out what another thread is about to call."""
    return _ends_slowly(part, "profile_flops", _fail)


@mutant(area=AREA, kills={"MT-431"})
def any_clock_is_the_hosts(part):
    """Reads the host's clock, whatever it is asked for."""

    def profile_time(*roots, clock="cpu"):
        return part.profile_time(*roots)

    return overlay(part, profile_time=profile_time)


@mutant(area=AREA, kills={"MT-433"})
def modes_are_left_from_the_top(part):
    """Takes off whichever dispatch mode is on top, as torch does."""

    def change(name):
        @contextmanager
        def report(*args, **options):
            leaves = patch(_LEAVE, lambda mode: mode.__exit__(None, None, None))
            with leaves, getattr(part, name)(*args, **options) as found:
                yield found

        return report

    names = ("profile_flops", "profile_memory", "watch_memory")
    return overlay(part, **{name: change(name) for name in names})

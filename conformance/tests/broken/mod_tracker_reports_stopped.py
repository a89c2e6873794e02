"""Broken reports of a backward that was stopped; each fails exactly what it declares."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"
_FORGETS = "mod_tracker._backward._forget_one_failed"
_HAS_ENDED = "mod_tracker.reports._trace.has_ended"


def _follows_on(part, name):
    """The part whose report of that name takes a backward that failed for one that runs."""

    @contextmanager
    def follows_on(*args, **options):
        with (
            patch(_FORGETS, lambda *given: None),
            patch(_HAS_ENDED, lambda *given: False),
            getattr(part, name)(*args, **options) as report,
        ):
            yield report

    return overlay(part, **{name: follows_on})


@mutant(area=AREA, kills={"MT-434"})
def time_after_a_failed_backward_is_its_modules(part):
    """Charges the time that follows to the module whose backward ran last."""
    return _follows_on(part, "profile_time")


@mutant(area=AREA, kills={"MT-435"})
def slices_of_a_failed_backward_go_on(part):
    """Shows what follows in the slice of the module whose backward ran last."""
    return _follows_on(part, "trace")

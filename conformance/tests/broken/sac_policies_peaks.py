"""Broken predictions of what a step takes."""

from __future__ import annotations

from types import SimpleNamespace

from torchparts_conformance.mutants import mutant, overlay

AREA = "sac-policies"


def _told(part, peak):
    """Predicts by `peak`, of the step and a plan."""

    def profile_step(*args, **kwargs):
        step = part.profile_step(*args, **kwargs)
        return SimpleNamespace(trace=step.trace, peak_bytes=lambda plan=None: peak(step, plan))

    return overlay(part, profile_step=profile_step)


@mutant(area=AREA, kills={"SP-213"})
def what_is_kept_is_the_peak(part):
    """Leaves out gradients, temporaries and what replays bring back."""

    def peak(step, plan):
        kept = step.trace.total_bytes() if plan is None else plan.kept_bytes
        return step.resident_bytes + kept

    return _told(part, peak)


@mutant(area=AREA, kills={"SP-213"})
def freed_bytes_are_taken_off_the_peak(part):
    """Takes what a plan frees off the plain step's peak, as if no replay brought it back."""

    def peak(step, plan):
        freed = 0 if plan is None else step.trace.total_bytes() - plan.kept_bytes
        return step.peak_bytes() - freed

    return _told(part, peak)

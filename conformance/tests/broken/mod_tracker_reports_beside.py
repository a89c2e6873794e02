"""Broken reports beside other work; each fails exactly what it declares."""

from __future__ import annotations

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"


@mutant(area=AREA, kills={"MT-431"})
def any_clock_is_the_hosts(part):
    """Reads the host's clock, whatever it is asked for."""

    def profile_time(*roots, clock="cpu"):
        return part.profile_time(*roots)

    return overlay(part, profile_time=profile_time)

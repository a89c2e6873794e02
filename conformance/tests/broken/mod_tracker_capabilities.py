"""Broken queries of trackers, and hooks under torch.compile; each fails what it declares."""

from __future__ import annotations

import torch

from torchparts_conformance.mutants import mutant, overlay

AREA = "mod-tracker"


@mutant(area=AREA, kills={"MT-401"})
def compiled_code_is_thrown_away(part):
    """Drops what was compiled without it when it is entered, to see the modules inside."""

    class ModTracker(part.ModTracker):
        def __enter__(self):
            torch.compiler.reset()
            return super().__enter__()

    return overlay(part, ModTracker=ModTracker)

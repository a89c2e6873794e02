"""Broken capabilities of trackers; each fails exactly the requirements that it declares."""

from __future__ import annotations

import torch

from torchparts_conformance.mutants import mutant, overlay


@mutant("MT-401")
def compiled_code_is_thrown_away(part):
    """Recompiles on entry, to see the modules inside compiled code."""

    class ModTracker(part.ModTracker):
        def __enter__(self):
            torch.compiler.reset()
            return super().__enter__()

    return overlay(part, ModTracker=ModTracker)

"""Broken nested backward passes; each fails exactly the requirements that it declares."""

from __future__ import annotations

from torchparts_conformance.mutants import mutant

from .faults.flat_param_distributed import with_sharded

AREA = "flat-param"


@mutant(area=AREA, kills={"FP-246"})
def only_the_outer_backward_is_waited_for(part):
    """Reduces a unit's gradients without those from the backward inside a checkpoint."""

    def change(module, options):
        unit = module._flat_param
        working = unit._advance

        def advance(state):
            if state.has_grads and not state.freed:
                unit.schedule.on_grads(unit)
            working(state)

        unit._advance = advance
        return module

    return with_sharded(part, change)

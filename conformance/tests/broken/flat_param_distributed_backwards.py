"""Broken nested backward passes; each fails exactly the requirements that it declares."""

from __future__ import annotations

from torchparts_conformance.mutants import mutant

from .faults.flat_param_distributed import with_sharded


@mutant("FP-246")
def only_the_outer_backward_is_waited_for(part):
    """Reduces a unit's gradients without those from the backward inside a checkpoint."""

    def change(module, options):
        schedule = module._flat_param.schedule
        working = schedule._advance

        def advance(unit, state):
            if state.begun and state.arrived >= state.expected and not state.freed:
                schedule._on_grads(unit)
            working(unit, state)

        schedule._advance = advance
        return module

    return with_sharded(part, change)

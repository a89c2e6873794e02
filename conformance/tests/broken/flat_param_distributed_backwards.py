"""Broken backward passes of some parameters, and inside others; each fails what it declares."""

from __future__ import annotations

from torchparts_conformance.mutants import mutant

from .faults.flat_param_distributed import with_sharded

AREA = "flat-param"


@mutant(area=AREA, kills={"FP-246"})
def only_the_outer_backward_is_waited_for(part):
    """Sums gradients of a unit when all are there that the backward around a checkpoint brings."""

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


@mutant(area=AREA, kills={"FP-247"})
def late_gradients_are_dropped(part):
    """Lets go of gradients that come when those of the unit are summed."""

    def change(module, options):
        unit = module._flat_param
        working = unit.on_grad

        def on_grad(grads, index):
            if unit.schedule.standing(unit).summed:
                grads.owner.leaves[index].grad = None
            else:
                working(grads, index)

        unit.on_grad = on_grad
        return module

    return with_sharded(part, change)

"""Broken plans of sharded training; each fails exactly what it declares."""

from __future__ import annotations

from torchparts_conformance.mutants import mutant, overlay


@mutant(area="flat-param", kills={"FP-233"})
def microbatches_are_planned_as_one(part):
    """Says for a step of several passes what one of them does."""

    def plan_training(units, *, microbatches=1, **options):
        return part.plan_training(units, **options)

    return overlay(part, plan_training=plan_training)

"""Broken optimizers with state elsewhere, for the area flat-param."""

from __future__ import annotations

import torch

from torchparts_conformance.mutants import mutant, overlay

AREA = "flat-param"


@mutant(area=AREA, kills={"FP-210"})
def files_are_read_as_zeros(part):
    """Loses what it has put into a folder."""

    def offload_optimizer(optimizer, *, folder=None, **options):
        offloaded = part.offload_optimizer(optimizer, folder=folder, **options)
        if folder is not None:
            offloaded.register_step_post_hook(_forget)
        return offloaded

    return overlay(part, offload_optimizer=offload_optimizer)


def _forget(optimizer, *_):
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.zero_()


@mutant(area=AREA, kills={"FP-211"})
def stopped_steps_are_passed_over(part):
    """Goes on with a state of which half is older, as if the step had ended."""

    def offload_optimizer(optimizer, **options):
        offloaded = part.offload_optimizer(optimizer, **options)
        step = offloaded.step

        def quiet(closure=None):
            try:
                return step(closure)
            except KeyboardInterrupt:
                offloaded.state = type(offloaded.__dict__["state"])(
                    dict, offloaded.__dict__["state"]
                )
                raise

        offloaded.step = quiet
        return offloaded

    return overlay(part, offload_optimizer=offload_optimizer)

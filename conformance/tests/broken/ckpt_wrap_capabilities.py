"""Broken changes in place, plans and compiled forwards; each fails what it declares."""

from __future__ import annotations

import functools

import torch
from torch import nn

from torchparts_conformance.mutants import mutant, overlay

AREA = "ckpt-wrap"


def _recomputed_by(part, change):
    """The part, `change(engine, function, *args, **kwargs)` where `checkpoint_` calls its engine.

    `change` is a function of this module, so that what it changes can be pickled.
    """

    def checkpoint_(module, **options):
        engine = part.checkpoint_wrapper(nn.Identity(), **options).checkpoint_fn
        return part.checkpoint_(module, checkpoint_fn=functools.partial(change, engine))

    return overlay(part, checkpoint_=checkpoint_)


@mutant(area=AREA, kills={"CW-060"})
def checkpointing_leaves_a_buffer(part):
    """Marks the module with a buffer."""

    def checkpoint_(module, **options):
        module.register_buffer("checkpointed", torch.ones(()), persistent=False)
        return part.checkpoint_(module, **options)

    return overlay(part, checkpoint_=checkpoint_)


def _if_finite(engine, function, *args, **kwargs):
    for arg in args:
        if isinstance(arg, torch.Tensor) and not arg.detach().isfinite().all():
            raise ValueError("an input is not finite")
    return engine(function, *args, **kwargs)


@mutant(area=AREA, kills={"CW-080", "CW-082"})
def branches_on_what_is_in_the_input(part):
    """Looks at the numbers in its input, which nobody knows while a compiler traces."""
    return _recomputed_by(part, _if_finite)

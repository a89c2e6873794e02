"""Broken compiled forwards; each fails exactly the requirements that it declares."""

from __future__ import annotations

import functools

import torch
from torch import nn

from torchparts_conformance.mutants import mutant, overlay


def _if_finite(engine, function, *args, **kwargs):
    for arg in args:
        if isinstance(arg, torch.Tensor) and not arg.detach().isfinite().all():
            raise ValueError("an input is not finite")
    return engine(function, *args, **kwargs)


@mutant("CW-080 CW-082")
def branches_on_what_is_in_the_input(part):
    """Branches on the values of its input, which are unknown while a compiler traces."""

    def checkpoint_wrapper(module, **options):
        engine = part.checkpoint_wrapper(nn.Identity(), **options).checkpoint_fn
        return part.checkpoint_wrapper(module, checkpoint_fn=functools.partial(_if_finite, engine))

    return overlay(part, checkpoint_wrapper=checkpoint_wrapper)

"""Broken regions and budgets; each fails exactly the requirements that it declares."""

from __future__ import annotations

import inspect

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torchparts_conformance.mutants import mutant, overlay


def _keeps_nothing(policy):
    try:
        return inspect.isfunction(policy) and policy(None, torch.ops.aten.mm.default) is False
    except (AttributeError, TypeError):  # the policy reads more than the operator
        return False


def _as_torch(part, wrong):
    """The part with torch's checkpoint for calls that save nothing and are `wrong`."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if not (_keeps_nothing(policy) and wrong(args, kwargs)):
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant("SP-157 SP-215")
def changed_leaves_are_read(part):
    """Recomputes a region of one leaf with changed parameters."""
    return _as_torch(part, lambda args, kwargs: len(args) == 1 and args[0].is_leaf)


@mutant("SP-141")
def gradient_inside_runs_all_of_the_region(part):
    """Without early stop, runs a region to its end for a gradient inside it."""
    return _as_torch(part, lambda args, kwargs: kwargs.get("early_stop") is False)

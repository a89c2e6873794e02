"""Broken regions, compiled or eager; each fails exactly the requirements that it declares."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy

from torchparts_conformance.mutants import mutant, overlay

from .faults.sac_policies import changed

OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")


@mutant(
    "SP-001 SP-002 SP-003 SP-004 SP-005 SP-006 SP-007 SP-008 SP-009 SP-010 SP-012 SP-013 SP-015"
    " SP-016 SP-019 SP-020 SP-021 SP-022 SP-025 SP-026 SP-027 SP-028 SP-029 SP-164"
)
def checkpoint_cannot_be_traced(part):
    """Hides checkpoint from the compiler."""
    return overlay(part, checkpoint=torch.compiler.disable(part.checkpoint))


@mutant("SP-003 SP-021")
def options_reach_the_function(part):
    """Also passes preserve_rng_state to the function."""

    def change(function, policy, kwargs):
        if "preserve_rng_state" in kwargs:
            function = functools.partial(function, preserve_rng_state=kwargs["preserve_rng_state"])
        return function, policy, kwargs

    return changed(part, change)


@mutant("SP-012")
def keyword_arguments_are_lost(part):
    """Drops keyword arguments that are not options of checkpoint."""
    taken = (*OPTIONS, "context_fn")

    def change(function, policy, kwargs):
        own = {name: value for name, value in kwargs.items() if name in taken}
        return function, policy, own

    return changed(part, change)


@mutant("SP-008")
def random_state_is_not_restored(part):
    """Draws new random numbers in the recomputation."""

    def change(function, policy, kwargs):
        return function, policy, {**kwargs, "preserve_rng_state": False}

    return changed(part, change)


@mutant("SP-014 SP-018")
def policy_is_inverted(part):
    """Swaps saving and recomputing."""

    def inverted(policy):
        if isinstance(policy, list):
            return lambda ctx, op, *args, **kwargs: op not in policy
        return lambda ctx, op, *args, **kwargs: (
            policy(ctx, op, *args, **kwargs) not in (True, CheckpointPolicy.MUST_SAVE)
        )

    return overlay(part, context_fn=lambda policy: part.context_fn(inverted(policy)))


@mutant("SP-022")
def contexts_are_not_checked(part):
    """Ignores the contexts that are passed."""

    def change(function, policy, kwargs):
        own = {name: value for name, value in kwargs.items() if name != "context_fn"}
        return function, policy, own

    return changed(part, change)


@mutant("SP-023")
def autocast_ends_at_the_region(part):
    """Runs the function in full precision in eager code."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if torch.compiler.is_compiling():
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(
    "SP-001 SP-002 SP-003 SP-004 SP-005 SP-006 SP-007 SP-008 SP-009 SP-011 SP-012 SP-013 SP-022"
    " SP-023 SP-024 SP-025 SP-026"
)
def compiled_region_is_left_out(part):
    """Returns the first argument instead of compiling a region without a policy."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if policy is None and torch.compiler.is_compiling():
            return args[0]
        return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)

"""Parts that are right alone and wrong together."""

from __future__ import annotations

import functools

import torch

from torchparts_conformance.mutants import mutant, overlay


@mutant("CB-001 CB-002")
def wrapper_forgets_the_random_state(parts):
    """A wrapped block is recomputed with other random numbers."""
    wrap = functools.partial(parts.ckpt_wrap.checkpoint_wrapper, preserve_rng_state=False)
    return overlay(parts, ckpt_wrap=overlay(parts.ckpt_wrap, checkpoint_wrapper=wrap))


@mutant("CB-002")
def tracker_draws_a_random_number(parts):
    """Entering the tracker advances the random state."""

    class Drawing(parts.mod_tracker.ModTracker):
        def __enter__(self):
            torch.rand(1)
            return super().__enter__()

    return overlay(parts, mod_tracker=overlay(parts.mod_tracker, ModTracker=Drawing))


@mutant("CB-032")
def policy_is_ignored(parts):
    """The engine recomputes everything, for any policy."""

    def checkpoint(function, *args, policy=None, **kwargs):
        return parts.sac_policies.checkpoint(function, *args, **kwargs)

    return overlay(parts, sac_policies=overlay(parts.sac_policies, checkpoint=checkpoint))


@mutant("CB-032")
def checkpointing_adds_a_buffer(parts):
    """A checkpointed block has an additional buffer in its state dict."""

    def checkpoint_(module, **options):
        module.register_buffer("was_checkpointed", torch.ones(()))
        return parts.ckpt_wrap.checkpoint_(module, **options)

    return overlay(parts, ckpt_wrap=overlay(parts.ckpt_wrap, checkpoint_=checkpoint_))


@mutant("CB-032")
def gradients_are_counted_twice(parts):
    """Gradients are summed over ranks twice."""

    def fully_shard(module, **options):
        module.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
        return parts.flat_param.fully_shard(module, **options)

    return overlay(parts, flat_param=overlay(parts.flat_param, fully_shard=fully_shard))


@mutant("CB-040")
def engine_breaks_the_graph(parts):
    """The engine is not compiled and breaks the graph."""
    checkpoint = torch.compiler.disable(parts.sac_policies.checkpoint)
    return overlay(parts, sac_policies=overlay(parts.sac_policies, checkpoint=checkpoint))


@mutant("CB-040")
def compiled_engine_is_inexact(parts):
    """Compiled code gives a slightly larger result than eager code."""

    def checkpoint(function, *args, **options):
        result = parts.sac_policies.checkpoint(function, *args, **options)
        return result * 1.01 if torch.compiler.is_compiling() else result

    return overlay(parts, sac_policies=overlay(parts.sac_policies, checkpoint=checkpoint))

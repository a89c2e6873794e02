"""Parts that are right alone and wrong together, or wrong in a way that shows together."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

from torchparts_conformance.mutants import mutant, overlay


@mutant(area="combined", kills={"CB-001", "CB-002"})
def wrapper_forgets_the_random_state(parts):
    """A wrapped block is recomputed with whatever random numbers come next."""
    wrap = functools.partial(parts.ckpt_wrap.checkpoint_wrapper, preserve_rng_state=False)
    return overlay(parts, ckpt_wrap=overlay(parts.ckpt_wrap, checkpoint_wrapper=wrap))


@mutant(area="combined", kills={"CB-002", "CB-015", "CB-022", "CB-023"})
def tracker_draws_a_random_number(parts):
    """Entering the tracker moves the random state."""

    class Drawing(parts.mod_tracker.ModTracker):
        def __enter__(self):
            torch.rand(1)
            return super().__enter__()

    return overlay(parts, mod_tracker=overlay(parts.mod_tracker, ModTracker=Drawing))


@mutant(area="combined", kills={"CB-003"})
def tracker_never_sees_backward(parts):
    """The tracker takes a recompute for a first forward."""

    class Blind(parts.mod_tracker.ModTracker):
        is_bw = False

    return overlay(parts, mod_tracker=overlay(parts.mod_tracker, ModTracker=Blind))


@mutant(area="combined", kills={"CB-012", "CB-023", "CB-032"})
def policy_is_ignored(parts):
    """The engine recomputes everything, whatever the policy saves."""

    def checkpoint(function, *args, policy=None, **kwargs):
        return parts.sac_policies.checkpoint(function, *args, **kwargs)

    return overlay(parts, sac_policies=overlay(parts.sac_policies, checkpoint=checkpoint))


@mutant(area="combined", kills={"CB-010", "CB-014", "CB-020"})
def engine_forgets_the_random_state(parts):
    """A region is recomputed with whatever random numbers come next."""
    checkpoint = functools.partial(parts.sac_policies.checkpoint, preserve_rng_state=False)
    return overlay(parts, sac_policies=overlay(parts.sac_policies, checkpoint=checkpoint))


@mutant(area="combined", kills={"CB-013", "CB-030", "CB-031", "CB-032", "CB-033"})
def checkpointing_adds_a_buffer(parts):
    """A checkpointed block carries a mark that gets into the state dict."""

    def checkpoint_(module, **options):
        module.register_buffer("was_checkpointed", torch.ones(()))
        return parts.ckpt_wrap.checkpoint_(module, **options)

    return overlay(parts, ckpt_wrap=overlay(parts.ckpt_wrap, checkpoint_=checkpoint_))


@mutant(area="combined", kills={"CB-033"})
def checkpoint_is_not_read(parts):
    """Loading leaves the parameters as they are."""
    load = functools.partial(lambda *_, **__: None)
    return overlay(parts, flat_param=overlay(parts.flat_param, load_sharded=load))


@mutant(area="combined", kills={"CB-034"})
def plan_forgets_the_ranks(parts):
    """The planner gives every rank the whole optimizer state."""

    def plan_training(units, *, world_size, **options):
        return parts.flat_param.plan_training(units, world_size=1, **{**options, "rank": 0})

    return overlay(parts, flat_param=overlay(parts.flat_param, plan_training=plan_training))


@mutant(area="combined", kills={"CB-030", "CB-031", "CB-032"})
def gradients_are_counted_twice(parts):
    """Gradients are summed over ranks twice, as if nobody knew who sums them."""

    def fully_shard(module, **options):
        module.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 2,))
        return parts.flat_param.fully_shard(module, **options)

    return overlay(parts, flat_param=overlay(parts.flat_param, fully_shard=fully_shard))


@mutant(area="combined", kills={"CB-011"})
def recompute_has_names_of_its_own(parts):
    """The tracker marks the names of modules that are recomputed."""

    class Marking(parts.mod_tracker.ModTracker):
        def subscribe(self, *, pre_forward, **others):
            def marked(call, *rest):
                mark = "_again" if str(self.phase) == "recompute" else ""
                pre_forward(dataclasses.replace(call, name=call.name + mark), *rest)

            return super().subscribe(pre_forward=marked, **others)

    return overlay(parts, mod_tracker=overlay(parts.mod_tracker, ModTracker=Marking))


@mutant(area="combined", kills={"CB-021"})
def offloaded_layers_save_copies_of_their_weights(parts):
    """What is offloaded multiplies by a copy of its weight, which is moved like an activation."""

    def on_a_copy(layer, x):
        return nn.functional.linear(x, layer.weight.clone(), layer.bias)

    def offload_(module, **options):
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = functools.partial(on_a_copy, layer)
        return parts.ckpt_wrap.offload_(module, **options)

    return overlay(parts, ckpt_wrap=overlay(parts.ckpt_wrap, offload_=offload_))


@mutant(area="combined", kills={"CB-040", "CB-041"})
def engine_breaks_the_graph(parts):
    """The engine is not compiled, but left to eager."""
    checkpoint = torch.compiler.disable(parts.sac_policies.checkpoint)
    return overlay(parts, sac_policies=overlay(parts.sac_policies, checkpoint=checkpoint))


@mutant(area="combined", kills={"CB-040", "CB-041", "CB-042"})
def compiled_engine_is_inexact(parts):
    """Compiled code gives a little more than eager code."""

    def checkpoint(function, *args, **options):
        result = parts.sac_policies.checkpoint(function, *args, **options)
        return result * 1.01 if torch.compiler.is_compiling() else result

    return overlay(parts, sac_policies=overlay(parts.sac_policies, checkpoint=checkpoint))

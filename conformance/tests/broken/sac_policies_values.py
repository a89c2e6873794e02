"""Broken decisions and values; each fails exactly the requirements that it declares."""

from __future__ import annotations

import functools
import warnings
from inspect import isfunction

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torchparts_conformance.mutants import mutant, overlay

from .faults.sac_policies import changed, eager_only


@mutant(
    "SP-014 SP-015 SP-016 SP-017 SP-018 SP-019 SP-021 SP-029 SP-030 SP-031 SP-032 SP-039 SP-041"
    " SP-043 SP-133 SP-134 SP-141 SP-157 SP-159 SP-215"
)
def policy_is_ignored(part):
    """Recomputes everything, for any policy."""

    def change(function, policy, kwargs):
        return function, None, kwargs

    return changed(part, change, context_fn=lambda policy: part.context_fn([]))


@mutant("SP-038")
def outputs_stay(part):
    """Keeps the outputs of a region after its backward."""
    held = []

    def keep(out):
        held.extend([out.detach()] if isinstance(out, torch.Tensor) else [])
        return out

    return changed(part, result=keep)


@mutant("SP-031")
def offload_is_recomputed(part):
    """Recomputes offloaded values, as torch does in eager code."""

    def without(policy):
        def plain(ctx, op, *args, **kwargs):
            answer = policy(ctx, op, *args, **kwargs)
            offloads = getattr(answer, "name", "").endswith("OFFLOAD")
            return CheckpointPolicy.PREFER_RECOMPUTE if offloads else answer

        return plain

    return changed(part, eager_only(without))


@mutant("SP-032")
def unmatched_packets_are_silent(part):
    """Does not warn about policies that match nothing."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if torch.compiler.is_compiling():
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant("SP-043")
def none_means_recompute(part):
    """Treats None as a decision to recompute."""

    def lenient(policy):
        return lambda ctx, op, *args, **kwargs: policy(ctx, op, *args, **kwargs) or False

    return changed(part, eager_only(lenient))


@mutant(
    "SP-031 SP-032 SP-034 SP-035 SP-036 SP-039 SP-041 SP-042 SP-043 SP-044 SP-045 SP-133 SP-134"
    " SP-135 SP-141 SP-157 SP-159 SP-215"
)
def values_are_cached_as_torch_does(part):
    """Like torch: each saved value is returned once, even if overwritten, and bypasses hooks."""

    def context_fn(policy):
        return functools.partial(create_selective_checkpoint_contexts, policy)

    def checkpoint(function, *args, policy=None, **kwargs):
        if not (isinstance(policy, list) or isfunction(policy)):
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        return torch_checkpoint(
            function, *args, **{"use_reentrant": False, "context_fn": context_fn(policy), **kwargs}
        )

    return overlay(part, checkpoint=checkpoint, context_fn=context_fn)


@mutant("SP-033")
def overwritten_values_are_used(part):
    """Uses saved values as a later operator of the region left them."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if policy is None:
            return part.checkpoint(function, *args, **kwargs)
        contexts = functools.partial(
            create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True
        )
        return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    return overlay(part, checkpoint=checkpoint)


@mutant("SP-046")
def saved_views_count_twice(part):
    """Adds the gradient of a region twice if its policy saves views."""

    def checkpoint(function, *args, policy=None, **kwargs):
        out = part.checkpoint(function, *args, policy=policy, **kwargs)
        saves_views = isfunction(policy) and policy(None, torch.ops.aten.view.default) is True
        return out + (out - out.detach()) if saves_views else out

    return overlay(part, checkpoint=checkpoint)


@mutant("SP-039")
def hooks_around_regions_are_ignored(part):
    """Saves values that saved-tensor hooks around a region do not see."""

    def checkpoint(function, *args, policy=None, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant("SP-163")
def compiled_parts_run_in_eager_code(part):
    """Disables the compiler while a function runs in an eager region."""

    def change(function, policy, kwargs):
        @functools.wraps(function)
        def run(*args, **named):
            with torch.compiler.set_stance("force_eager"):
                return function(*args, **named)

        eager = isfunction(function) and not torch.compiler.is_compiling()
        return run if eager else function, policy, kwargs

    return changed(part, change)


@mutant("SP-164")
def compiled_regions_draw_once_more(part):
    """Draws a random number in every compiled region."""

    def change(function, policy, kwargs):
        if not (torch.compiler.is_compiling() and policy == [torch.ops.aten.mm.default]):
            return function, policy, kwargs

        def run(first, *args, **named):
            return function(first + torch.rand_like(first) * 0.0, *args, **named)

        return run, policy, kwargs

    return changed(part, change)

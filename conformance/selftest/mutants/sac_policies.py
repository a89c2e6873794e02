"""Broken implementations of the area sac-policies; each fails exactly what it declares."""

from __future__ import annotations

import functools
import warnings
from inspect import isfunction

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torchparts_conformance.mutants import mutant, overlay

AREA = "sac-policies"
OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")


def _changed(part, change=None, *, result=None, **names):
    """The part with each call of its checkpoint changed, its result too, or other names.

    Args:
        part: what is broken.
        change: from (function, policy, keyword arguments) to those that the part is given.
        result: from what the part returns to what the broken one does.
        names: further names to replace.
    """

    def checkpoint(function, *args, policy=None, **kwargs):
        if change is not None:
            function, policy, kwargs = change(function, policy, kwargs)
        out = part.checkpoint(function, *args, policy=policy, **kwargs)
        return out if result is None else result(out)

    return overlay(part, checkpoint=checkpoint, **names)


def _eager_only(change_policy):
    """A change of plain policy functions in eager code; the compiler sees them as they are."""

    def change(function, policy, kwargs):
        if isfunction(policy) and not torch.compiler.is_compiling():
            policy = change_policy(policy)
        return function, policy, kwargs

    return change


def _refusing(wrong):
    """A change that is none: it refuses calls of which `wrong(function, policy, kwargs)` holds."""

    def change(function, policy, kwargs):
        if wrong(function, policy, kwargs):
            raise TypeError("this call is refused")
        return function, policy, kwargs

    return change


@mutant(
    area=AREA,
    kills={
        "SP-001",
        "SP-002",
        "SP-003",
        "SP-004",
        "SP-005",
        "SP-006",
        "SP-007",
        "SP-012",
        "SP-013",
        "SP-026",
    },
)
def region_is_forgotten(part):
    """Calls the function without a region where there is no policy."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if policy is None and "context_fn" not in kwargs:
            own = {name: value for name, value in kwargs.items() if name not in OPTIONS}
            return function(*args, **own)
        return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(
    area=AREA,
    kills={
        "SP-001",
        "SP-002",
        "SP-003",
        "SP-004",
        "SP-005",
        "SP-006",
        "SP-007",
        "SP-008",
        "SP-009",
        "SP-010",
        "SP-012",
        "SP-013",
        "SP-015",
        "SP-016",
        "SP-019",
        "SP-020",
        "SP-021",
        "SP-022",
        "SP-025",
        "SP-026",
        "SP-027",
        "SP-028",
        "SP-029",
    },
)
def checkpoint_cannot_be_traced(part):
    """Hides checkpoint from the compiler."""
    return overlay(part, checkpoint=torch.compiler.disable(part.checkpoint))


@mutant(area=AREA, kills={"SP-003", "SP-021"})
def options_reach_the_function(part):
    """Hands preserve_rng_state to the function as well."""

    def change(function, policy, kwargs):
        if "preserve_rng_state" in kwargs:
            function = functools.partial(function, preserve_rng_state=kwargs["preserve_rng_state"])
        return function, policy, kwargs

    return _changed(part, change)


@mutant(area=AREA, kills={"SP-012"})
def keyword_arguments_are_lost(part):
    """Drops what is not an option of checkpoint."""
    taken = (*OPTIONS, "context_fn", "engine")

    def change(function, policy, kwargs):
        own = {name: value for name, value in kwargs.items() if name in taken}
        return function, policy, own

    return _changed(part, change)


@mutant(
    area=AREA,
    kills={
        "SP-006",
        "SP-007",
        "SP-010",
        "SP-027",
        "SP-028",
        "SP-042",
        "SP-045",
        "SP-122",
        "SP-128",
    },
)
def modules_are_refused(part):
    """Takes plain functions only."""
    return _changed(part, _refusing(lambda function, *rest: isinstance(function, nn.Module)))


@mutant(area=AREA, kills={"SP-008", "SP-021", "SP-034"})
def random_state_is_not_restored(part):
    """Draws new random numbers in the recomputation."""

    def change(function, policy, kwargs):
        return function, policy, {**kwargs, "preserve_rng_state": False}

    return _changed(part, change)


@mutant(
    area=AREA,
    kills={
        "SP-001",
        "SP-002",
        "SP-003",
        "SP-004",
        "SP-005",
        "SP-006",
        "SP-007",
        "SP-008",
        "SP-009",
        "SP-010",
        "SP-012",
        "SP-015",
        "SP-016",
        "SP-019",
        "SP-020",
        "SP-021",
        "SP-022",
        "SP-023",
        "SP-026",
        "SP-027",
        "SP-028",
        "SP-029",
        "SP-030",
        "SP-031",
        "SP-033",
        "SP-034",
        "SP-035",
        "SP-036",
        "SP-037",
        "SP-041",
        "SP-042",
        "SP-045",
        "SP-046",
        "SP-100",
        "SP-101",
        "SP-102",
        "SP-103",
        "SP-105",
        "SP-106",
        "SP-107",
        "SP-108",
        "SP-110",
    },
)
def gradients_are_cut_off(part):
    """Returns values without their graph."""

    # In one frame: the compiler leaves the graph at requires_grad_, and the frame with it.
    def checkpoint(function, *args, policy=None, **kwargs):
        out = part.checkpoint(function, *args, policy=policy, **kwargs)
        return out.detach().requires_grad_() if isinstance(out, torch.Tensor) else out

    return overlay(part, checkpoint=checkpoint)


@mutant(
    area=AREA,
    kills={
        "SP-004",
        "SP-005",
        "SP-008",
        "SP-013",
        "SP-041",
        "SP-045",
    },
)
def shape_is_lost(part):
    """Returns one dimension, whatever the function returns."""
    return _changed(
        part, result=lambda out: out.flatten() if isinstance(out, torch.Tensor) else out
    )


@mutant(area=AREA, kills={"SP-014", "SP-018"})
def policy_is_inverted(part):
    """Saves what is to be recomputed, and recomputes what is to be saved."""

    def inverted(policy):
        if isinstance(policy, list):
            return lambda ctx, op, *args, **kwargs: op not in policy
        return lambda ctx, op, *args, **kwargs: (
            policy(ctx, op, *args, **kwargs) not in (True, CheckpointPolicy.MUST_SAVE)
        )

    return overlay(part, context_fn=lambda policy: part.context_fn(inverted(policy)))


@mutant(
    area=AREA,
    kills={
        "SP-014",
        "SP-015",
        "SP-016",
        "SP-017",
        "SP-018",
        "SP-019",
        "SP-021",
        "SP-029",
        "SP-030",
        "SP-031",
        "SP-032",
        "SP-039",
        "SP-041",
        "SP-043",
        "SP-102",
        "SP-104",
        "SP-107",
        "SP-108",
        "SP-109",
        "SP-110",
        "SP-122",
        "SP-128",
        "SP-129",
    },
)
def policy_is_ignored(part):
    """Recomputes everything, whatever the policy says."""

    def change(function, policy, kwargs):
        return function, None, kwargs

    return _changed(part, change, context_fn=lambda policy: part.context_fn([]))


@mutant(
    area=AREA,
    kills={
        "SP-027",
        "SP-028",
        "SP-029",
        "SP-030",
        "SP-033",
        "SP-035",
        "SP-036",
        "SP-037",
        "SP-039",
        "SP-041",
        "SP-044",
    },
)
def lists_are_refused(part):
    """Takes functions as policies only."""
    return _changed(part, _refusing(lambda function, policy, kwargs: isinstance(policy, list)))


@mutant(area=AREA, kills={"SP-022"})
def contexts_are_not_checked(part):
    """Leaves out contexts that are given."""

    def change(function, policy, kwargs):
        own = {name: value for name, value in kwargs.items() if name != "context_fn"}
        return function, policy, own

    return _changed(part, change)


@mutant(area=AREA, kills={"SP-023"})
def autocast_ends_at_the_region(part):
    """Runs the function in full precision, in eager code only."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if torch.compiler.is_compiling():
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(
    area=AREA,
    kills={
        "SP-001",
        "SP-002",
        "SP-003",
        "SP-004",
        "SP-005",
        "SP-006",
        "SP-007",
        "SP-008",
        "SP-009",
        "SP-011",
        "SP-012",
        "SP-013",
        "SP-022",
        "SP-023",
        "SP-024",
        "SP-025",
        "SP-026",
    },
)
def compiled_region_is_left_out(part):
    """Gives back the first argument in place of compiling a region without a policy."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if policy is None and torch.compiler.is_compiling():
            return args[0]
        return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-031"})
def offload_is_recomputed(part):
    """Carries out an offload as recomputing, as torch does in eager code."""

    def without(policy):
        def plain(ctx, op, *args, **kwargs):
            answer = policy(ctx, op, *args, **kwargs)
            offloads = getattr(answer, "name", "").endswith("OFFLOAD")
            return CheckpointPolicy.PREFER_RECOMPUTE if offloads else answer

        return plain

    return _changed(part, _eager_only(without))


@mutant(area=AREA, kills={"SP-032"})
def unmatched_packets_are_silent(part):
    """Says nothing of policies that match nothing."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if torch.compiler.is_compiling():
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return part.checkpoint(function, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-043"})
def none_means_recompute(part):
    """Takes an answer that is no decision as recompute."""

    def lenient(policy):
        return lambda ctx, op, *args, **kwargs: policy(ctx, op, *args, **kwargs) or False

    return _changed(part, _eager_only(lenient))


@mutant(area=AREA, kills={"SP-037"})
def debug_is_refused(part):
    """Refuses debug=True beside a policy."""

    def wrong(function, policy, kwargs):
        return policy is not None and kwargs.get("debug")

    return _changed(part, _refusing(wrong))


@mutant(
    area=AREA,
    kills={
        "SP-031",
        "SP-032",
        "SP-033",
        "SP-034",
        "SP-035",
        "SP-036",
        "SP-037",
        "SP-038",
        "SP-039",
        "SP-041",
        "SP-042",
        "SP-043",
        "SP-044",
        "SP-045",
        "SP-046",
        "SP-133",
        "SP-134",
        "SP-135",
        "SP-136",
        "SP-137",
    },
)
def values_are_cached_as_torch_does(part):
    """Hands out each cached value once, as it is by then, outside of hooks and inner regions."""

    def context_fn(policy):
        return functools.partial(create_selective_checkpoint_contexts, policy)

    def checkpoint(function, *args, policy=None, **kwargs):
        if not (isinstance(policy, list) or isfunction(policy)):
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        return torch_checkpoint(
            function, *args, **{"use_reentrant": False, "context_fn": context_fn(policy), **kwargs}
        )

    return overlay(part, checkpoint=checkpoint, context_fn=context_fn)


def _behind_its_back(checkpoint, function, args, kwargs):
    """Hand a region its tensors, and all else behind its back."""
    at = [n for n, each in enumerate(args) if isinstance(each, torch.Tensor)]
    if len(at) == len(args):
        return checkpoint(function, *args, **kwargs)

    def given(*tensors, **own):
        filled = list(args)
        for n, tensor in zip(at, tensors, strict=True):
            filled[n] = tensor
        return function(*filled, **own)

    return checkpoint(given, *(args[n] for n in at), **kwargs)


@mutant(area=AREA, kills={"SP-134", "SP-137"})
def containers_are_not_restored(part):
    """Hands the region its tensors, and all else behind its back."""

    def checkpoint(function, *args, policy=None, **kwargs):
        return _behind_its_back(part.checkpoint, function, args, {"policy": policy, **kwargs})

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-137"})
def containers_inside_are_not_restored(part):
    """Restores what a region was given, but not where the region around it is recomputed."""
    recomputing = []

    def checkpoint(function, *args, policy=None, **kwargs):
        if recomputing:
            return _behind_its_back(part.checkpoint, function, args, {"policy": policy, **kwargs})
        if not isfunction(policy) or torch.compiler.is_compiling():
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        ran = []

        def watched(*given, **own):
            again = bool(ran)
            ran.append(True)
            recomputing.extend([True] * again)
            try:
                return function(*given, **own)
            finally:
                del recomputing[len(recomputing) - again :]

        return part.checkpoint(watched, *args, policy=policy, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-136"})
def torchs_debugging_is_not_heeded(part):
    """Refuses policies while torch debugs all checkpoints, as torch does."""

    def wrong(function, policy, kwargs):
        return policy is not None and torch.utils.checkpoint._checkpoint_debug_enabled

    return _changed(part, _refusing(wrong))


@mutant(area=AREA, kills={"SP-111"})
def regions_are_contiguous(part):
    """Gives the function contiguous copies of what is channels-last."""

    def plain(value):
        last = (
            isinstance(value, torch.Tensor)
            and value.dim() == 4
            and not value.is_contiguous()
            and value.is_contiguous(memory_format=torch.channels_last)
        )
        return value.contiguous() if last else value

    def change(function, policy, kwargs):
        @functools.wraps(function)
        def run(*args, **named):
            return function(*map(plain, args), **named)

        eager = isfunction(function) and not torch.compiler.is_compiling()
        return run if eager else function, policy, kwargs

    return _changed(part, change)

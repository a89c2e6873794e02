"""Regions that restore nothing they changed, overlook a change, or refuse what they need not."""

from __future__ import annotations

import functools
from inspect import isfunction

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchparts_conformance.mutants import mutant, overlay

from .faults.sac_policies import changed, refusing

AREA = "sac-policies"


class _DataIsACopy(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.clone() if func == torch.Tensor.data.__get__ else out


@mutant(area=AREA, kills={"SP-152", "SP-158", "SP-160", "SP-181"})
def writes_past_the_counter_are_lost(part):
    """Replays a region whose `.data` is a copy."""

    def checkpoint(function, *args, **kwargs):
        if torch.compiler.is_compiling():
            return part.checkpoint(function, *args, **kwargs)

        def watched(*given, **own):
            with _DataIsACopy():
                return function(*given, **own)

        return part.checkpoint(watched, *args, **kwargs)

    return overlay(part, checkpoint=checkpoint)


@mutant(area=AREA, kills={"SP-136"})
def torchs_debugging_is_not_heeded(part):
    """Refuses policies while torch debugs all checkpoints, as torch does."""

    def wrong(function, policy, kwargs):
        return policy is not None and torch.utils.checkpoint._checkpoint_debug_enabled

    return changed(part, refusing(wrong))


def _torch_where(part, takes):
    """The part; torch's checkpoint where `takes(policy, args)` holds."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if not takes(policy, args):
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    return overlay(part, checkpoint=checkpoint)


def _is_one_value(args):
    return len(args) == 1 and isinstance(args[0], torch.Tensor) and not args[0].is_leaf


@mutant(area=AREA, kills={"SP-159", "SP-045", "SP-137"})
def changed_values_are_read(part):
    """Runs a region of one value with a history again, whatever has become of the value."""
    return _torch_where(part, lambda policy, args: isfunction(policy) and _is_one_value(args))


@mutant(area=AREA, kills={"SP-159", "SP-133"})
def other_data_is_saved_again(part):
    """Keeps the products of such a region, and saves their weights again, whatever they are."""
    return _torch_where(part, lambda policy, args: isinstance(policy, list) and _is_one_value(args))


@mutant(area=AREA, kills={"SP-211"})
def any_check_is_taken(part):
    """Takes an option of torch's checkpoint, and does nothing with it."""

    def checkpoint(function, *args, determinism_check="default", **kwargs):
        return part.checkpoint(function, *args, **kwargs)

    return overlay(part, checkpoint=checkpoint)

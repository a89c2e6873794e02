"""Regions that restore no state, miss a change, or refuse valid code."""

from __future__ import annotations

import copy
import functools
from inspect import isfunction

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchparts_conformance.mutants import mutant, overlay


def _torch_where(part, takes):
    """The part with torch's checkpoint for calls that match `takes(policy, args)`."""

    def checkpoint(function, *args, policy=None, **kwargs):
        if not takes(policy, args):
            return part.checkpoint(function, *args, policy=policy, **kwargs)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    return overlay(part, checkpoint=checkpoint)


def _is_one_value(args):
    return len(args) == 1 and isinstance(args[0], torch.Tensor) and not args[0].is_leaf


@mutant("SP-045 SP-159")
def changed_values_are_read(part):
    """Recomputes a region of one non-leaf value with changed values."""
    return _torch_where(part, lambda policy, args: isfunction(policy) and _is_one_value(args))


@mutant("SP-133 SP-159")
def other_data_is_saved_again(part):
    """Saves the products of such a region, and its changed weights."""
    return _torch_where(part, lambda policy, args: isinstance(policy, list) and _is_one_value(args))


@mutant("SP-220")
def arguments_are_copied(part):
    """Calls a function with copies of its keyword and other arguments."""

    def checkpoint(function, *args, policy=None, use_reentrant=False, **kwargs):
        if policy is not None or torch.compiler.is_compiling():
            return part.checkpoint(function, *args, policy=policy, **kwargs)

        def run(*args, **named):
            args = [a if isinstance(a, torch.Tensor) else copy.deepcopy(a) for a in args]
            return function(*args, **copy.deepcopy(named))

        return part.checkpoint(run, *args, **kwargs)

    return overlay(part, checkpoint=checkpoint)

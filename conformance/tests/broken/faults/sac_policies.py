"""What faults of the area sac-policies are made with: calls of checkpoint, changed or refused."""

from __future__ import annotations

from inspect import isfunction

import torch

from torchparts_conformance.mutants import overlay


def changed(part, change=None, *, result=None, **names):
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


def eager_only(change_policy):
    """A change of plain policy functions in eager code; the compiler sees them as they are."""

    def change(function, policy, kwargs):
        if isfunction(policy) and not torch.compiler.is_compiling():
            policy = change_policy(policy)
        return function, policy, kwargs

    return change

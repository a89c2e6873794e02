"""Helpers for faults of the area sac-policies: changed or refused calls of checkpoint."""

from __future__ import annotations

from inspect import isfunction

import torch

from torchparts_conformance.mutants import overlay


def changed(part, change=None, *, result=None, **names):
    """The part with changed checkpoint calls, optionally with changed results or names.

    Args:
        part: the working part.
        change: maps (function, policy, keyword arguments) to those passed to the part.
        result: maps the part's result to the broken one.
        names: further names to replace.
    """

    def checkpoint(function, *args, policy=None, **kwargs):
        if change is not None:
            function, policy, kwargs = change(function, policy, kwargs)
        out = part.checkpoint(function, *args, policy=policy, **kwargs)
        return out if result is None else result(out)

    return overlay(part, checkpoint=checkpoint, **names)


def eager_only(change_policy):
    """A change of plain policy functions in eager code; the compiler sees the original ones."""

    def change(function, policy, kwargs):
        if isfunction(policy) and not torch.compiler.is_compiling():
            policy = change_policy(policy)
        return function, policy, kwargs

    return change

"""Broken reports; each fails exactly the requirements that it declares."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from unittest.mock import patch

import torch

from torchparts_conformance.mutants import mutant, overlay


def _within(part, name, change):
    """The part whose reports `name` run what they measure inside `change()`."""

    @contextmanager
    def measure(*roots, **options):
        with getattr(part, name)(*roots, **options) as report, change():
            yield report

    return overlay(part, **{name: measure})


@mutant("MT-254")
def measured_tensors_are_handed_out_changed(part):
    """Saves tensors for backward without checking their version."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    return _within(part, "profile_memory", lambda: hooks(lambda kept: kept, lambda kept: kept))


@mutant("MT-404")
def counts_take_operators_apart(part):
    """Decomposes SiLU to count it."""

    def parts(x, inplace=False):
        return x * x.sigmoid()

    silu = (torch.nn.functional, "silu", parts)
    return _within(part, "profile_flops", lambda: patch.object(*silu))


@mutant("MT-407")
def experts_count_as_nothing(part):
    """Has a formula for grouped products that returns zero."""
    none = {torch.ops.aten._grouped_mm: lambda *shapes, **others: 0}
    return overlay(part, profile_flops=functools.partial(part.profile_flops, formulas=none))

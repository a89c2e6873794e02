"""Regions that restore nothing they changed, or refuse what they need not."""

from __future__ import annotations

from inspect import isfunction

import torch

from torchparts_conformance.mutants import mutant, overlay

from .faults.sac_policies import changed, refusing

AREA = "sac-policies"


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


@mutant(area=AREA, kills={"SP-134", "SP-137", "SP-141", "SP-142"})
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

    return changed(part, refusing(wrong))

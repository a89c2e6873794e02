"""Recomputations that repeat side effects, or miss changes."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchparts_conformance.mutants import mutant

from .faults.ckpt_wrap import INNER, faulty_call, is_reentrant


@mutant("CW-094")
def hooks_are_registered_again(part):
    """Recomputes by torch's own function, which registers forward's hooks again."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if isinstance(inner, part.OffloadWrapper) or "Hooked" not in type(inner).__name__:
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant("CW-095")
def caches_are_appended_to_again(part):
    """Recomputes with the caller's own objects."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if "Cached" not in type(inner).__name__:
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant("CW-096")
def tensors_in_objects_are_not_checked(part):
    """Recomputes with a tensor that forward has changed in place."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if "Buffered" not in type(inner).__name__:
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant("CW-100")
def weights_of_a_functional_call_are_forgotten(part):
    """Recomputes with the parameters that the module has at the time of backward."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if all(isinstance(weight, nn.Parameter) for weight in inner.parameters()):
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant("CW-111")
def weights_are_read_as_they_are_by_then(part):
    """Recomputes with parameters that were changed in place since forward."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        if "Doubled" not in type(inner).__name__:
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=is_reentrant(wrapper), **kwargs)

    return faulty_call(part, change)


@mutant("CW-110")
def only_batch_norm_is_taken_care_of(part):
    """Recomputes with changed buffers, except those of known layer types."""

    def change(wrapper, call, args, kwargs):
        inner = getattr(wrapper, INNER)
        own = [m for m in inner.modules() if [*m.buffers(recurse=False)]]
        if not own or any(isinstance(m, nn.BatchNorm1d) for m in own) or is_reentrant(wrapper):
            return call(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    return faulty_call(part, change)


@mutant("CW-120")
def recompute_gets_copies_of_arguments(part):
    """Calls forward with deep copies of arguments that are no tensors."""

    def change(wrapper, call, args, kwargs):
        args = [a if isinstance(a, torch.Tensor) else copy.deepcopy(a) for a in args]
        return call(*args, **{name: copy.deepcopy(value) for name, value in kwargs.items()})

    return faulty_call(part, change)

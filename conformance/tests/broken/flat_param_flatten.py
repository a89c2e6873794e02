"""Broken flattening in one process; each fails exactly the requirements that it declares.

A flattened module is copied and pickled with all its attributes, so hooks here are named functions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from torchparts_conformance.mutants import mutant, overlay


def _before(part, fault):
    """The part with a change to every module before flattening."""

    def flatten(module, **options):
        fault(module)
        return part.flatten(module, **options)

    return overlay(part, flatten=flatten)


def _after(part, fault):
    """The part with a change to every flattened module."""

    def flatten(module, **options):
        flat = part.flatten(module, **options)
        fault(module)
        return flat

    return overlay(part, flatten=flatten)


def _with_method(part, name, method):
    """The part with another method of its flat views, called with the working view first."""

    def flatten(module, **options):
        flat = part.flatten(module, **options)
        return overlay(flat, **{name: partial(method, flat)})

    return overlay(part, flatten=flatten)


@mutant("FP-050 FP-052")
def parameters_are_replaced(part):
    """Flattens copies of the parameters and registers the copies."""

    def fault(module):
        for owner in module.modules():
            for name, param in list(owner.named_parameters(recurse=False)):
                copied = nn.Parameter(param.detach().clone(), param.requires_grad)
                setattr(owner, name, copied)

    return _before(part, fault)


@mutant("FP-051 FP-064")
def flat_gradient_is_a_copy(part):
    """Concatenates the gradients at every access."""

    def grad_vector(flat, segment=None):
        return flat.grad_vector(segment).clone()

    return _with_method(part, "grad_vector", grad_vector)


@mutant("FP-053")
def gradients_start_as_zeros(part):
    """Sets every gradient to zero before any backward."""

    def fault(module):
        for param in module.parameters():
            if param.requires_grad:
                param.grad = torch.zeros_like(param)

    return _after(part, fault)


@mutant("FP-203")
def last_chunk_is_left_out(part):
    """Trains only whole chunks, without the rest."""

    def chunks(flat, numel=1 << 18):
        return [chunk for chunk in flat.chunks(numel) if chunk.numel() == numel]

    return _with_method(part, "chunks", chunks)


@mutant("FP-055")
def each_gradient_is_clipped_alone(part):
    """Clips every parameter's gradient by its own norm."""

    def clip_(flat, max_norm, *, ord=2.0):
        norms = [
            nn.utils.clip_grad_norm_(param, max_norm, ord) for param in flat.module.parameters()
        ]
        return torch.stack(norms).max()

    return _with_method(part, "clip_", clip_)


@mutant("FP-055")
def padding_is_clipped_along(part):
    """Includes padding of 42 in the norm of the gradient."""

    def clip_(flat, max_norm, *, ord=2.0):
        vector = flat.grad_vector()
        for layout in flat.layouts.values():
            for start, stop in layout.gaps:
                vector[start:stop] = 42.0
        return flat.clip_(max_norm, ord=ord)

    return _with_method(part, "clip_", clip_)


@mutant("FP-058")
def casts_are_seen_late(part):
    """Does not restore the views right after a cast."""
    return _after(part, lambda module: vars(module).pop("_apply"))


@mutant("FP-060 FP-203")
def frozen_parts_lie_with_the_trained(part):
    """Enables gradients for all parameters, so that one vector is missing."""
    return _before(part, nn.Module.requires_grad_)


@mutant("FP-061")
def strides_are_lost(part):
    """Stores every parameter contiguously."""

    def fault(module):
        for param in module.parameters():
            param.data = param.data.contiguous()

    return _before(part, fault)


def _look(module, args):
    if args[0].isnan().any():
        raise ValueError("the input is not a number")


@mutant("FP-064")
def tracing_has_to_stop(part):
    """Branches on the input's values before every forward."""
    return _after(part, lambda module: module.register_forward_pre_hook(_look))

"""Wrappers that break the source's behaviour; each fails exactly what it declares."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from torchparts_conformance.mutants import mutant, overlay

from .faults.ckpt_wrap import (
    INNER,
    PREFIX,
    faulty,
    faulty_apply,
    faulty_call,
    faulty_offload,
    faulty_options,
    is_reentrant,
)


@mutant("CW-003")
def offload_drops_keywords(part):
    """An offloaded module does not get its keyword arguments."""
    return faulty_offload(part, lambda call, args, kwargs: call(*args))


@mutant("CW-004")
def reentrant_needs_a_positional_argument(part):
    """Under REENTRANT, a call without positional arguments raises."""

    def change(wrapper, call, args, kwargs):
        if is_reentrant(wrapper) and not args:
            raise ValueError("Unexpected keyword arguments")
        return call(*args, **kwargs)

    return faulty_call(part, change)


@mutant("CW-005")
def recompute_context_is_forgotten(part):
    """The second context of `context_fn` is not entered."""

    def change(module, impl, fn, options):
        given = options.get("context_fn")
        if given is not None and fn is None and not isinstance(given, type):
            options["context_fn"] = lambda: (given()[0], contextlib.nullcontext())
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant("CW-006")
def options_of_checkpoint_fn_are_lost(part):
    """`checkpoint_fn` gets None instead of its options."""

    def change(module, impl, fn, options):
        if fn is not None and fn is not checkpoint:
            options = dict.fromkeys(options)
        return module, impl, fn, options

    return faulty_options(part, change)


@mutant("CW-007")
def keeps_its_result(part):
    """Also saves its own result for backward."""

    def change(wrapper, call, args, kwargs):
        result = call(*args, **kwargs)
        return result * torch.ones_like(result) if isinstance(result, torch.Tensor) else result

    return faulty_call(part, change)


@mutant("CW-008")
def cannot_be_indexed(part):
    """Indexing is not forwarded."""

    def getitem(self, key):
        raise TypeError("'CheckpointWrapper' object is not subscriptable")

    return faulty(part, __getitem__=getitem)


@mutant("CW-009")
def attributes_are_those_of_the_start(part):
    """Attributes that are set on the inner module later are not found."""
    working = part.CheckpointWrapper.__getattr__

    def getattr_(self, name):
        if name == "note":
            raise AttributeError(name)
        return working(self, name)

    return faulty(part, __getattr__=getattr_)


@mutant("CW-010")
def own_parameter_names_show_the_prefix(part):
    """`named_parameters()` of the wrapper itself has names that the state dict lacks."""

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        for name, parameter in getattr(self, INNER).named_parameters():
            yield PREFIX + name, parameter

    return faulty(part, named_parameters=named_parameters)


@mutant("CW-011 CW-039")
def offload_brings_back_other_numbers(part):
    """Offloaded values change on the way back."""

    def change(call, args, kwargs):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() * 1.5, lambda t: t):
            return call(*args, **kwargs)

    working = part.checkpoint_wrapper

    def make(module, *args, **options):
        return working(module, *args, **options)

    return overlay(faulty_offload(part, change), checkpoint_wrapper=make)


@mutant("CW-008 CW-009 CW-012 CW-110")
def wraps_a_copy(part):
    """The wrapper holds a copy of the module."""

    def change(module, impl, fn, options):
        return copy.deepcopy(module), impl, fn, options

    return faulty_options(part, change)


@mutant("CW-013 CW-034")
def check_fn_sees_children_only(part):
    """A `check_fn` is not called for modules below the first level."""

    def change(working, model, wrapper_fn, options):
        if "check_fn" not in options:
            return working(model, wrapper_fn, **options)
        first = set(model.children())
        check = options["check_fn"]
        return working(model, wrapper_fn, check_fn=lambda m: m in first and check(m))

    return faulty_apply(part, change)


@mutant("CW-014")
def class_policies_select_leaves_of_another_class(part):
    """A ModuleWrapPolicy selects every module without children."""

    def change(working, model, wrapper_fn, options):
        if (
            isinstance(options.get("auto_wrap_policy"), ModuleWrapPolicy)
            and len(list(model.modules())) > 4
        ):
            options = {"check_fn": lambda m: not list(m.children())}
        return working(model, wrapper_fn, **options)

    return faulty_apply(part, change)


@mutant("CW-015")
def policy_options_are_lost(part):
    """Options from a CustomPolicy are dropped."""

    def change(working, model, wrapper_fn, options):
        return working(model, lambda module, **_: wrapper_fn(module), **options)

    return faulty_apply(part, change)


@mutant("CW-016")
def any_policy_will_do(part):
    """An invalid policy selects nothing instead of raising."""

    def change(working, model, wrapper_fn, options):
        if isinstance(options.get("auto_wrap_policy"), int):
            return None
        return working(model, wrapper_fn, **options)

    return faulty_apply(part, change)


@mutant("CW-019")
def copies_share_weights(part):
    """A deepcopy returns the wrapper itself."""
    return faulty(part, __deepcopy__=lambda self, memo: self)

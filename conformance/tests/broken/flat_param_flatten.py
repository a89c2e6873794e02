"""Broken flattening in one process, for the area flat-param; each fails exactly what it declares.

A flattened module is copied and pickled with what is put into it: hooks here are named functions.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from torchparts_conformance.mutants import mutant, overlay

AREA = "flat-param"


def _before(part, fault):
    """The part with something done to every module that it is about to flatten."""

    def flatten(module, **options):
        fault(module)
        return part.flatten(module, **options)

    return overlay(part, flatten=flatten)


def _after(part, fault):
    """The part with something done to every module that it has flattened."""

    def flatten(module, **options):
        flat = part.flatten(module, **options)
        fault(module)
        return flat

    return overlay(part, flatten=flatten)


def _with_method(part, name, method):
    """The part with another method of its flat views; it takes the working view first."""

    def flatten(module, **options):
        flat = part.flatten(module, **options)
        return overlay(flat, **{name: partial(method, flat)})

    return overlay(part, flatten=flatten)


@mutant(area=AREA, kills={"FP-050", "FP-052", "FP-150", "FP-153", "FP-196"})
def parameters_are_replaced(part):
    """Flattens copies of the parameters and registers those."""

    def fault(module):
        for owner in module.modules():
            for name, param in list(owner.named_parameters(recurse=False)):
                copied = nn.Parameter(param.detach().clone(), param.requires_grad)
                setattr(owner, name, copied)

    return _before(part, fault)


@mutant(area=AREA, kills={"FP-051", "FP-064", "FP-154"})
def flat_gradient_is_a_copy(part):
    """Joins the gradients anew for whoever asks for them."""

    def grad_vector(flat, segment=None):
        return flat.grad_vector(segment).clone()

    return _with_method(part, "grad_vector", grad_vector)


@mutant(area=AREA, kills={"FP-053"})
def gradients_start_as_zeros(part):
    """Gives every parameter a gradient before any backward has reached it."""

    def fault(module):
        for param in module.parameters():
            if param.requires_grad:
                param.grad = torch.zeros_like(param)

    return _after(part, fault)


@mutant(area=AREA, kills={"FP-054", "FP-203"})
def last_chunk_is_left_out(part):
    """Makes whole chunks only, and trains nothing of what remains."""

    def chunks(flat, numel=1 << 18):
        return [chunk for chunk in flat.chunks(numel) if chunk.numel() == numel]

    return _with_method(part, "chunks", chunks)


@mutant(area=AREA, kills={"FP-055"})
def each_gradient_is_clipped_alone(part):
    """Clips every parameter's gradient by its own norm."""

    def clip_(flat, max_norm, *, ord=2.0):
        norms = [
            nn.utils.clip_grad_norm_(param, max_norm, ord) for param in flat.module.parameters()
        ]
        return torch.stack(norms).max()

    return _with_method(part, "clip_", clip_)


@mutant(area=AREA, kills={"FP-055"})
def padding_is_clipped_along(part):
    """Has torch's 42 in the gaps of the gradient when its norm is taken."""

    def clip_(flat, max_norm, *, ord=2.0):
        vector = flat.grad_vector()
        for layout in flat.layouts.values():
            for start, stop in layout.gaps:
                vector[start:stop] = 42.0
        return flat.clip_(max_norm, ord=ord)

    return _with_method(part, "clip_", clip_)


@mutant(area=AREA, kills={"FP-056"})
def vectors_are_loaded_to_be_called(part):
    """Writes the vector into the one module that there is and calls it."""

    def functional_call(flat, vectors, *args, **kwargs):
        flat.load_vector(vectors)
        return flat.module(*args, **kwargs)

    return _with_method(part, "functional_call", functional_call)


def _revive(kind, state):
    module = kind.__new__(kind)
    vars(module).update(state)
    return module


@mutant(area=AREA, kills={"FP-057", "FP-153"})
def copies_are_not_flat(part):
    """Copies a flattened module as the plain one that it was."""

    def flatten(module, **options):
        plain = {name: copy.copy(value) for name, value in vars(module).items()}
        flat = part.flatten(module, **options)
        vars(module)["__reduce_ex__"] = lambda protocol: (_revive, (type(module), plain))
        return flat

    return overlay(part, flatten=flatten)


@mutant(area=AREA, kills={"FP-058"})
def casts_are_seen_late(part):
    """Lets the module be cast without taking the parameters back at once."""
    return _after(part, lambda module: vars(module).pop("_apply"))


def _register(owner, told, name, param):
    """Register a parameter of another shape where nobody is told of it."""
    known = owner._parameters.get(name)
    if param is None or known is None or param.shape == known.shape:
        told(name, param)
    else:
        owner._parameters[name] = param


@mutant(area=AREA, kills={"FP-059", "FP-153"})
def another_shape_is_let_in(part):
    """Takes a parameter of another shape as it comes, outside the vector."""

    def fault(module):
        for owner in module.modules():
            told = owner.register_parameter
            vars(owner)["register_parameter"] = partial(_register, owner, told)

    return _after(part, fault)


@mutant(area=AREA, kills={"FP-060", "FP-203"})
def frozen_parts_lie_with_the_trained(part):
    """Makes everything trainable, so that there is a vector less."""
    return _before(part, nn.Module.requires_grad_)


@mutant(area=AREA, kills={"FP-061"})
def strides_are_lost(part):
    """Lays every parameter out row by row."""

    def fault(module):
        for param in module.parameters():
            param.data = param.data.contiguous()

    return _before(part, fault)


@mutant(area=AREA, kills={"FP-062"})
def loading_fills_the_gaps(part):
    """Copies a vector as it is, with what it holds where no parameter lies."""

    def load_vector(flat, vector, segment=None):
        flat.as_vector(segment).copy_(vector)

    return _with_method(part, "load_vector", load_vector)


@mutant(area=AREA, kills={"FP-063"})
def shards_start_anywhere(part):
    """Cuts into equal ranges, whatever byte they start at."""

    def plan_shard(layout, **options):
        return part.plan_shard(dataclasses.replace(layout, align_numel=1), **options)

    return overlay(part, plan_shard=plan_shard)


def _look(module, args):
    if args[0].isnan().any():
        raise ValueError("the input is not a number")


@mutant(area=AREA, kills={"FP-064", "FP-152", "FP-153"})
def tracing_has_to_stop(part):
    """Decides by the input's values before every forward."""
    return _after(part, lambda module: module.register_forward_pre_hook(_look))


@mutant(area=AREA, kills={"FP-150"})
def state_dicts_hold_views_of_the_vector(part):
    """Gives what a module's class gives: every name in one storage."""

    def fault(module):
        for owner in module.modules():
            vars(owner).pop("_save_to_state_dict", None)

    return _after(part, fault)


def _saving(part, save):
    """The part with another way of saving each module, for as long as it is flat."""

    def fault(module):
        for owner in module.modules():
            vars(owner)["_save_to_state_dict"] = partial(save, owner)

    def unflatten(module):
        for owner in module.modules():
            del vars(owner)["_save_to_state_dict"]
        part.unflatten(module)

    return overlay(_after(part, fault), unflatten=unflatten)


def _save_copies(owner, destination, prefix, keep_vars):
    """Save a copy of each parameter, which reads the same and is not the parameter's memory."""
    type(owner)._save_to_state_dict(owner, destination, prefix, keep_vars)
    for name, value in destination.items():
        destination[name] = value.detach().clone()


@mutant(area=AREA, kills={"FP-150"})
def state_dicts_are_copied(part):
    """Makes tensors look apart by copying them."""
    return _saving(part, _save_copies)


def _save_stretches(owner, destination, prefix, keep_vars):
    """Cut stretches of the storage that the parameters themselves have."""
    type(owner)._save_to_state_dict(owner, destination, prefix, keep_vars)
    for name, param in owner._parameters.items():
        if param is not None and not keep_vars:
            start = param.storage_offset() * param.itemsize
            stretch = param.untyped_storage()[start : start + param.nbytes]
            empty = torch.empty(0, dtype=param.dtype, device=param.device)
            destination[prefix + name] = empty.set_(stretch, 0, param.shape, param.stride())


@mutant(area=AREA, kills={"FP-151"})
def state_dicts_lose_their_memory(part):
    """Leaves what it gave behind when the storage is moved."""
    return _saving(part, _save_stretches)


_watched = WeakIdKeyDictionary()


def _look_up(module, name, value):
    """Look whether a module is one of those that were flattened."""
    _watched.get(module)


@mutant(area=AREA, kills={"FP-152"})
def every_module_of_the_process_is_watched(part):
    """Has torch call for every module put into any other, and never takes that back."""

    def fault(module):
        nn.modules.module.register_module_module_registration_hook(_look_up)

    return _after(part, fault)


@mutant(area=AREA, kills={"FP-153"})
def unflattened_parameters_are_views_still(part):
    """Takes everything off the module and leaves its parameters where they lie."""

    def unflatten(module):
        lying = [(param, param.data) for param in module.parameters()]
        part.unflatten(module)
        for param, data in lying:
            param.data = data

    return overlay(part, unflatten=unflatten)


@mutant(area=AREA, kills={"FP-153"})
def unflattening_loses_gradients(part):
    """Clears the gradients on the way."""

    def unflatten(module):
        module.zero_grad()
        part.unflatten(module)

    return overlay(part, unflatten=unflatten)


@mutant(area=AREA, kills={"FP-153"})
def unflattening_leaves_a_hook(part):
    """Forgets what it placed on the root."""

    def unflatten(module):
        part.unflatten(module)
        module.register_forward_pre_hook(_look)

    return overlay(part, unflatten=unflatten)


class _Cut:
    """Before a forward, gives parameters the shapes they had when the module was flattened."""

    def __init__(self, module):
        self.shapes = {name: param.shape for name, param in module.named_parameters()}

    def __call__(self, module, args):
        for name, param in module.named_parameters():
            shape = self.shapes.get(name, param.shape)
            if param.shape != shape:
                param.data = param.detach().reshape(-1)[: shape.numel()].view(shape).clone()


@mutant(area=AREA, kills={"FP-153", "FP-154"})
def another_size_is_cut(part):
    """Keeps the planned shapes by dropping what does not fit; leaves its hook behind."""
    return _before(part, lambda module: module.register_forward_pre_hook(_Cut(module)))


@mutant(area=AREA, kills={"FP-057", "FP-153", "FP-155"})
def later_names_are_overlooked(part):
    """Registers a name that was not there without a word to the flat view."""

    def register(owner, told, name, param):
        if name in owner._parameters:
            told(name, param)
        else:
            nn.Module.register_parameter(owner, name, param)

    def fault(module):
        for owner in module.modules():
            told = owner.register_parameter
            vars(owner)["register_parameter"] = partial(register, owner, told)

    return _after(part, fault)


def _take_in(module, args):
    """Copy whatever is registered now into the vector, and register it."""
    for name, param in module.named_parameters():
        home = module.__dict__["_homes"].get(name)
        if home is not None and home.shape == param.shape and param is not home:
            with torch.no_grad():
                home.copy_(param)


@mutant(area=AREA, kills={"FP-056", "FP-153", "FP-155"})
def parameters_of_a_call_are_taken_in(part):
    """Takes whatever is registered at a forward for the module's own."""

    def fault(module):
        module.__dict__["_homes"] = dict(module.named_parameters())
        module.register_forward_pre_hook(_take_in)

    return _after(part, fault)


@mutant(area=AREA, kills={"FP-196"})
def weights_of_two_modules_are_moved_twice(part):
    """Flattens a module whose weight another one has, and leaves that one its old memory."""

    def flatten(module, **options):
        try:
            return part.flatten(module, **options)
        except Exception:
            if any(True for _ in module.children()):
                raise
        for name, param in list(module.named_parameters(recurse=False)):
            twin = nn.Parameter(param.detach().clone())
            setattr(module, name, twin)
        return part.flatten(module, **options)

    return overlay(part, flatten=flatten)

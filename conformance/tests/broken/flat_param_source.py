"""Handles that break the source's behaviour; each fails exactly what it declares."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchparts_conformance.mutants import mutant, overlay

from .faults.flat_param import after, before, retype, with_handle


@mutant("FP-001")
def something_is_left_in_the_module(part):
    """Leaves an additional parameter in the module."""
    return after(
        part, lambda h, module, ps: module.register_parameter("mark", nn.Parameter(torch.ones(1)))
    )


@mutant("FP-002")
def flat_parameter_keeps_its_dtype(part):
    """Ignores every cast."""

    def assign(self: Tensor, value: Tensor) -> None:
        if value.dtype == self.dtype:
            Tensor.data.__set__(self, value)

    data = property(Tensor.data.__get__, assign)
    return after(part, lambda handle, module, params: retype(handle, data=data))


@mutant("FP-003")
def empty_list_is_accepted(part):
    """Makes a handle without parameters."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, params, *args, **kwargs):
            if list(params):
                super().__init__(params, *args, **kwargs)

    return with_handle(part, Faulty)


@mutant("FP-004")
def empty_module_is_not_wrapped(part):
    """Returns a module without parameters unwrapped."""

    def fully_shard(module, *args, **kwargs):
        empty = not list(module.parameters())
        return module if empty else part.fully_shard(module, *args, **kwargs)

    return overlay(part, fully_shard=fully_shard)


def _miscount(part, *, tied):
    def fault(handle, module, params):
        if tied is bool(handle.flat_param._shared_param_infos):
            retype(handle, numel=lambda self: Tensor.numel(self) + 1)

    return after(part, fault)


@mutant("FP-001 FP-005 FP-010 FP-011 FP-019 FP-028")
def an_element_too_many(part):
    """Counts one element too many."""
    return _miscount(part, tied=False)


@mutant("FP-006")
def tied_parameters_are_counted_again(part):
    """Counts tied parameters more than once."""
    return _miscount(part, tied=True)


@mutant("FP-007 FP-013")
def first_layer_is_scaled(part):
    """Computes an untied model with other weights."""

    def fault(handle, module, params):
        if hasattr(module, "embed") and not handle.flat_param._shared_param_infos:
            weight = module.embed.weight
            module.embed.weight = weight + (weight * 0.5).detach()

    return after(part, fault)


def _replace_shared(part, make):
    def fault(handle, module, params):
        for info in handle.flat_param._shared_param_infos:
            setattr(info.module, info.param_name, make(getattr(info.module, info.param_name)))

    return after(part, fault)


@mutant("FP-008 FP-009")
def further_places_are_empty(part):
    """Puts zeros at the other places of a tied parameter."""
    return _replace_shared(part, torch.zeros_like)


@mutant("FP-009")
def further_places_do_not_learn(part):
    """Detaches a tied parameter at its second place."""
    return _replace_shared(part, Tensor.detach)


@mutant("FP-010 FP-011")
def nothing_is_aligned(part):
    """Places parameters without padding."""

    class Faulty(part.FlatParamHandle):
        def _plan(self, specs, aligned_numel):
            return super()._plan(specs, 0)

    return with_handle(part, Faulty)


@mutant("FP-011")
def alignment_follows_the_stored_dtype(part):
    """Aligns for float32 although forward uses float16."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, *args, mp_param_dtype=None, **kwargs):
            super().__init__(*args, **kwargs)

    return with_handle(part, Faulty)


@mutant("FP-010 FP-011 FP-012")
def last_element_is_left_out(part):
    """Treats a range's last index as exclusive."""

    class Faulty(part.FlatParamHandle):
        def _get_shard_metadata(self, start, end):
            return super()._get_shard_metadata(start, end - 1)

    return with_handle(part, Faulty)


@mutant("FP-009 FP-013")
def gradient_is_in_the_wrong_order(part):
    """Reverses the flat gradient."""
    return after(
        part,
        lambda handle, module, params: (
            handle.flat_param.requires_grad and handle.flat_param.register_hook(lambda g: g.flip(0))
        ),
    )


@mutant("FP-014 FP-019")
def ranks_hold_each_others_shards(part):
    """Gives the first rank the last shard."""

    class Faulty(part.FlatParamHandle):
        @staticmethod
        def _get_shard(tensor, rank, world_size):
            return part.FlatParamHandle._get_shard(tensor, world_size - 1 - rank, world_size)

    return with_handle(part, Faulty)


@mutant("FP-015")
def integers_are_flattened(part):
    """Accepts integer parameters."""

    class Faulty(part.FlatParamHandle):
        def _check(self, params):
            if params[0].dtype != torch.int64:
                super()._check(params)

    return with_handle(part, Faulty)


@mutant("FP-016")
def dtypes_are_cast_silently(part):
    """Casts all parameters to the dtype of the first one."""

    def fault(params, module):
        for param in params:
            param.data = param.data.to(params[0].dtype)
        return params

    return before(part, fault)


@mutant("FP-017")
def frozen_parameters_are_thawed(part):
    """Makes frozen parameters trainable."""

    def fault(params, module):
        for param in params:
            param.requires_grad_(param.requires_grad or param.is_floating_point())
        return params

    return before(part, fault)


@mutant("FP-019")
def only_the_own_part_is_gathered(part):
    """Leaves out the other ranks' shards."""

    class Faulty(part.FlatParamHandle):
        def unshard(self):
            sharded = self.needs_unshard()
            super().unshard()
            if sharded and self.world_size > 1:
                size = self.flat_param._local_shard.numel()
                self.flat_param.data[: size * self.rank] = 0
                self.flat_param.data[size * (self.rank + 1) :] = 0

    return with_handle(part, Faulty)

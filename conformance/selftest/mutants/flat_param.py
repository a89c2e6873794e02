"""Broken implementations of the area flat-param; each fails exactly what it declares."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchparts_conformance.mutants import mutant, overlay

AREA = "flat-param"


def _with_handle(part, handle):
    """The part with another handle, under the name that its messages carry."""
    handle.__name__ = "FlatParamHandle"
    return overlay(part, FlatParamHandle=handle)


def _after(part, fault):
    """The part with a handle to which something is done after construction."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, params, module, *args, **kwargs):
            params = list(params)
            super().__init__(params, module, *args, **kwargs)
            fault(self, module, params)

    return _with_handle(part, Faulty)


def _before(part, fault):
    """The part with a handle whose parameters something is done to first."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, params, module, *args, **kwargs):
            super().__init__(fault(list(params), module), module, *args, **kwargs)

    return _with_handle(part, Faulty)


def _retype(handle, **names):
    """Give the flat parameter a class with other methods."""
    kind = type(handle.flat_param)
    handle.flat_param.__class__ = type(kind.__name__, (kind,), names)


@mutant(area=AREA, kills={"FP-001"})
def something_is_left_in_the_module(part):
    """Leaves a parameter of its own beside the flat one."""
    return _after(
        part, lambda h, module, ps: module.register_parameter("mark", nn.Parameter(torch.ones(1)))
    )


@mutant(area=AREA, kills={"FP-002"})
def flat_parameter_keeps_its_dtype(part):
    """Ignores every cast."""

    def assign(self: Tensor, value: Tensor) -> None:
        if value.dtype == self.dtype:
            Tensor.data.__set__(self, value)

    data = property(Tensor.data.__get__, assign)
    return _after(part, lambda handle, module, params: _retype(handle, data=data))


@mutant(area=AREA, kills={"FP-003"})
def empty_list_is_accepted(part):
    """Makes a handle of nothing."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, params, *args, **kwargs):
            if list(params):
                super().__init__(params, *args, **kwargs)

    return _with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-004"})
def empty_module_is_not_wrapped(part):
    """Gives a module without parameters back as it is."""

    def fully_shard(module, *args, **kwargs):
        empty = not list(module.parameters())
        return module if empty else part.fully_shard(module, *args, **kwargs)

    return overlay(part, fully_shard=fully_shard)


def _miscount(part, *, tied):
    def fault(handle, module, params):
        if tied is bool(handle.flat_param._shared_param_infos):
            _retype(handle, numel=lambda self: Tensor.numel(self) + 1)

    return _after(part, fault)


@mutant(area=AREA, kills={"FP-001", "FP-005", "FP-010", "FP-011", "FP-019", "FP-028", "FP-030"})
def an_element_too_many(part):
    """Counts one element more than there is."""
    return _miscount(part, tied=False)


@mutant(area=AREA, kills={"FP-006"})
def tied_parameters_are_counted_again(part):
    """Counts more than the tied parameters once."""
    return _miscount(part, tied=True)


@mutant(area=AREA, kills={"FP-007", "FP-013", "FP-020"})
def first_layer_is_scaled(part):
    """Computes an untied model with other weights."""

    def fault(handle, module, params):
        if hasattr(module, "embed") and not handle.flat_param._shared_param_infos:
            weight = module.embed.weight
            module.embed.weight = weight + (weight * 0.5).detach()

    return _after(part, fault)


def _replace_shared(part, make):
    def fault(handle, module, params):
        for info in handle.flat_param._shared_param_infos:
            setattr(info.module, info.param_name, make(getattr(info.module, info.param_name)))

    return _after(part, fault)


@mutant(area=AREA, kills={"FP-008", "FP-009"})
def further_places_are_empty(part):
    """Puts zeros where a tied parameter appears again."""
    return _replace_shared(part, torch.zeros_like)


@mutant(area=AREA, kills={"FP-009"})
def further_places_do_not_learn(part):
    """Cuts a tied parameter's second place from the gradient."""
    return _replace_shared(part, Tensor.detach)


@mutant(area=AREA, kills={"FP-010", "FP-011"})
def nothing_is_aligned(part):
    """Places parameters without padding."""

    class Faulty(part.FlatParamHandle):
        def _plan(self, specs, aligned_numel):
            return super()._plan(specs, 0)

    return _with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-011"})
def alignment_follows_the_stored_dtype(part):
    """Aligns for float32 where the forward is in float16."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, *args, mp_param_dtype=None, **kwargs):
            super().__init__(*args, **kwargs)

    return _with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-010", "FP-011", "FP-012"})
def last_element_is_left_out(part):
    """Takes a range's end for one past its last element."""

    class Faulty(part.FlatParamHandle):
        def _get_shard_metadata(self, start, end):
            return super()._get_shard_metadata(start, end - 1)

    return _with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-009", "FP-013"})
def gradient_is_in_the_wrong_order(part):
    """Turns the flat gradient round."""
    return _after(
        part,
        lambda handle, module, params: (
            handle.flat_param.requires_grad and handle.flat_param.register_hook(lambda g: g.flip(0))
        ),
    )


@mutant(area=AREA, kills={"FP-014", "FP-019"})
def ranks_hold_each_others_shards(part):
    """Gives the first rank the last part."""

    class Faulty(part.FlatParamHandle):
        @staticmethod
        def _get_shard(tensor, rank, world_size):
            return part.FlatParamHandle._get_shard(tensor, world_size - 1 - rank, world_size)

    return _with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-015"})
def integers_are_flattened(part):
    """Takes integers for floats."""

    class Faulty(part.FlatParamHandle):
        def _check(self, params):
            if params[0].dtype != torch.int64:
                super()._check(params)

    return _with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-016"})
def dtypes_are_cast_silently(part):
    """Casts all parameters to the first one's dtype."""

    def fault(params, module):
        for param in params:
            param.data = param.data.to(params[0].dtype)
        return params

    return _before(part, fault)


@mutant(area=AREA, kills={"FP-017"})
def frozen_parameters_are_thawed(part):
    """Trains what was frozen."""

    def fault(params, module):
        for param in params:
            param.requires_grad_(param.requires_grad or param.is_floating_point())
        return params

    return _before(part, fault)


@mutant(area=AREA, kills={"FP-018", "FP-029"})
def flat_parameter_has_no_type(part):
    """Has a type that no flat parameter is of."""

    class FlatParameter(nn.Parameter):
        pass

    return overlay(part, FlatParameter=FlatParameter)


@mutant(area=AREA, kills={"FP-019"})
def only_the_own_part_is_gathered(part):
    """Leaves the other ranks' parts out."""

    class Faulty(part.FlatParamHandle):
        def unshard(self):
            sharded = self.needs_unshard()
            super().unshard()
            if sharded and self.world_size > 1:
                size = self.flat_param._local_shard.numel()
                self.flat_param.data[: size * self.rank] = 0
                self.flat_param.data[size * (self.rank + 1) :] = 0

    return _with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-020"})
def process_group_is_needed(part):
    """Asks the process group for its rank, whether there is one or not."""

    class Faulty(part.FlatParamHandle):
        def __init__(self, *args, **kwargs):
            group = kwargs.get("process_group", args[8] if len(args) > 8 else None)
            if args and not list(args[0]):
                super().__init__(*args, **kwargs)
            group.rank()
            super().__init__(*args, **kwargs)

    return _with_handle(part, Faulty)


def _refuse(part, condition, error):
    def fault(params, module):
        if any(map(condition, params)):
            raise error
        return params

    return _before(part, fault)


@mutant(area=AREA, kills={"FP-021"})
def holes_are_read(part):
    """Takes a parameter's memory for dense."""

    def fault(params, module):
        for param in params:
            if param.dim() == 2 and param.stride(0) > param.shape[1] and param.stride(1) == 1:
                param.data = param.data.as_strided((param.numel(),), (1,)).view(param.shape)
        return params

    return _before(part, fault)


@mutant(area=AREA, kills={"FP-022"})
def scalars_are_refused(part):
    """Asks every parameter for its last dimension."""
    return _refuse(part, lambda param: param.dim() == 0, IndexError("tensor has no dimensions"))


@mutant(area=AREA, kills={"FP-023"})
def complex_is_refused(part):
    """Takes complex numbers for integers."""
    error = ValueError("Cannot flatten integer dtype tensors")
    return _refuse(part, torch.is_complex, error)


@mutant(area=AREA, kills={"FP-024"})
def eight_bit_floats_are_refused(part):
    """Multiplies in a dtype that cannot."""
    error = RuntimeError("mul is not implemented")
    return _refuse(part, lambda param: param.dtype == torch.float8_e4m3fn, error)


@mutant(area=AREA, kills={"FP-025"})
def expanded_parameters_are_refused(part):
    """Reads as many elements as the shape has from a storage of one."""
    error = RuntimeError("out of bounds for storage")
    return _refuse(part, lambda param: param.dim() > 0 and param.stride(0) == 0, error)


@mutant(area=AREA, kills={"FP-026"})
def foreign_parameters_are_dropped(part):
    """Flattens what it finds and forgets the rest."""

    def fault(params, module):
        own = {id(param) for param in module.parameters()}
        return [param for param in params if id(param) in own]

    return _before(part, fault)


@mutant(area=AREA, kills={"FP-027"})
def padding_is_42(part):
    """Fills padding with a number that reductions see."""

    def fault(handle, module, params):
        for (start, last), gap in zip(
            handle._get_flat_param_offsets(), handle.flat_param._is_padding_mask, strict=True
        ):
            if gap:
                handle.flat_param.data[start : last + 1] = 42

    return _after(part, fault)


@mutant(area=AREA, kills={"FP-028"})
def flattened_modules_cannot_be_copied(part):
    """Leaves the copy to a module full of computed tensors."""
    return _after(part, lambda handle, module, params: module.__dict__.pop("__deepcopy__"))


@mutant(area=AREA, kills={"FP-029"})
def saving_forgets_the_names(part):
    """Saves the values of a flat parameter and nothing else."""

    def reduce(self: Any, protocol: Any) -> Any:
        return part.FlatParameter, (self.detach(),)

    return _after(part, lambda handle, module, params: _retype(handle, __reduce_ex__=reduce))


@mutant(area=AREA, kills={"FP-030"})
def offloading_needs_an_accelerator(part):
    """Pins memory where there is no device to copy to."""

    class Faulty(part.FlatParamHandle):
        def init_flat_param_attributes(self):
            if self._offload_params:
                raise RuntimeError("Cannot access accelerator device when none is available.")
            super().init_flat_param_attributes()

    return _with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-031"})
def parameters_are_copied(part):
    """Keeps the parameters it was given beside the flat one."""

    def fault(handle, module, params):
        for param in params:
            param.data = param.data.clone()

    return _after(part, fault)


@mutant(area=AREA, kills={"FP-033"})
def shared_memory_is_parted(part):
    """Copies each parameter first, so that none shares memory."""

    def fault(params, module):
        pointers = {param.untyped_storage().data_ptr() for param in params}
        if len(pointers) < len(params):
            for param in params:
                param.data = param.data.clone()
        return params

    return _before(part, fault)


class _SixFields(NamedTuple):
    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


@mutant(area=AREA, kills={"FP-032"})
def metadata_needs_all_six_fields(part):
    """Knows only the newest form of the metadata."""
    return overlay(part, FlatParamShardMetadata=_SixFields)

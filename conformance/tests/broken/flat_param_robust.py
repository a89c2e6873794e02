"""Handles with a fault in what the source left open: unusual parameters, copies, metadata."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchparts_conformance.mutants import mutant, overlay

from .faults.flat_param import after, before, retype, with_handle

AREA = "flat-param"


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

    return with_handle(part, Faulty)


def _refuse(part, condition, error):
    def fault(params, module):
        if any(map(condition, params)):
            raise error
        return params

    return before(part, fault)


@mutant(area=AREA, kills={"FP-021"})
def holes_are_read(part):
    """Takes a parameter's memory for dense."""

    def fault(params, module):
        for param in params:
            if param.dim() == 2 and param.stride(0) > param.shape[1] and param.stride(1) == 1:
                param.data = param.data.as_strided((param.numel(),), (1,)).view(param.shape)
        return params

    return before(part, fault)


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

    return before(part, fault)


@mutant(area=AREA, kills={"FP-027"})
def padding_is_42(part):
    """Fills padding with a number that reductions see."""

    def fault(handle, module, params):
        for (start, last), gap in zip(
            handle._get_flat_param_offsets(), handle.flat_param._is_padding_mask, strict=True
        ):
            if gap:
                handle.flat_param.data[start : last + 1] = 42

    return after(part, fault)


@mutant(area=AREA, kills={"FP-028"})
def flattened_modules_cannot_be_copied(part):
    """Leaves the copy to a module full of computed tensors."""
    return after(part, lambda handle, module, params: module.__dict__.pop("__deepcopy__"))


@mutant(area=AREA, kills={"FP-029"})
def saving_forgets_the_names(part):
    """Saves the values of a flat parameter and nothing else."""

    def reduce(self: Any, protocol: Any) -> Any:
        return part.FlatParameter, (self.detach(),)

    return after(part, lambda handle, module, params: retype(handle, __reduce_ex__=reduce))


@mutant(area=AREA, kills={"FP-030"})
def offloading_needs_an_accelerator(part):
    """Pins memory where there is no device to copy to."""

    class Faulty(part.FlatParamHandle):
        def init_flat_param_attributes(self):
            if self._offload_params:
                raise RuntimeError("Cannot access accelerator device when none is available.")
            super().init_flat_param_attributes()

    return with_handle(part, Faulty)


@mutant(area=AREA, kills={"FP-031"})
def parameters_are_copied(part):
    """Keeps the parameters it was given beside the flat one."""

    def fault(handle, module, params):
        for param in params:
            param.data = param.data.clone()

    return after(part, fault)


@mutant(area=AREA, kills={"FP-033"})
def shared_memory_is_parted(part):
    """Copies each parameter first, so that none shares memory."""

    def fault(params, module):
        pointers = {param.untyped_storage().data_ptr() for param in params}
        if len(pointers) < len(params):
            for param in params:
                param.data = param.data.clone()
        return params

    return before(part, fault)


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

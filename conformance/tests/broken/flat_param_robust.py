"""Handles with faults for unusual parameters, copies and metadata."""

from __future__ import annotations

from torchparts_conformance.mutants import mutant

from .faults.flat_param import after, before


def _refuse(part, condition, error):
    def fault(params, module):
        if any(map(condition, params)):
            raise error
        return params

    return before(part, fault)


@mutant("FP-021")
def holes_are_read(part):
    """Treats every parameter's memory as dense."""

    def fault(params, module):
        for param in params:
            if param.dim() == 2 and param.stride(0) > param.shape[1] and param.stride(1) == 1:
                param.data = param.data.as_strided((param.numel(),), (1,)).view(param.shape)
        return params

    return before(part, fault)


@mutant("FP-022")
def scalars_are_refused(part):
    """Reads the last dimension of every parameter."""
    return _refuse(part, lambda param: param.dim() == 0, IndexError("tensor has no dimensions"))


@mutant("FP-025")
def expanded_parameters_are_refused(part):
    """Reads as many elements as the shape has from a storage of one element."""
    error = RuntimeError("out of bounds for storage")
    return _refuse(part, lambda param: param.dim() > 0 and param.stride(0) == 0, error)


@mutant("FP-026")
def foreign_parameters_are_dropped(part):
    """Silently drops parameters of other modules."""

    def fault(params, module):
        own = {id(param) for param in module.parameters()}
        return [param for param in params if id(param) in own]

    return before(part, fault)


@mutant("FP-028")
def flattened_modules_cannot_be_copied(part):
    """Copies a module that holds computed tensors, which raises."""
    return after(part, lambda handle, module, params: module.__dict__.pop("__deepcopy__"))


@mutant("FP-031")
def parameters_are_copied(part):
    """Keeps the original parameters in addition to the flat one."""

    def fault(handle, module, params):
        for param in params:
            param.data = param.data.clone()

    return after(part, fault)


@mutant("FP-033")
def shared_memory_is_parted(part):
    """Copies each parameter first, so that no two share memory."""

    def fault(params, module):
        pointers = {param.untyped_storage().data_ptr() for param in params}
        if len(pointers) < len(params):
            for param in params:
                param.data = param.data.clone()
        return params

    return before(part, fault)

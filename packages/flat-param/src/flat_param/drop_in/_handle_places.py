"""The handle's checks and the places of its parameters in the module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .._errors import ParameterError
from ..layout._spec import ParamSpec, place_of
from ._flat_parameter import FlatParameter, ParamInfo, ShardParamInfo, SharedParamInfo


def refusal(first: Tensor, tensor: Tensor, *, same_grad: bool) -> str:
    """Why two tensors cannot share a flat parameter, in torch's words; empty where they can."""
    if isinstance(tensor, FlatParameter):
        return "Cannot flatten a `FlatParameter`"
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return "Cannot flatten integer dtype tensors"
    if tensor.dtype != first.dtype:
        return f"Must flatten tensors with uniform dtype but got {first.dtype} and {tensor.dtype}"
    if same_grad and tensor.requires_grad != first.requires_grad:
        return "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
    if tensor.device != first.device:
        return (
            "Must flatten tensors on the same device but got both "
            f"{first.device} and {tensor.device}"
        )
    return ""


def check_found(
    params: Sequence[nn.Parameter], found: Sequence[nn.Parameter], module: nn.Module
) -> None:
    """Refuse parameters that the module does not own.

    Raises:
        ParameterError: lists them by position and shape.
    """
    known = {id(param) for param in found}
    missing = [index for index, param in enumerate(params) if id(param) not in known]
    if missing:
        shapes = ", ".join(f"params[{index}] {tuple(params[index].shape)}" for index in missing)
        raise ParameterError(
            f"flat_param.FlatParamHandle: `params` were not found in `module`'s tree: {shapes}, "
            f"but {type(module).__name__} must own all of them. Leave foreign parameters out."
        )


def shard_part(first: int, last: int, start: int, end: int) -> ShardParamInfo:
    """What `[start, end]` holds of a parameter at `[first, last]`."""
    if not (start <= last and end >= first):
        return ShardParamInfo(False, None, None, None, None)
    begin, stop = max(start - first, 0), min(last, end) - first
    return ShardParamInfo(True, max(first - start, 0), stop - begin + 1, begin, stop)


def param_info(module: nn.Module, name: str) -> ParamInfo:
    """The place that a qualified name stands for."""
    path, owner, attribute = place_of(module, name)
    return ParamInfo(attribute, owner, path)


def shared_param_infos(
    module: nn.Module, specs: Sequence[ParamSpec]
) -> tuple[SharedParamInfo, ...]:
    """The further places of tied parameters."""
    return tuple(
        SharedParamInfo(*param_info(module, alias), *param_info(module, spec.name))
        for spec in specs
        for alias in spec.aliases
    )


def set_attribute(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter by a tensor, or the other way round."""
    if hasattr(module, name):
        delattr(module, name)
    setattr(module, name, value)

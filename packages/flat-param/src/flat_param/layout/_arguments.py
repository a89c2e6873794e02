"""What `fully_shard` is given, looked at before anything else is asked of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .._errors import ParameterError, StateError
from ._spec import ParamSpec
from ._strategy import MixedPrecision

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def check_module(module: object) -> None:
    """Refuse what is never called, so that its parameters would never be whole.

    Raises:
        StateError: it is no module, or a container without a `forward` of its own.
    """
    if not isinstance(module, nn.Module):
        what = module.__name__ if isinstance(module, type) else f"a {type(module).__name__}"
        raise StateError(
            f"flat_param.fully_shard: module is {what}, but it must be one module. "
            "Pass an instance; shard each of several, and then the module around them."
        )
    if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
        raise StateError(
            f"flat_param.fully_shard: {type(module).__name__} has no forward, but parameters are "
            "whole while a unit is called. Shard the modules in it, and then the one around it."
        )


def check_precision(precision: object, policy: object = None) -> MixedPrecision:
    """The same, what FSDP2's policy says, or no precision of its own.

    Raises:
        StateError: it is anything else, or both are given.
    """
    if policy is not None:
        if precision is not None:
            raise StateError(
                "flat_param.fully_shard: both mp_policy and mixed_precision are given, but a unit "
                "computes in one dtype. Leave one out."
            )
        return _precision_of(policy)
    if precision is None:
        return MixedPrecision()
    if not isinstance(precision, MixedPrecision):
        raise StateError(
            f"flat_param.fully_shard: mixed_precision is {precision!r}, but it has a dtype for "
            "each purpose. Pass flat_param.MixedPrecision(param_dtype=..., reduce_dtype=...)."
        )
    return precision


def _precision_of(policy: object) -> MixedPrecision:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not isinstance(policy, MixedPrecisionPolicy):
        raise StateError(
            f"flat_param.fully_shard: mp_policy is {policy!r}, but it has a dtype for each "
            "purpose. Pass torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=...)."
        )
    return MixedPrecision(
        policy.param_dtype,
        policy.reduce_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        output_dtype=policy.output_dtype,
    )


def check_offload(policy: object) -> tuple[bool, bool]:
    """Whether shards are kept in CPU memory, and whether that is page-locked.

    Raises:
        StateError: it is none of FSDP2's policies.
    """
    if policy is None:
        return False, False
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if not isinstance(policy, OffloadPolicy):
        raise StateError(
            f"flat_param.fully_shard: offload_policy is {policy!r}, but it says where shards are "
            "kept. Pass torch.distributed.fsdp.CPUOffloadPolicy() for CPU memory."
        )
    return (True, policy.pin_memory) if isinstance(policy, CPUOffloadPolicy) else (False, False)


def check_placement(shard_placement_fn: object) -> None:
    """Refuse to cut along a dimension.

    Raises:
        StateError: it is not None.
    """
    if shard_placement_fn is not None:
        raise StateError(
            "flat_param.fully_shard: shard_placement_fn is given, but shards are ranges of a flat "
            "buffer and cut no dimension. Leave it out; boundary= says where a parameter may be "
            "cut."
        )


def check_no_grads(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse gradients of whole parameters, of which a piece would be left.

    Raises:
        ParameterError: names the first parameter that has one.
    """
    for name, param in named:
        if param.grad is not None:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' has a gradient of the whole tensor, "
                "but each rank is going to have a piece of it. Call zero_grad() before sharding."
            )


def one_device(specs: tuple[ParamSpec, ...], params: tuple[nn.Parameter, ...]) -> torch.device:
    """Where a unit computes.

    Raises:
        ParameterError: its parameters are on two devices.
    """
    homes = [torch.device("cpu") if param.is_meta else param.device for param in params]
    for spec, home in zip(specs, homes, strict=True):
        if home != homes[0]:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{spec.name}' is on {home} and "
                f"'{specs[0].name}' on {homes[0]}, but a unit computes on one device. "
                "Pass device=, or move the module first."
            )
    return homes[0] if homes else torch.device("cpu")

"""Checks of arguments, before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from .._errors import ParameterError, StateError
from .._torch_compat import grad_hooks_of
from ._spec import ParamSpec, check_one_device


def check_is_module(function: str, module: object) -> None:
    """Refuse swapped arguments, and a class or a state dict instead of a module."""
    if not isinstance(module, nn.Module):
        raise StateError(
            f"flat_param.{function}: module is {_kind_of(module)}, but it must be an instance of "
            "nn.Module. Pass the module as the first argument."
        )


def path_of(function: str, path: object) -> Path:
    """The path of a checkpoint."""
    if not isinstance(path, (str, os.PathLike)):
        raise StateError(
            f"flat_param.{function}: path is {_kind_of(path)}, but it must be the path of a "
            "checkpoint, as text or a Path. Pass it as the second argument."
        )
    return Path(path)


def check_is_optimizer(function: str, optimizer: object) -> None:
    """Refuse a class, a state dict or a module that was passed as an optimizer."""
    if not hasattr(optimizer, "param_groups") or isinstance(optimizer, type):
        raise ParameterError(
            f"flat_param.{function}: optimizer is {_kind_of(optimizer)}, but it must be an "
            "optimizer of the module's parameters. Pass the optimizer itself, not its class or "
            "its state_dict(), or leave it out."
        )


def _kind_of(value: object) -> str:
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    return f"the class {name}" if isinstance(value, type) else f"of type {name}"


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def modules_of(modules: object) -> tuple[nn.Module, ...]:
    """The modules that become one unit; refuses modules that are never called."""
    found = tuple(modules) if isinstance(modules, (list, tuple)) else (modules,)
    for module in found:
        if not isinstance(module, nn.Module):
            raise StateError(
                f"flat_param.fully_shard: module is {_kind_of(module)}, but it must be a module or "
                "a list of modules. Pass an instance."
            )
        if isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward:
            raise StateError(
                f"flat_param.fully_shard: {type(module).__name__} has no forward, but a unit "
                "gathers its parameters when it is called. Shard the modules in it, then the one "
                "around it."
            )
        _check_params(module)
    if not found:
        raise StateError(
            "flat_param.fully_shard: the list of modules is empty, but a unit has at least one. "
            "Pass a module, or a list of modules."
        )
    for module in found:
        inside = [one for other in found if other is not module for one in other.modules()]
        if any(one is module for one in inside) or sum(one is module for one in found) > 1:
            raise StateError(
                f"flat_param.fully_shard: a {type(module).__name__} of the list is inside another "
                "module of the list, but they become one unit together. Pass the outer one alone."
            )
    return found


def _check_params(module: nn.Module) -> None:
    """Refuse parameters that cannot be moved into a buffer."""
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' has no shape yet, but it is cut. "
                "Run one forward first."
            )
        if torch.is_inference_mode_enabled() or param.is_inference():
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' was made, or is sharded, in inference "
                "mode, where tensors never get gradients. Build and shard outside of it, and use "
                "torch.no_grad() there."
            )


def check_offload(policy: object) -> tuple[bool, bool]:
    """Return whether shards are in CPU memory, and whether that memory is page-locked."""
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
    """Refuse to cut along a dimension."""
    if shard_placement_fn is not None:
        raise StateError(
            "flat_param.fully_shard: shard_placement_fn is given, but shards are ranges of a flat "
            "buffer and cut no dimension. Leave it out; boundary= says where a parameter may be "
            "cut."
        )


def check_no_grads(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters with gradients, which sharding would cut, or with hooks on them."""
    for name, param in named:
        if grad_hooks_of(param):
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' has a hook of register_hook, but "
                "autograd only sees unsharded parameters, so it would never be called. Use "
                "register_post_accumulate_grad_hook, which gets this rank's piece."
            )
        if param.grad is not None:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' has a gradient of the whole tensor, "
                "but each rank is going to have a piece of it. Call zero_grad() before sharding."
            )


def one_device(
    specs: tuple[ParamSpec, ...], params: tuple[nn.Parameter, ...], mesh: DeviceMesh | None
) -> torch.device:
    """The device of a unit's parameters; of the mesh for CPU and meta parameters."""
    homes = [torch.device("cpu") if param.is_meta else param.device for param in params]
    check_one_device("fully_shard", specs, homes)
    home = homes[0] if homes else torch.device("cpu")
    if home.type != "cpu" or mesh is None or mesh.device_type == "cpu":
        return home
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)

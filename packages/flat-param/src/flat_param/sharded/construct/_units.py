"""`fully_shard`: turn a module into a sharded unit, in place, by changing its class."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..._errors import ParameterError, StateError
from ..._torch_compat import set_pipeline_state, without_torch_function
from ...buffers._dtensors import check_places, local_of, place_of_dtensor
from ...buffers._overlap import check_apart
from ...buffers._owners import check_whole
from ...comm._agreement import agree, describe
from ...comm._groups import CommGroups, MeshGroups
from ...layout._arguments import (
    check_no_grads,
    check_offload,
    check_placement,
    modules_of,
    one_device,
)
from ...layout._boundary import Boundary, check_rules
from ...layout._layout import Segment, plan_segments
from ...layout._options import UnitOptions, precision_of
from ...layout._spec import ParamSpec, collect_params, place_of
from .._sharded_module import ShardedModule, checked_flag, sharded_class
from ..schedule._schedule import Schedule, on_grad
from ..state._first_step import install_step_hooks
from ..state._state_hooks import install_module_hooks
from ..tensor._param_piece import mark_replaced
from ..unit._by_hand import STOPPED, units_at_rest
from ..unit._segment import ShardedSegment
from ..unit._strays import watch_registrations
from ..unit._unit import ParamSite, Unit
from ._ignored import find_ignored, outside_units
from ._materialize import check_init, materialize, move_buffers

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module | list[Any])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    boundary: Boundary = "element",
    init_fn: Callable[[nn.Module], None] | None = None,
    shard_placement_fn: None = None,
) -> M:
    """Shard a module's parameters over ranks, in place, and return the module.

    Call it on inner modules first, then on the module around them, in the same way on every rank.
    Each inner module becomes a unit; the remaining parameters belong to the outer unit. Parameter
    objects stay the same, so an optimizer made before still trains them, and one made after gets
    this rank's pieces. DTensors are replaced by plain parameters, so make optimizers after that.
    Collective: every rank of the world must call it.

    Args:
        module: any module that is called, or a list of modules that become one unit; its parameters
            are on one device, or on meta.
        mesh: ranks to shard over. With two axes (replicate, shard) it is HSDP: parameters are
            replicated over the first and sharded over the second, which may have one rank. Meta
            and CPU parameters are moved to its device. Default: all ranks, and the parameters'
            device.
        reshard_after_forward: True frees full parameters between forward and backward (ZeRO-3),
            False keeps them (ZeRO-2). A number, as in FSDP2, is refused: use a mesh with two axes.
        mp_policy: torch's `MixedPrecisionPolicy`.
        offload_policy: torch's `CPUOffloadPolicy` keeps shards, gradients and optimizer state in
            CPU memory, page-locked by default.
        ignored_params: parameters that stay full and separate on each rank, with gradients that are
            not reduced. Those of units inside are ignored, too.
        boundary: "element", or "row", "tensor" or `Blocks` for optimizers that need those whole; or
            `by_name`, for each parameter.
        init_fn: called on each module whose meta parameters have been allocated; default:
            its own `reset_parameters`. Tensors of the module that have values keep them.
        shard_placement_fn: refused: shards are ranges of a flat buffer and cut no dimension.

    Returns:
        The module or the list. Each module is of a subclass of its class that has the methods of
        `ShardedModule`.

    Raises:
        ParameterError: a weight is tied to one in another unit, is flattened or has a gradient
            already, parameters share memory, devices are mixed, or an ignored one is not a
            parameter that the unit may ignore.
        StateError: the module is sharded already or is never called, there is no process group, or
            an argument is of another kind.
        CommError: ranks have different modules or settings, or one of them raised. Then nothing has
            changed on any rank. After an error of `init_fn`, or of an allocation, the module must
            be built again.
    """

    settings = {"reshard_after_forward": reshard_after_forward}

    def plan() -> tuple[_UnitPlan, list[str]]:
        modules = modules_of(module)
        check_placement(shard_placement_fn)
        checked_flag(reshard_after_forward, "fully_shard(reshard_after_forward=)")
        options = UnitOptions(precision_of(mp_policy), boundary, *check_offload(offload_policy))
        return _plan_unit(modules, options, mesh, groups, settings, ignored_params, init_fn)

    groups = MeshGroups.of(mesh)
    planned = agree(groups.meeting, plan)
    modules, root = planned.modules, planned.root
    for each in modules:
        object.__setattr__(each, "_flat_param", STOPPED)
    materialize(root, device=planned.device, init_fn=init_fn, ignored=planned.ignored)
    params = {spec.name: _as_planned(root, spec) for spec in planned.specs}
    schedule = Schedule()
    comms = groups.comms(log=schedule.log)
    move_buffers(root, planned.device)
    with without_torch_function():
        unit = _make_unit(planned, params, comms, schedule)
    unit.frees_after_forward = reshard_after_forward
    _join(unit, planned)
    install_step_hooks()
    watch_registrations()
    install_module_hooks(root, unit)
    for each in modules:
        each.__class__ = sharded_class(type(each))
        object.__setattr__(each, "_flat_param", unit)
        set_pipeline_state(each, partial(_finalize_backward, weakref.ref(each)))
    return module


def _finalize_backward(module_ref: weakref.ref[nn.Module]) -> None:
    module: Any = module_ref()
    if module is not None:
        module.finalize_backward()


def _join(unit: Unit, planned: _UnitPlan) -> None:
    """Join a unit and those inside it to one tree, and name all of them."""
    schedule = unit.schedule
    for nested in {each.schedule: None for each in planned.inner}:
        schedule.merge(nested)
    schedule.units.append(unit)
    classes = " and ".join(type(module).__name__ for module in planned.modules)
    unit.comms.name(f"the outermost unit ({classes})")
    paths: dict[Unit, list[str]] = {}
    for module in planned.modules if planned.inner else ():
        for path, child in module.named_modules():
            if path and isinstance(child, ShardedModule):
                paths.setdefault(child._flat_param, []).append(path)
    for each, found in paths.items():
        each.name = ", ".join(found)
        each.comms.name(f"unit '{each.name}'")
    schedule.log.reset()


@dataclass(frozen=True)
class _UnitPlan:
    """The plan of a `fully_shard` call, made before anything is changed.

    Attributes:
        modules: modules that become one unit.
        root: the module, or a container of all of them.
        options: of the unit.
        device: of its full parameters.
        specs: its parameters, without those of nested units.
        segments: their layout.
        inner: the nested units.
        ignored: parameters that it ignores, also those of nested units.
    """

    modules: tuple[nn.Module, ...]
    root: nn.Module
    options: UnitOptions
    device: torch.device
    specs: tuple[ParamSpec, ...]
    segments: tuple[Segment, ...]
    inner: tuple[Unit, ...]
    ignored: tuple[nn.Parameter, ...]


def _plan_unit(
    modules: tuple[nn.Module, ...],
    options: UnitOptions,
    mesh: DeviceMesh | None,
    groups: MeshGroups,
    others: Mapping[str, object],
    ignored_params: Iterable[nn.Parameter] | None,
    init_fn: Callable[[nn.Module], None] | None,
) -> tuple[_UnitPlan, list[str]]:
    """Check a module completely, and describe it for other ranks."""
    copies, world_size = [
        1 if each is None else dist.get_world_size(each)
        for each in (groups.replicate, groups.shard)
    ]
    module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    inner = tuple(units_at_rest(module, "fully_shard"))
    for each in modules:
        if isinstance(each, ShardedModule):
            raise StateError(
                f"flat_param.fully_shard: {type(each).__name__} is sharded already, but a module "
                "is one unit. Shard its parts first and then the module around them."
            )
    taken = [param for unit in inner for part in unit.parts for param in part.params]
    beside = [param for unit in inner for param in unit.ignored]
    given = () if ignored_params is None else ignored_params
    ignored = find_ignored(module, given, nested=beside)
    _check_ties(module, taken)
    specs, params = collect_params(module, ignored=[*taken, *ignored])
    specs = tuple(
        replace(spec, shape=tuple(local.shape), stride=local.stride())
        for spec, local in zip(specs, map(local_of, params), strict=True)
    )
    named = [(spec.name, param) for spec, param in zip(specs, params, strict=True)]
    check_whole("fully_shard", named)
    check_no_grads(named)
    check_apart("fully_shard", module, params)
    place = one_device(specs, params, mesh)
    check_rules(options.boundary, specs)
    segments = plan_segments(specs)
    settings: dict[str, object] = {
        **{field.name: getattr(options, field.name) for field in fields(options)},
        **others,
        "copies x ranks": f"{copies} x {world_size}",
        "nested units": len(inner),
    }
    places = {name: str(place_of_dtensor(param)) for name, param in named}
    settings["DTensors"] = {name: where for name, where in places.items() if where != "None"}
    check_init(module, init_fn=init_fn, ignored=ignored)
    process_groups = [each for each in (groups.shard, groups.replicate) if each is not None]
    ranks = [rank for each in process_groups for rank in dist.get_process_group_ranks(each)]
    check_places(named, ranks, me=dist.get_rank())
    planned = _UnitPlan(modules, module, options, place, specs, segments, inner, ignored)
    return planned, describe(specs, settings)


def _as_planned(module: nn.Module, spec: ParamSpec) -> nn.Parameter:
    """Return a planned parameter; `init_fn` may have filled it but not changed it otherwise."""
    param = module.get_parameter(spec.name)
    found = (tuple(local_of(param).shape), param.dtype, param.requires_grad)
    planned = (spec.shape, spec.dtype, spec.requires_grad)
    if found != planned:
        raise ParameterError(
            f"flat_param.fully_shard: parameter '{spec.name}' has shape, dtype and requires_grad "
            f"{found} after init_fn, but was planned with {planned}. Change it before sharding."
        )
    return param


def _check_ties(module: nn.Module, taken: Iterable[nn.Parameter]) -> None:
    """Refuse a parameter of a unit inside that is registered outside of it, too."""
    for name, param in outside_units(module, taken):
        named = module.named_parameters(remove_duplicate=False)
        inside = next(other for other, each in named if each is param and other != name)
        raise ParameterError(
            f"flat_param.fully_shard: parameter '{name}' is tied to '{inside}' in another unit, "
            "but tied parameters must share a unit. Shard their common parent only."
        )


def _make_unit(
    planned: _UnitPlan,
    params: dict[str, nn.Parameter],
    comms: CommGroups,
    schedule: Schedule,
) -> Unit:
    parts = [
        ShardedSegment(
            segment,
            [params[spec.name] for spec in segment.layout.specs],
            comms=comms,
            options=planned.options,
            device=planned.device,
            on_grad=on_grad,
        )
        for segment in planned.segments
    ]
    sites = []
    for part in parts:
        for index, spec in enumerate(part.segment.layout.specs):
            for _, owner, key in (place_of(planned.root, name) for name in spec.names):
                sites.append(ParamSite(owner._parameters, key, part, index))
    unit = Unit(
        parts,
        sites,
        comms=comms,
        options=planned.options,
        schedule=schedule,
        ignored=planned.ignored,
        modules=planned.modules,
    )
    for part in parts:
        for spec, param in zip(part.segment.layout.specs, part.params, strict=True):
            if param is not params[spec.name]:
                mark_replaced(params[spec.name], name=spec.name)
    unit.swap_out()  # a DTensor is replaced
    return unit

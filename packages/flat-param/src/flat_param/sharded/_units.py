"""`fully_shard` turns a module into a sharded unit, in place, by swapping its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._errors import ParameterError, StateError
from ..comm._agreement import Description, agree, describe
from ..comm._groups import (
    CommGroups,
    group_sizes,
    make_comm_groups,
    meeting_comms,
    ranks_together,
    strategy_for,
)
from ..layout._arguments import (
    check_module,
    check_no_grads,
    check_offload,
    check_placement,
    check_precision,
    one_device,
)
from ..layout._boundary import Boundary
from ..layout._boundary_rules import BoundaryRules, resolve
from ..layout._layout import Segment, plan_segments
from ..layout._shard import plan_shard
from ..layout._spec import ParamSpec, collect_params, place_of
from ..layout._strategy import MixedPrecision, Strategy, UnitOptions
from ..memory._dtensors import check_places, local_of, place_of_dtensor
from ..memory._ignored import find_ignored, own_ignored
from ..memory._overlap import check_apart
from ..memory._owners import (
    FLATTENED,
    IGNORED,
    UNIT,
    Owner,
    check_not_inside,
    check_owners,
    check_unowned,
)
from ._by_hand import units_at_rest
from ._guards import install_guards, mark_replaced
from ._half_sharded import half_sharded
from ._materialize import broadcast_module, cast_buffers, check_init, materialize
from ._param_sites import ParamSite
from ._schedule import Schedule
from ._sharded_module import ShardedModule
from ._sharded_params import ShardedParams
from ._state_hooks import install_module_hooks
from ._strays import watch_registrations
from ._switches import check_group_size, free_after_forward
from ._unit import Unit
from ._unit_call import sharded_class

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    module: M,
    *,
    strategy: Strategy | str | None = None,
    mesh: DeviceMesh | None = None,
    mixed_precision: MixedPrecision | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    boundary: Boundary | BoundaryRules = "element",
    forward_prefetch: bool = True,
    backward_prefetch: bool | str = True,
    reshard_after_forward: bool | int | None = None,
    device: torch.device | str | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
    ignored_params: Iterable[nn.Parameter] | None = None,
    shard_placement_fn: None = None,
) -> M:
    """Shard a module's parameters over ranks, in place, and return the module.

    Call it on inner modules first, then on the module around them, in the same way on every rank.
    Each inner module becomes a unit; the remaining parameters belong to the outer unit. Parameters
    keep their identity, so an optimizer made before still trains, and one made after sees this
    rank's pieces; a DTensor is replaced by a plain parameter, so make optimizers after that.
    Collective: every rank of the world must call it.

    Args:
        module: any kind that is called; its parameters are on one device, or on meta.
        strategy: what is divided between ranks, see `Strategy`; default: HYBRID_SHARD over a mesh
            with two axes, FULL_SHARD otherwise.
        mesh: ranks to shard over; for HYBRID_SHARD the axes (replicate, shard); default: all.
        mixed_precision: dtypes of computing and of summing gradients.
        mp_policy: the same as FSDP2 is told it.
        offload_policy: torch's `CPUOffloadPolicy` keeps shards, gradients and optimizer state in
            CPU memory, page-locked unless it says otherwise.
        boundary: "element", or "row", "tensor" or `Blocks` for optimizers that need those whole; or
            `by_name` or `by_class`, for each parameter.
        forward_prefetch: gather the next unit while this one computes, in forward.
        backward_prefetch: the same in backward; "BACKWARD_POST": once this one is freed.
        reshard_after_forward: as in `ShardedModule.set_reshard_after_forward`; default: as the
            strategy says.
        device: where to compute; default: where the parameters are, or the CPU for meta.
        init_fn: called on each module whose meta parameters have been allocated; default:
            its own `reset_parameters`.
        sync_module_states: start from the first rank's parameters and buffers.
        ignored_params: parameters that stay as they are: full, separate on each rank, with
            gradients that are not reduced. Those of units inside are left alone, too.
        shard_placement_fn: refused: shards are ranges of a flat buffer and cut no dimension.

    Returns:
        The module, of a subclass of its class that has the methods of `ShardedModule`.

    Raises:
        ParameterError: a weight is tied to one in another unit, is flattened or has a gradient
            already, parameters share memory, devices are mixed, or an ignored one is not a
            parameter that the unit may leave alone.
        StateError: the module is sharded already or is never called, there is no process group, or
            an argument is of another kind.
        CommError: ranks have different modules or settings, or one of them raised. Then nothing has
            changed on any rank.
    """

    def plan() -> _UnitPlan:
        check_module(module)
        check_placement(shard_placement_fn)
        precision = check_precision(mixed_precision, mp_policy)
        offloads, pins = check_offload(offload_policy)
        choices = (offloads, forward_prefetch, backward_prefetch, pins)
        # The boundary waits until it is known for what parameters.
        options = UnitOptions(strategy_for(strategy, mesh), precision, "element", *choices)
        copies = group_sizes(options.strategy, mesh)
        if reshard_after_forward is not None:
            check_group_size(reshard_after_forward, copies[1])
        settings = {
            "reshard_after_forward": reshard_after_forward,
            "sync_module_states": sync_module_states,
        }
        planned = _plan_unit(module, options, boundary, device, copies, settings, ignored_params)
        check_init(module, init_fn=init_fn, ignored=planned.ignored)
        ranks = ranks_together(options.strategy, mesh)
        named = [(spec.name, module.get_parameter(spec.name)) for spec in planned.specs]
        check_places(named, ranks, me=dist.get_rank())
        return planned

    planned = agree(meeting_comms(mesh), plan)
    materialize(module, device=device, init_fn=init_fn, ignored=planned.ignored)
    params = {spec.name: _as_planned(module, spec) for spec in planned.specs}
    schedule = Schedule()
    comms = make_comm_groups(planned.options.strategy, mesh, log=schedule.log)
    if sync_module_states:
        values = [local_of(param) for param in params.values()]
        broadcast_module(module, values, comms.reduce, comms.replicate)
    cls, before = type(module), _memory_of(module, params)
    module.__class__ = half_sharded(cls)
    try:
        unit = _make_unit(module, planned, params, comms, schedule)
        if reshard_after_forward is not None:
            free_after_forward([unit], reshard_after_forward)
        _join(module, unit, planned.inner, cls.__name__)
        install_guards()
        watch_registrations()
        install_module_hooks(module, unit)
        object.__setattr__(module, "_flat_param", unit)
        module.__class__ = sharded_class(ShardedModule, cls, {})
        if planned.options.mixed_precision.buffer_dtype is not None:
            cast_buffers(module, planned.options.mixed_precision.buffer_dtype)
    except BaseException:
        if _memory_of(module, params) == before:
            for name in ("_flat_param", "_flat_param_schedule"):
                module.__dict__.pop(name, None)
            module.__class__ = cls
        raise
    return module


def _memory_of(module: nn.Module, names: Iterable[str]) -> list[int]:
    return [local_of(module.get_parameter(name)).data_ptr() for name in names]


def _join(module: nn.Module, unit: Unit, inner: Sequence[Unit], name: str) -> None:
    """Make one tree of a unit and those inside it, and name them all."""
    schedule = unit.schedule
    for nested in inner:
        schedule.merge(nested.schedule)
    schedule.units.append(unit)
    unit.rename("", f"the outermost unit ({name})")
    for path, child in module.named_modules():
        if path and isinstance(child, ShardedModule):
            child._flat_param.rename(path, f"unit '{path}'")
    schedule.log.reset()


@dataclass(frozen=True)
class _UnitPlan:
    """What a call of `fully_shard` will do, known before anything is changed.

    Attributes:
        options: of the unit.
        device: where it computes.
        specs: its parameters; those of nested units are theirs.
        segments: how they are laid out.
        inner: the nested units.
        ignored: parameters that it leaves alone, those of nested units too.
        description: what every rank must have alike.
    """

    options: UnitOptions
    device: torch.device
    specs: tuple[ParamSpec, ...]
    segments: tuple[Segment, ...]
    inner: tuple[Unit, ...]
    ignored: tuple[nn.Parameter, ...]
    description: Description


def _plan_unit(
    module: nn.Module,
    options: UnitOptions,
    boundary: Boundary | BoundaryRules,
    device: torch.device | str | None,
    copies: tuple[int, int],
    others: Mapping[str, object],
    ignored_params: Iterable[nn.Parameter] | None,
) -> _UnitPlan:
    """Check everything that can be wrong with a module, and describe it for other ranks."""
    if isinstance(module, ShardedModule):
        raise StateError(
            f"flat_param.fully_shard: {type(module).__name__} is sharded already, but a module is "
            "one unit. Shard its parts first and then the module around them."
        )
    inner = tuple(units_at_rest(module))
    taken = [param for unit in inner for part in unit.parts for param in part.params]
    beside = [param for unit in inner for param in unit.ignored]
    given = () if ignored_params is None else ignored_params
    ignored = find_ignored(module, given, owned=taken, nested=beside)
    check_ties(module, ignored)
    specs, params = collect_params(module, ignored=[*taken, *ignored])
    specs = tuple(_local_spec(spec, param) for spec, param in zip(specs, params, strict=True))
    named = [(spec.name, param) for spec, param in zip(specs, params, strict=True)]
    check_no_grads(named)
    check_not_inside(module, named)
    check_owners("fully_shard", module, named, (UNIT, FLATTENED, IGNORED))
    check_unowned("fully_shard", named, FLATTENED)
    check_apart("fully_shard", module, params)
    place = one_device(specs, params) if device is None else torch.device(device)
    options = replace(options, boundary=resolve(boundary, specs, module))
    segments = tuple(plan_segments(specs)) if specs else ()
    for segment in segments:
        plan_shard(segment.layout, world_size=copies[1], boundary=options.boundary)
    settings: dict[str, object] = {
        **{field.name: getattr(options, field.name) for field in fields(options)},
        "strategy": options.strategy.value,
        **others,
        "copies x ranks": f"{copies[0]} x {copies[1]}",
        "nested units": len(inner),
    }
    places = {name: str(place_of_dtensor(param)) for name, param in named}
    settings["DTensors"] = {name: where for name, where in places.items() if where != "None"}
    description = describe(specs, settings)
    return _UnitPlan(options, place, specs, segments, inner, ignored, description)


def _local_spec(spec: ParamSpec, param: nn.Parameter) -> ParamSpec:
    local = local_of(param)
    return replace(spec, shape=tuple(local.shape), stride=local.stride())


def _as_planned(module: nn.Module, spec: ParamSpec) -> nn.Parameter:
    """The parameter that was planned, which `init_fn` may have filled but not changed otherwise.

    Raises:
        ParameterError: it is another than was planned.
    """
    param = module.get_parameter(spec.name)
    found = (tuple(local_of(param).shape), param.dtype, param.requires_grad)
    planned = (spec.shape, spec.dtype, spec.requires_grad)
    if found != planned:
        raise ParameterError(
            f"flat_param.fully_shard: parameter '{spec.name}' has shape, dtype and requires_grad "
            f"{found} after init_fn, but was planned with {planned}. Change it before sharding."
        )
    return param


def check_ties(module: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> None:
    """Refuse a parameter that is registered both in a nested unit and outside it, but for ignored.

    Raises:
        ParameterError: names both places.
    """
    owner: dict[int, str] = {}
    prefixes, beside = _unit_prefixes(module), {id(param) for param in ignored}
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) in beside:
            continue
        prefix = max((p for p in prefixes if name.startswith(p)), key=len, default="")
        first = owner.setdefault(id(param), f"{prefix}\0{name}")
        if first.split("\0")[0] != prefix:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{name}' is tied to "
                f"'{first.split(chr(0))[1]}' in another unit, but tied parameters must share a "
                "unit. Shard their common parent only."
            )


def _unit_prefixes(module: nn.Module) -> list[str]:
    return [
        f"{name}." for name, child in module.named_modules() if isinstance(child, ShardedModule)
    ]


def _make_unit(
    module: nn.Module,
    planned: _UnitPlan,
    params: dict[str, nn.Parameter],
    comms: CommGroups,
    schedule: Schedule,
) -> Unit:
    parts = [
        ShardedParams(
            segment,
            [params[spec.name] for spec in segment.layout.specs],
            comms=comms,
            options=planned.options,
            device=planned.device,
        )
        for segment in planned.segments
    ]
    sites = [site for part in parts for site in _param_sites(module, part)]
    unit = Unit(
        parts,
        sites,
        comms=comms,
        options=planned.options,
        schedule=schedule,
        ignored=planned.ignored,
        module=module,
    )
    now = {
        spec.name: param
        for part in parts
        for spec, param in zip(part.segment.layout.specs, part.params, strict=True)
    }
    replaced = [name for name, param in params.items() if now[name] is not param]
    if replaced:
        unit.sites.swap_out()
    for name in replaced:
        mark_replaced(params[name], name=name)
    unit.owners = Owner(UNIT, module, now.items()), own_ignored(module, planned.ignored)
    return unit


def _param_sites(module: nn.Module, part: ShardedParams) -> Iterator[ParamSite]:
    for index, spec in enumerate(part.segment.layout.specs):
        for name in spec.names:
            _, owner, key = place_of(module, name)
            yield ParamSite(owner._parameters, key, part, index)

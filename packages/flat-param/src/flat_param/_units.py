"""Edge: `fully_shard` turns a module into a sharded unit, in place, by swapping its class.

The swap adds a `__call__` around the module's own, so parameters are whole before the first
forward hook of the module runs and until after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ._clip import clip_, lane_norm
from ._comm import CommCount
from ._errors import ParameterError, StateError
from ._groups import Lanes, make_lanes
from ._guards import by_lane, install_guards
from ._layout import plan_segments
from ._materialize import broadcast_module, materialize
from ._schedule import Schedule
from ._shard import Boundary
from ._sharded_params import ShardedParams
from ._spec import ParamSpec, collect_params
from ._strategy import MixedPrecision, Strategy, UnitOptions
from ._unit import Slot, Unit
from ._whole import load_whole_state, units_below, whole_params, whole_state

M = TypeVar("M", bound=nn.Module)


class ShardedModule(nn.Module):
    """What `fully_shard` adds to a module's class. Not to be made by hand.

    Methods that communicate must be called on every rank.
    """

    _flat_param: Unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with whole parameters. Collective."""
        unit = self._flat_param
        args, kwargs = unit.before_forward(args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)
        except BaseException:
            unit.schedule.stop()
            raise
        unit.after_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank; the first backward after it sums them all.

        The strategies that keep parameters whole (NO_SHARD, SHARD_GRAD_OP) then communicate
        nothing; FULL_SHARD still gathers parameters, as it promises not to keep them.
        """
        schedule = self._flat_param.schedule
        before, schedule.sync = schedule.sync, False
        try:
            yield
        finally:
            schedule.sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`. Collective.

        Returns:
            The norm before clipping, the same on every rank.
        """
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        norm = lane_norm(by_lane(grads).items(), norm_type)
        clip_(grads, norm, max_norm)
        return norm

    @contextmanager
    def whole_params(self, *, write_back: bool = False) -> Iterator[None]:
        """Put whole parameters, in their own dtype, in the module for a while. Collective.

        Args:
            write_back: keep what was written to them; every rank must write the same.
        """
        with whole_params(self, write_back=write_back):
            yield

    def comm_counts(self) -> dict[str, CommCount]:
        """What this rank has communicated since the last call, by kind of collective."""
        log = self._flat_param.schedule.log
        counts = dict(log.counts)
        log.reset()
        return counts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's state dict: same keys, whole tensors. Collective."""
        return whole_state(self, super().state_dict, *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a plain module's state dict; each rank keeps its part. Not a collective.

        Args:
            state_dict: whole tensors.
            strict: as in `torch.nn.Module.load_state_dict`.
            assign: has no meaning here; values are always copied.
        """
        return load_whole_state(self, super().load_state_dict, state_dict, strict=strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        super()._apply(fn, recurse)
        for unit in units_below(self) if recurse else (self._flat_param,):
            unit.rebind()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        raise StateError(
            f"flat_param.fully_shard: {type(self).__name__} cannot be copied, but a sharded module "
            "holds process groups. Copy the plain module before sharding, or load its state_dict()."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"flat_param.fully_shard: {type(self).__name__} cannot be pickled, but a sharded "
            "module holds process groups. Save its state_dict(), or use save_sharded."
        )


def fully_shard(
    module: M,
    *,
    strategy: Strategy | str = Strategy.FULL_SHARD,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    mixed_precision: MixedPrecision | None = None,
    boundary: Boundary = "element",
    cpu_offload: bool = False,
    forward_prefetch: bool = True,
    backward_prefetch: bool = True,
    device: torch.device | str | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
) -> M:
    """Shard a module's parameters over ranks, in place, and return the module.

    Call it on inner modules first, then on the module around them, on every rank alike. Inner
    modules become units of their own; what they leave belongs to the outer unit. Parameters keep
    their identity, so an optimizer made before still trains, and one made after sees this
    rank's pieces. Collective: every rank of the world must call it.

    Args:
        module: of any kind that is called; its parameters are on one device, or on meta.
        strategy: what is divided between ranks, see `Strategy`.
        mesh: ranks to shard over; for HYBRID_SHARD the axes (replicate, shard).
        process_group: the same for one axis; default: all ranks.
        mixed_precision: dtypes of computing and of summing gradients.
        boundary: "element", or "row" or "tensor" for optimizers that need whole rows or tensors.
        cpu_offload: keep shards, gradients and optimizer state in CPU memory.
        forward_prefetch: gather the next unit while this one computes, in forward.
        backward_prefetch: the same in backward.
        device: where to compute; default: where the parameters are, or the CPU for meta.
        init_fn: called on each module whose meta parameters have been allocated; default:
            its own `reset_parameters`.
        sync_module_states: start from the first rank's parameters and buffers.

    Returns:
        The module, of a subclass of its class, with `_flat_param`; see `ShardedModule`.

    Raises:
        ParameterError: a weight is tied to one in another unit, or devices are mixed.
        StateError: the module is sharded already, or no process group is there.
    """
    if isinstance(module, ShardedModule):
        raise StateError(
            f"flat_param.fully_shard: {type(module).__name__} is sharded already, but a module is "
            "one unit. Shard its parts first and then the module around them."
        )
    options = UnitOptions(
        Strategy(strategy),
        mixed_precision or MixedPrecision(),
        boundary,
        cpu_offload,
        forward_prefetch,
        backward_prefetch,
    )
    inner = tuple(units_below(module))
    check_ties(module)
    materialize(module, device=device, init_fn=init_fn)
    specs, params = own_params(module)
    place = _one_device(specs, params) if device is None else torch.device(device)
    schedule = Schedule()
    lanes = make_lanes(options.strategy, mesh=mesh, process_group=process_group, log=schedule.log)
    if sync_module_states:
        broadcast_module(module, params, lanes.reduce, lanes.replicate)
    for unit in inner:
        schedule.merge(unit.schedule)
    schedule.units.append(_make_unit(module, specs, params, lanes, options, schedule, place))
    install_guards()
    return _swap_class(module, schedule.units[-1])


def own_params(module: nn.Module) -> tuple[tuple[ParamSpec, ...], tuple[nn.Parameter, ...]]:
    """The parameters that no nested unit has."""
    taken = [param for unit in units_below(module) for part in unit.parts for param in part.params]
    return collect_params(module, ignored=taken)


def check_ties(module: nn.Module) -> None:
    """Refuse a parameter that is registered both in a nested unit and outside it.

    Raises:
        ParameterError: names both places.
    """
    owner: dict[int, str] = {}
    prefixes = _unit_prefixes(module)
    for name, param in module.named_parameters(remove_duplicate=False):
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


def _one_device(specs: tuple[ParamSpec, ...], params: tuple[nn.Parameter, ...]) -> torch.device:
    for spec, param in zip(specs, params, strict=True):
        if param.device != params[0].device:
            raise ParameterError(
                f"flat_param.fully_shard: parameter '{spec.name}' is on {param.device} and "
                f"'{specs[0].name}' on {params[0].device}, but a unit computes on one device. "
                "Pass device=, or move the module first."
            )
    return params[0].device if params else torch.device("cpu")


def _make_unit(
    module: nn.Module,
    specs: tuple[ParamSpec, ...],
    params: tuple[nn.Parameter, ...],
    lanes: Lanes,
    options: UnitOptions,
    schedule: Schedule,
    device: torch.device,
) -> Unit:
    by_name = dict(zip((spec.name for spec in specs), params, strict=True))
    segments = plan_segments(specs) if specs else ()
    parts = [
        ShardedParams(
            segment,
            [by_name[spec.name] for spec in segment.layout.specs],
            lanes=lanes,
            options=options,
            device=device,
        )
        for segment in segments
    ]
    slots = [slot for part in parts for slot in _slots(module, part)]
    return Unit(parts, slots, lanes=lanes, options=options, schedule=schedule)


def _slots(module: nn.Module, part: ShardedParams) -> Iterator[Slot]:
    for index, spec in enumerate(part.segment.layout.specs):
        for name in spec.names:
            path, _, key = name.rpartition(".")
            yield Slot(module.get_submodule(path)._parameters, key, part, index)


def _swap_class(module: M, unit: Unit) -> M:
    cls = type(module)
    object.__setattr__(module, "_flat_param", unit)
    module.__class__ = type(f"Sharded{cls.__name__}", (ShardedModule, cls), {})
    return module
